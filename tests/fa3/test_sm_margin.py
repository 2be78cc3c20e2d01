"""``sm_margin``: SMs that a call leaves to others, in its forward and in its backward."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from compare import assert_bitwise, assert_within

import flash_attn_interface as fa3
from flash_attn import explain
from flash_attn_3 import _C  # noqa: F401  defines the operators
from tests.devices import GPU
from tests.kernels import explained, library

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
SMS = library.DEVICES[90][1]


@pytest.fixture
def fewest_sms(monkeypatch) -> Iterator[Callable[[], int]]:
    """The fewest SMs that a call took the emulated GPU to have since it was asked last."""
    with library.serving(monkeypatch, 90):
        yield ctypes.CDLL(library._path).fewest_sms_seen


def tensors(dtype: torch.dtype = BF16) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {name: torch.randn(1, 150, 2, 64).to(dtype) for name in "qkv"}


def packed(dtype: torch.dtype = BF16) -> dict:
    ends = torch.tensor([0, 150], dtype=torch.int32)
    return {name: x[0] for name, x in tensors(dtype).items()} | {
        "cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": 150, "max_seqlen_k": 150,
    }  # fmt: skip


def cache() -> dict:
    q, k, v = tensors().values()
    return {"q": q[:, :20], "k_cache": k, "v_cache": v, "cache_seqlens": 100}


FORWARDS = {
    "dense": lambda: partial(fa3.flash_attn_func, **tensors()),
    "codes": lambda: partial(fa3.flash_attn_func, **tensors(FP8)),
    "codes of packed rows": lambda: partial(fa3.flash_attn_varlen_func, **packed(FP8)),
    "packed": lambda: partial(fa3.flash_attn_varlen_func, **packed()),
    "qkvpacked": lambda: partial(
        fa3.flash_attn_qkvpacked_func, torch.stack([*tensors().values()], 2)
    ),
    "cache": lambda: partial(fa3.flash_attn_with_kvcache, **cache()),
    "private": lambda: partial(fa3._flash_attn_forward, **tensors()),
    "operator": lambda: partial(torch.ops.flash_attn_3.fwd, **tensors()),
}


def first(result) -> torch.Tensor:
    return result[0] if isinstance(result, tuple | list) else result


@pytest.mark.parametrize("name", FORWARDS)
def test_forward(name, fewest_sms):
    call = FORWARDS[name]()
    fewest_sms()
    expected = first(call())
    assert fewest_sms() == SMS
    got = first(call(sm_margin=1))
    assert fewest_sms() == SMS - 1
    assert_bitwise("out", got, expected)


@pytest.mark.parametrize("arguments", [tensors, packed], ids=["dense", "packed"])
def test_backward_of_a_forward(arguments, fewest_sms):
    given = arguments()
    for name in "qkv":
        given[name].requires_grad_()
    function = fa3.flash_attn_varlen_func if "cu_seqlens_q" in given else fa3.flash_attn_func
    out = first(function(**given, sm_margin=1))
    fewest_sms()
    out.sum().backward()
    assert fewest_sms() == SMS - 1
    first(function(**given)).sum().backward()
    assert fewest_sms() == SMS


@pytest.mark.parametrize("way", ["private", "operator"])
def test_backward_itself(way, fewest_sms):
    q, k, v = tensors().values()
    out, lse, *_ = fa3._flash_attn_forward(q, k, v)
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    call = fa3._flash_attn_backward if way == "private" else torch.ops.flash_attn_3.bwd
    fewest_sms()
    call(torch.ones_like(out), q, k, v, out, lse, dq=dq, dk=dk, dv=dv, sm_margin=1)
    assert fewest_sms() == SMS - 1


@pytest.mark.parametrize("head_dim", [64, 512])
def test_two_sms_stay(head_dim, fewest_sms):
    """With 512 columns a cluster of the backward has four CTAs."""
    x = torch.randn(1, 70, 1, head_dim).to(BF16).requires_grad_()
    (expected,) = torch.autograd.grad(fa3.flash_attn_func(x, x, x).sum(), x)
    fewest_sms()
    (got,) = torch.autograd.grad(fa3.flash_attn_func(x, x, x, sm_margin=100).sum(), x)
    assert fewest_sms() == 2
    assert_within("gradient", got, expected, 1e-2)


@pytest.mark.parametrize("name", FORWARDS)
def test_refused(name):
    with pytest.raises(ValueError, match=r"^sm_margin: got -1; 0 SMs .* or more are needed$"):
        FORWARDS[name]()(sm_margin=-1)


def test_explained(monkeypatch):
    explained.simulate(monkeypatch, 90)
    q = torch.empty(4, 4096, 16, 128, dtype=BF16, device="meta")
    whole, rest = (explain(q, q, q, causal=True, gpu="H200", sm_margin=n) for n in (0, 66))
    assert rest.microseconds > 1.8 * whole.microseconds


@pytest.mark.parametrize(
    ("sms", "margin", "left"),
    [(132, 0, 132), (132, 20, 112), (132, 131, 2), (8, 2**30, 2), (1, 5, 1)],
)
def test_some_sms_are_always_taken(sms, margin, left):
    assert library.module().sms_left(sms, margin) == left


@pytest.mark.parametrize("device", [GPU])
def test_grids(device, tmp_path):
    """What a profiler sees of a Hopper GPU's launches."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("about Hopper's kernels")
    q, k, v = (torch.randn(2, 4096, 16, 128, dtype=BF16, device=device) for _ in range(3))
    for x in (q, k, v):
        x.requires_grad_()

    def blocks(margin: int) -> int:
        """The largest of the two kernels that fill the GPU."""
        with torch.profiler.profile() as seen:
            first(fa3.flash_attn_func(q, k, v, causal=True, sm_margin=margin)).sum().backward()
            torch.cuda.synchronize()
        seen.export_chrome_trace(str(tmp_path / "trace.json"))
        events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
        grids = [
            event["args"]["grid"][0]
            for event in events
            if event.get("cat") == "kernel"
            and any(kernel in event["name"] for kernel in ("::forward_kernel", "::backward_kernel"))
        ]
        assert len(grids) == 2
        return max(grids)

    sms = torch.cuda.get_device_properties(0).multi_processor_count
    assert (blocks(0), blocks(20)) == (sms, sms - 20)
