"""Writes are counted: autograd refuses values that an operation has overwritten since."""

from __future__ import annotations

import pytest
import torch

import flash_attn_2_cuda
from flash_attn import flash_attn_with_kvcache
from flash_attn.dispatch import ops, rotary

BF16 = torch.bfloat16


def cache_call(device: str, new: int = 2, **changes) -> dict:
    """q (2, 2, 4, 64), caches (2, 32, 2, 64), and new rows for positions 5 and 7 on."""
    call = {
        "q": torch.randn(2, 2, 4, 64, dtype=BF16, device=device),
        "k_cache": torch.randn(2, 32, 2, 64, dtype=BF16, device=device),
        "v_cache": torch.randn(2, 32, 2, 64, dtype=BF16, device=device),
        "cache_seqlens": torch.tensor([5, 7], dtype=torch.int32, device=device),
        "causal": True,
    }
    if new:
        call["k"] = torch.randn(2, new, 2, 64, dtype=BF16, device=device)
        call["v"] = torch.randn(2, new, 2, 64, dtype=BF16, device=device)
    return call | changes


def versions(*tensors: torch.Tensor) -> list[int]:
    return [x._version for x in tensors]


SCHEMAS = ops.SCHEMAS | rotary.SCHEMAS


@pytest.mark.parametrize("name", SCHEMAS)
def test_operations_that_write_count(name):
    writes = "!" in SCHEMAS[name]
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    assert has_kernel(f"flash_attn::{name}", "ADInplaceOrView") == writes


def test_an_append_is_counted_once(device):
    call = cache_call(device)
    before = {name: x._version for name, x in call.items() if isinstance(x, torch.Tensor)}
    flash_attn_with_kvcache(**call)
    for name, version in before.items():
        assert call[name]._version == version + (name in ("k_cache", "v_cache")), name


def test_a_call_that_only_reads_is_not_counted(device):
    call = cache_call(device, new=0)
    flash_attn_with_kvcache(**call)
    assert versions(call["k_cache"], call["v_cache"]) == [0, 0]


def test_a_call_that_raises_is_not_counted(device):
    call = cache_call(device)
    operation = torch.ops.flash_attn._flash_attn_with_kvcache
    with pytest.raises((ValueError, RuntimeError, IndexError)):
        operation(
            call["q"], call["k_cache"], call["v_cache"], call["k"][:, :, :1], call["v"], None,
            None, call["cache_seqlens"][:1], None, None, None, 1.0, True, -1, -1, 0.0, True, None,
            0,
        )  # fmt: skip
    assert versions(call["k_cache"], call["v_cache"]) == [0, 0]


@pytest.mark.parametrize("name", ["k_cache", "v_cache"])
def test_backward_refuses_an_overwritten_cache(device, name):
    call = cache_call(device)
    w = torch.ones((), dtype=BF16, device=device, requires_grad=True)
    y = w * call[name]
    flash_attn_with_kvcache(**call)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_views_share_the_counter(device):
    """A cache is often one layer's slice of a tensor of all layers."""
    layers = torch.randn(3, 2, 2, 32, 2, 64, dtype=BF16, device=device)
    call = cache_call(device, k_cache=layers[1, 0], v_cache=layers[1, 1])
    flash_attn_with_kvcache(**call)
    assert layers._version == 2


def test_paged_append_with_rotary_is_counted(device):
    cos = torch.randn(32, 16, dtype=BF16, device=device)
    table = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32, device=device)
    pages = torch.randn(2, 4, 16, 2, 64, dtype=BF16, device=device).unbind()
    call = cache_call(device, k_cache=pages[0].clone(), v_cache=pages[1].clone())
    flash_attn_with_kvcache(**call, rotary_cos=cos, rotary_sin=cos, block_table=table)
    assert versions(call["k_cache"], call["v_cache"]) == [1, 1]


def test_a_head_dim_that_is_padded(device):
    call = {
        name: x[..., :60].contiguous() if isinstance(x, torch.Tensor) and x.dim() == 4 else x
        for name, x in cache_call(device).items()
    }
    flash_attn_with_kvcache(**call)
    assert all(version > 0 for version in versions(call["k_cache"], call["v_cache"]))


def test_inference_tensors(device):
    """They have no counter. Tensors from outside keep theirs, inside too."""
    outside = cache_call(device)
    with torch.inference_mode():
        inside = cache_call(device)
        expected = flash_attn_with_kvcache(**inside | {"k_cache": inside["k_cache"].clone()})
        out = flash_attn_with_kvcache(**inside)
        flash_attn_with_kvcache(**outside)
    assert torch.equal(out, expected)
    assert versions(outside["k_cache"], outside["v_cache"]) == [1, 1]
    with torch.no_grad():
        assert torch.equal(flash_attn_with_kvcache(**inside), expected)


@pytest.mark.parametrize("given", ["dq", "dk", "dv", "dq dk dv"])
@pytest.mark.parametrize("varlen", [False, True])
def test_gradients_that_are_given(device, given, varlen):
    shape = (24, 2, 64) if varlen else (2, 12, 2, 64)
    q, k, v, out, dout = (torch.randn(*shape, dtype=BF16, device=device) for _ in range(5))
    lse = torch.randn(*((2, 24) if varlen else (2, 2, 12)), device=device)
    buffers = {
        name: torch.empty_like(q) if name in given.split() else None for name in ("dq", "dk", "dv")
    }
    sinks = torch.zeros(2, device=device)
    ds_aux = torch.empty_like(sinks)
    cu = torch.tensor([0, 12, 24], dtype=torch.int32, device=device)
    lengths = (cu, cu, 12, 12) if varlen else ()
    name = "_flash_attn_varlen_backward" if varlen else "_flash_attn_backward"
    getattr(torch.ops.flash_attn, name)(
        dout, q, k, v, out, lse, *buffers.values(), *lengths, 0.0, 0.125, True, -1, -1, 0.0, None,
        False, s_aux=sinks, ds_aux=ds_aux,
    )  # fmt: skip
    assert all(x is None or x._version == 1 for x in buffers.values())
    assert ds_aux._version == 1
    assert versions(q, k, v, out, dout, lse, sinks) == [0] * 7


def test_backward_refuses_a_gradient_that_was_overwritten(device):
    q, k, v, out, dout = (torch.randn(2, 12, 2, 64, dtype=BF16, device=device) for _ in range(5))
    lse = torch.randn(2, 2, 12, device=device)
    dq, dk, dv = (torch.zeros_like(q) for _ in range(3))
    w = torch.ones((), dtype=BF16, device=device, requires_grad=True)
    y = w * dk
    flash_attn_2_cuda.bwd(
        dout, q, k, v, out, lse, dq, dk, dv, None, 0.0, 0.125, True, -1, -1, 0.0, False
    )
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_out_that_is_given(device):
    q = torch.randn(2, 12, 2, 64, dtype=BF16, device=device)
    out = torch.empty_like(q)
    flash_attn_2_cuda.fwd(q, q, q, out, None, 0.0, 0.125, True, -1, -1, 0.0, False)
    assert out._version == 1


def test_compiled(device):
    """The graph writes the caller's tensor, and says so."""

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(call):
        return flash_attn_with_kvcache(**call)

    eager, compiled = cache_call(device), None
    compiled = {n: x.clone() if isinstance(x, torch.Tensor) else x for n, x in eager.items()}
    expected = flash_attn_with_kvcache(**eager)
    with torch.no_grad():
        out = step(compiled)
    assert torch.equal(out, expected)
    for name in ("k_cache", "v_cache"):
        assert torch.equal(compiled[name], eager[name])
        assert compiled[name]._version > 0
