"""``torch.ops.flash_attn_3``: results, opcheck, without data, under ``torch.compile``."""

from __future__ import annotations

import pytest
import torch
from compare import assert_accurate, assert_bitwise, assert_within
from reference import attention_ref, standard_attention
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.library import opcheck

import flash_attn_interface as fa3

OPS = torch.ops.flash_attn_3
USED = [3, 0]


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def qkv(device: str, *shape: int, grad: bool = False, rows_k: int | None = None) -> list[Tensor]:
    keys = shape if rows_k is None else (*shape[:-1], rows_k)
    shapes = (*shape, 4, 32), (*keys, 2, 32), (*keys, 2, 32)
    return [torch.randn(s, device=device).bfloat16().requires_grad_(grad) for s in shapes]


def ints(device: str, *values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def by_position(q, k, v, out, cu, most, scale, causal, seqused_k=None, table=None) -> tuple:
    """All 34, as torch's own registration of FA3 passes them."""
    lengths = (cu, cu, None, None, seqused_k, most, most)
    none = (None,) * 8
    return (q, k, v, None, None, None, out, *lengths, table, *none, scale, causal, -1, -1, 0, 0.0,
            True, None, 1, None, 24)  # fmt: skip


@pytest.mark.parametrize("packed", [False, True])
def test_forward_and_backward_by_position(packed, device):
    cu, most = (ints(device, 0, 4, 10), 6) if packed else (None, 10)
    q, k, v = qkv(device, *((10,) if packed else (2, 10)))
    out = torch.full((4, *q.shape[:-2], 32), 7.0, device=device).bfloat16()
    out = out.movedim(0, -2)  # a strided view
    result, lse, *rest = OPS.fwd(*by_position(q, k, v, out, cu, most, 0.2, True))
    assert result.data_ptr() == out.data_ptr()
    assert [x.numel() for x in rest] == [0, 0]
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    lengths = (cu, cu, most, most) if packed else ()
    function = fa3.flash_attn_varlen_func if packed else fa3.flash_attn_func
    expected, expected_lse = function(
        *leaves, *lengths, softmax_scale=0.2, causal=True, sm_margin=24, return_attn_probs=True
    )
    assert_bitwise("out", out.contiguous(), expected.contiguous())
    assert_bitwise("lse", lse, expected_lse)
    dout = torch.randn_like(expected)
    gradients = [torch.full_like(x, 7.0) for x in (q, k, v)]
    softmax_d, *rest = OPS.bwd(
        dout, q, k, v, out, lse, *gradients, cu, cu, None, None, most, most, 0.2, True, -1, -1,
        0.0, True, 24,
    )  # fmt: skip
    assert len(rest) == 4
    assert softmax_d.shape == lse.shape
    theirs = torch.autograd.grad(expected, leaves, dout)
    for name, ours, grad in zip("qkv", gradients, theirs):
        assert_within(f"d{name}", ours, grad, 1e-2)


@pytest.mark.parametrize("dense", [False, True])
def test_backward_of_rows_in_use(dense, device):
    """Buffers are overwritten, also where no row is in use, and the same as autograd's."""
    shape = (2, 5) if dense else (10,)
    q, k, v = qkv(device, *shape)
    cu = None if dense else ints(device, 0, 5, 10)
    ends, used_q, used_k = ints(device, 0, 5, 10), ints(device, *USED), ints(device, 4, 5)
    leaves = [x.reshape(10, *x.shape[-2:]).clone().requires_grad_() for x in (q, k, v)]
    out, lse = fa3.flash_attn_varlen_func(
        *leaves, ends, ends, 5, 5, used_q, used_k, causal=True, return_attn_probs=True
    )
    dout = torch.randn_like(out)
    expected = torch.autograd.grad(out, leaves, dout)
    given = [x.detach().reshape(*shape, *x.shape[-2:]) for x in (dout, out)]
    if dense:
        lse = lse.detach().unflatten(1, shape).transpose(0, 1)
    gradients = [torch.full_like(x, 7.0) for x in (q, k, v)]
    softmax_d = fa3._flash_attn_backward(
        given[0], q, k, v, given[1], lse.detach(), cu, cu, used_q, used_k, 5, 5, *gradients,
        is_causal=True,
    )  # fmt: skip
    assert softmax_d.shape == lse.shape
    for name, ours, grad in zip("qkv", gradients, expected):
        assert_within(f"d{name}", ours.reshape(grad.shape), grad, 1e-2)
    assert not gradients[0].reshape(10, -1)[3:].any()
    assert not gradients[1].reshape(10, -1)[4:5].any()


@pytest.mark.parametrize("with_k", [False, True])
def test_dense_rows_in_use(with_k, device):
    q, k, v = qkv(device, 2, 5)
    used = {"seqused_q": ints(device, *USED)} | (
        {"seqused_k": ints(device, 4, 5)} if with_k else {}
    )
    out, lse, *_ = fa3._flash_attn_forward(q, k, v, causal=True, **used)
    assert out.shape == q.shape
    assert lse.shape == (2, 4, 5)
    keys = slice(0, 4 if with_k else 5)
    (ref, ref_lse, _), (std, _, _) = (
        f(q[:1, :3], k[:1, keys], v[:1, keys], causal=True)
        for f in (attention_ref, standard_attention)
    )
    assert_accurate("out", out[:1, :3], ref, std)
    assert_within("lse", lse[:1, :, :3], ref_lse, 1e-4)
    assert not out[0, 3:].any()
    assert not out[1].any()


def test_a_cache_through_the_operator(device):
    """seqused_k is cache_seqlens there, and the rotation's default the other one."""
    q, k, v = qkv(device, 2, 2)
    caches = [torch.randn(2, 12, 2, 32, device=device).bfloat16() for _ in "kv"]
    copies = [x.clone() for x in caches]
    table = [torch.rand(12, 8, device=device) for _ in "cs"]
    lengths = ints(device, 3, 9)
    out, lse, *_ = OPS.fwd(
        q, *caches, k, v, seqused_k=lengths, rotary_cos=table[0], rotary_sin=table[1],
        is_causal=True,
    )  # fmt: skip
    expected = fa3.flash_attn_with_kvcache(
        q, *copies, k, v, None, *table, lengths, causal=True, rotary_interleaved=False,
        return_softmax_lse=True,
    )  # fmt: skip
    for ours, theirs in zip((out, lse, *caches), (*expected, *copies)):
        assert_bitwise("result", ours, theirs)


def check(operation, args: tuple, **kwargs) -> None:
    operation(*args, **kwargs)
    opcheck(operation, args, kwargs)


def test_opcheck_forward(device):
    check(OPS.fwd.default, tuple(qkv(device, 2, 5, grad=True)), is_causal=True)
    q, k, v = qkv(device, 2, 5)
    check(OPS.fwd.default, (q, k, v), out=torch.empty_like(q), window_size_left=2)
    cu = ints(device, 0, 4, 10)
    check(
        OPS.fwd.default, tuple(qkv(device, 10, grad=True)), cu_seqlens_q=cu, cu_seqlens_k=cu,
        seqused_q=ints(device, 2, 5), seqused_k=ints(device, 4, 6), max_seqlen_q=6, max_seqlen_k=6,
    )  # fmt: skip


def test_opcheck_backward(device):
    q, k, v = qkv(device, 2, 5)
    out, lse, *_ = OPS.fwd(q, k, v)
    gradients = [torch.empty_like(x) for x in (q, k, v)]
    check(OPS.bwd.default, (torch.randn_like(out), q, k, v, out, lse, *gradients))


def test_opcheck_forward_in_pages(device):
    (q,) = qkv(device, 10)[:1]
    k, v = (torch.randn(4, 16, 2, 32, device=device).bfloat16() for _ in "kv")
    table = ints(device, 3, 0, 2, -1).view(2, 2)
    check(
        OPS.fwd.default, (q, k, v), cu_seqlens_q=ints(device, 0, 4, 10), max_seqlen_q=6,
        page_table=table, seqused_k=ints(device, 20, 7), is_causal=True,
    )  # fmt: skip


@pytest.mark.parametrize("packed", [False, True])
def test_opcheck_backward_of_rows_in_use(packed, device):
    q, k, v = qkv(device, *((10,) if packed else (2, 5)))
    ends = ints(device, 0, 5, 10) if packed else None
    given = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": 5, "max_seqlen_k": 5,
             "seqused_q": ints(device, *USED), "seqused_k": ints(device, 4, 5)}  # fmt: skip
    out, lse, *_ = OPS.fwd(q, k, v, **given)
    gradients = [torch.empty_like(x) for x in (q, k, v)]
    check(OPS.bwd.default, (torch.randn_like(out), q, k, v, out, lse, *gradients), **given)


def test_opcheck_the_others(device):
    parts = torch.randn(3, 2, 5, 4, 8, device=device), torch.randn(3, 2, 5, 4, device=device)
    check(OPS.fwd_combine.default, parts)
    out = torch.empty(2, 5, 4, 8, device=device)
    check(OPS.fwd_combine.default, parts, out=out)
    shape = (2, 3, 4, 4, 2, 64, 64, torch.bfloat16, ints(device, 1, 1))
    check(OPS.get_scheduler_metadata.default, shape)


def test_without_data():
    with FakeTensorMode():
        q, k, v = (torch.empty(2, 5, 4, 32, dtype=torch.bfloat16) for _ in "qkv")
        out, lse, *_ = OPS.fwd(q, k, v, is_causal=True)
        assert (out.shape, out.dtype) == (q.shape, q.dtype)
        assert (lse.shape, lse.dtype) == ((2, 4, 5), torch.float32)
        softmax_d, *_ = OPS.bwd(out, q, k, v, out, lse, q.clone(), k.clone(), v.clone())
        assert softmax_d.shape == lse.shape
        page = torch.empty(1, dtype=torch.int32)
        lengths = page.expand(2).contiguous()
        out, lse, *_ = OPS.fwd(q, k, v, seqused_k=lengths)
        assert out.shape == q.shape
        cu = torch.empty(3, dtype=torch.int32)
        new = k.flatten(0, 1)[:3]
        out, *_ = OPS.fwd(q, k, v, new, new, cu_seqlens_k_new=cu, seqused_k=lengths)
        assert out.shape == q.shape
        rows = q.flatten(0, 1)
        out, lse, *_ = OPS.fwd(
            rows, rows, rows, cu_seqlens_q=cu, cu_seqlens_k=cu, seqused_q=lengths
        )
        assert lse.shape == (4, 10)


@pytest.mark.parametrize("name", ["fwd", "flash_attn_func", "varlen", "cache", "append"])
def test_compiled(name, device):
    cu = ints(device, 0, 4, 10)
    new = torch.randn(10, 2, 32, device=device).bfloat16()
    call = {
        "fwd": lambda q, k, v: OPS.fwd(q, k, v, is_causal=True)[0],
        "flash_attn_func": lambda q, k, v: fa3.flash_attn_func(q, k, v, causal=True),
        "varlen": lambda q, k, v: fa3.flash_attn_varlen_func(
            q, k, v, cu, cu, 6, 6, ints(device, 2, 6), causal=True
        ),
        "cache": lambda q, k, v: fa3.flash_attn_with_kvcache(q, k, v, cache_seqlens=cu[1:]),
        "append": lambda q, k, v: fa3.flash_attn_with_kvcache(
            q, k, v, new, new, cache_seqlens=cu[:2], cu_seqlens_k_new=cu
        ),
    }[name]
    grad = name not in ("cache", "append")
    shape = (10,) if name == "varlen" else (2, 10)
    q, k, v = qkv(device, *shape, grad=grad)
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    results = []
    for function in (call, compiled):
        out = function(q, k, v)
        results.append([out, *torch.autograd.grad(out.sum(), [q, k, v])] if grad else [out])
    for ours, theirs in zip(*results):
        assert_within("result", ours, theirs, 1e-2)


# --- Results over disjoint keys as one ------------------------------------------------------------


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, None])
def test_combine(packed, dtype, device):
    q, k, v = (torch.randn(2, 9, 2, 16, dtype=torch.float64) for _ in "qkv")
    whole, whole_lse, _ = attention_ref(q, k, v)
    parts = [attention_ref(q, k[:, s], v[:, s])[:2] for s in (slice(0, 4), slice(4, 9))]
    out = torch.stack([p[0] for p in parts] + [torch.full_like(whole, float("nan"))]).float()
    lse = torch.stack([p[1] for p in parts] + [torch.full_like(whole_lse, float("-inf"))]).float()
    lse = lse.transpose(2, 3)  # heads last, strided
    whole_lse = whole_lse.transpose(1, 2)
    if packed:
        out, lse = out.flatten(1, 2), lse.flatten(1, 2)
        whole, whole_lse = whole.flatten(0, 1), whole_lse.flatten(0, 1)
    out, lse = out.to(device), lse.to(device)
    buffer = torch.empty(whole.shape, dtype=dtype or torch.float32, device=device)
    combined, combined_lse = fa3.flash_attn_combine(out, lse, buffer, dtype)
    assert combined is buffer
    assert_within("out", combined.double().cpu(), whole, 1e-2 if dtype else 1e-5)
    assert_within("lse", combined_lse.double().cpu(), whole_lse, 1e-5)
    with pytest.raises(ValueError, match="are needed"):
        fa3.flash_attn_combine(out, lse.transpose(-1, -2), None)


def test_combine_where_nothing_or_a_sink_alone_is_seen():
    out, lse = torch.full((2, 1, 2, 1, 4), float("nan")), torch.full((2, 1, 2, 1), -torch.inf)
    out[0, 0, 1], lse[0, 0, 1] = 0.0, torch.inf
    combined, combined_lse = fa3.flash_attn_combine(out, lse)
    assert not combined.any()
    assert combined_lse.flatten().tolist() == [-torch.inf, torch.inf]
    with pytest.raises(ValueError, match="floating dtypes"):
        fa3.flash_attn_combine(out.int(), lse)
