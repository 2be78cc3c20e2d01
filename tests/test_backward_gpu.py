"""What of the backward only a GPU can break: repeatability, sizes, graphs, calls by hand."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from cases import BF16, Case, make_inputs, rng_state
from compare import assert_accurate, assert_bitwise
from reference import attention_ref, gradients, standard_attention
from torch import Tensor

from flash_attn import flash_attn_func, flash_attn_varlen_func

HEAD_DIMS = [(32, 32), (64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256)]


def by_hand(
    x, lse: Tensor, dout: Tensor | None = None, deterministic: bool = False, into=None, **keywords
):
    """softmax_d, dq, dk, dv of the op itself, with dout in the place of out."""
    dout = x.dout if dout is None else dout
    out = into or [torch.full_like(t, float("nan")) for t in (x.q, x.k, x.v)]
    options = {"dropout_p": 0.0, "softmax_scale": 0.125, "causal": True, "window_size_left": -1}
    options |= {"window_size_right": -1, "softcap": 0.0, "alibi_slopes": None} | keywords
    op = torch.ops.flash_attn._flash_attn_backward
    softmax_d = op(
        dout, x.q, x.k, x.v, dout, lse, *out, deterministic=deterministic, **options
    )  # fmt: skip
    return softmax_d, *out


def inputs(cuda, d: int, dv: int, **shape):
    x = make_inputs(Case(d=d, dv=dv, layout="contiguous", **shape), cuda)
    return x, torch.full(x.dlse.shape, 4.0, device=cuda)


@pytest.mark.parametrize(("d", "dv"), HEAD_DIMS)
@pytest.mark.parametrize("options", [{}, {"causal": False}, {"window_size_left": 100}], ids=str)
@pytest.mark.parametrize("heads_k", [4, 1])  # so few that groups are cut into parts
def test_deterministic_is_bitwise(cuda, d, dv, options, heads_k):
    x, lse = inputs(cuda, d, dv, b=3, h=8, hk=heads_k, sq=700, sk=900)
    first = by_hand(x, lse, deterministic=True, **options)
    for _ in range(100):
        again = by_hand(x, lse, deterministic=True, **options)
        for name, a, b in zip(("softmax_d", "dq", "dk", "dv"), again, first, strict=True):
            assert_bitwise(name, a, b)
    unordered = by_hand(x, lse, **options)
    # The order of a float32 sum: next to nothing of the largest dq, then rounded to bf16.
    order = 1e-6 * first[1].abs().max().item()
    torch.testing.assert_close(unordered[1], first[1], rtol=2**-7, atol=order)
    # Sums of dK and dV have an order of their own, whatever that of dQ.
    again = by_hand(x, lse, **options)
    assert_bitwise("dk", again[2], unordered[2])
    assert_bitwise("dv", again[3], unordered[3])


@pytest.mark.parametrize(("d", "dv"), HEAD_DIMS)
def test_deterministic_a_thousand_times_beside_other_work(cuda, d, dv):
    """Thread blocks come in ever another order while products take multiprocessors away."""
    x, lse = inputs(cuda, d, dv, b=1, h=16, hk=4, sq=1100, sk=1100)
    first = by_hand(x, lse, deterministic=True)
    busy = torch.randn(1024, 1024, device=cuda, dtype=torch.bfloat16)
    beside = torch.cuda.Stream()
    differs = torch.zeros((), device=cuda, dtype=torch.int64)
    for turn in range(1000):
        with torch.cuda.stream(beside):
            for _ in range(turn % 4):
                busy @ busy
        again = by_hand(x, lse, deterministic=True)
        differs += sum((a != b).sum() for a, b in zip(again, first, strict=True))
    assert differs.item() == 0


@pytest.mark.parametrize(("d", "dv"), HEAD_DIMS)
@pytest.mark.parametrize("options", [{}, {"causal": False}, {"window_size_left": 100}], ids=str)
def test_ordered_dq_beside_other_work(cuda, d, dv, options):
    """Short dense calls add dQ in order: whichever CTA is late, nothing is missed."""
    x, lse = inputs(cuda, d, dv, b=20, h=16, hk=16, sq=600, sk=600)
    first = by_hand(x, lse, deterministic=True, **options)
    order = 1e-6 * first[1].abs().max().item()
    busy = torch.randn(1024, 1024, device=cuda, dtype=torch.bfloat16)
    beside = torch.cuda.Stream()
    for turn in range(100):
        with torch.cuda.stream(beside):
            for _ in range(turn % 4):
                busy @ busy
        again = by_hand(x, lse, deterministic=True, **options)
        for name, a, b in zip(("softmax_d", "dq", "dk", "dv"), again, first, strict=True):
            assert_bitwise(name, a, b)
        unordered = by_hand(x, lse, **options)
        torch.testing.assert_close(unordered[1], first[1], rtol=2**-7, atol=order)
        assert_bitwise("dk", unordered[2], first[2])
        assert_bitwise("dv", unordered[3], first[3])


@pytest.mark.parametrize(("d", "dv"), HEAD_DIMS)
@pytest.mark.parametrize("heads_k", [8, 1])
def test_scratch_memory_is_that_of_dq(cuda, d, dv, heads_k):
    x, lse = inputs(cuda, d, dv, b=2, h=8, hk=heads_k, sq=4096, sk=1500)
    out = [torch.empty_like(t) for t in (x.q, x.k, x.v)]
    rows = x.q.shape[:3].numel()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    by_hand(x, lse, into=out, deterministic=True)
    scratch = torch.cuda.max_memory_allocated() - before
    # The least head_dim of a kernel; counters of row blocks, and what the allocator rounds up to.
    dq = rows * 4 * max(d, 64)
    parts = max(dq, 32 * 2**20) if heads_k < 8 else 0
    assert scratch <= dq + parts + rows * 12 + 4 * 2**20


@pytest.mark.parametrize(("d", "dv"), HEAD_DIMS)
def test_deterministic_with_mods(cuda, d, dv):
    x, lse = inputs(cuda, d, dv, b=2, h=4, hk=1, sq=300, sk=500)
    options = {"dropout_p": 0.2, "rng_state": rng_state(cuda), "softcap": 10.0}
    first = by_hand(x, lse, deterministic=True, **options)
    for _ in range(10):
        again = by_hand(x, lse, deterministic=True, **options)
        assert all(torch.equal(a, b) for a, b in zip(again, first, strict=True))


def check_slice(q, k, v, dout, at: slice, causal: bool = True) -> None:
    """Gradients of a whole call against the reference on its entries `at` of the batch."""
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    found = torch.autograd.grad(flash_attn_func(*leaves, causal=causal), leaves, dout)
    named = {"q": q[at], "k": k[at], "v": v[at]}
    wanted, standard = (
        gradients(lambda q, k, v, f=f: f(q, k, v, causal=causal)[:2], named, dout[at], dtype=dtype)[
            2
        ]
        for f, dtype in ((attention_ref, torch.float64), (standard_attention, None))
    )
    for name, gradient in zip("qkv", found, strict=True):
        assert_accurate(f"d{name}", gradient[at], wanted[name], standard[name])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads", [(8, 8), (8, 4), (8, 2)])
@pytest.mark.parametrize("d", [64, 96, 128])
def test_many_short_sequences(cuda, causal, heads, d):
    """On Hopper blocks of keys hand sums on, or one thread block takes those of two heads."""
    heads_q, heads_k = heads
    q, dout = torch.randn(2, 66, 450, heads_q, d, device=cuda, dtype=BF16)
    k, v = torch.randn(2, 66, 450, heads_k, d, device=cuda, dtype=BF16)
    for at in (slice(31, 33), slice(64, 66)):
        check_slice(q, k, v, dout, at, causal)
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    out = flash_attn_func(*leaves, causal=causal, deterministic=True)
    first, again = (torch.autograd.grad(out, leaves, dout, retain_graph=True) for _ in range(2))
    for name, a, b in zip("qkv", again, first, strict=True):
        assert_bitwise(f"d{name}", a, b)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("d", "dv"), HEAD_DIMS)
def test_ordered_dq_is_right(cuda, causal, d, dv):
    q, k = torch.randn(2, 24, 520, 16, d, device=cuda, dtype=BF16)
    v, dout = torch.randn(2, 24, 520, 16, dv, device=cuda, dtype=BF16)
    check_slice(q, k, v, dout, slice(0, 1), causal)
    check_slice(q, k, v, dout, slice(23, 24), causal)  # whose D a warp finds, not the pass before
    leaves = [k.requires_grad_(), v.requires_grad_()]
    alone = torch.autograd.grad(flash_attn_func(q, *leaves, causal=causal), leaves, dout)
    q.requires_grad_()
    with_q = torch.autograd.grad(flash_attn_func(q, *leaves, causal=causal), [q, *leaves], dout)
    for name, a, b in zip("kv", alone, with_q[1:], strict=True):  # in a kernel without ordered dQ
        assert_bitwise(f"d{name}", a, b)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads", [(16, 1), (12, 2), (32, 8)])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_few_kv_heads(cuda, causal, heads, d):
    """Whose groups are cut into parts, so that there are thread blocks for the whole GPU."""
    h, hk = heads
    x = make_inputs(
        Case(b=2, h=h, hk=hk, sq=900, sk=1100, d=d, causal=causal, layout="contiguous"), cuda
    )
    check_slice(x.q, x.k, x.v, x.dout, slice(1, 2), causal)


@pytest.mark.parametrize("shape", [(70_000, 1, 1), (9, 8_000, 1_000)])
def test_more_than_65535_batches_or_heads(shape, cuda):
    b, h, hk = shape
    x = make_inputs(Case(b=b, h=h, hk=hk, sq=3, sk=5, causal=True, layout="contiguous"), cuda)
    check_slice(x.q, x.k, x.v, x.dout, slice(b - 2, b))


def test_more_than_2_31_elements(cuda, need_memory):
    """Of q, of its gradient and of the sums in fp32."""
    need_memory(60)
    batch = 2**31 // (64 * 64 * 64) + 2
    q, dout = torch.randn(2, batch, 64, 64, 64, dtype=BF16, device=cuda)
    k = torch.randn(batch, 70, 1, 64, dtype=BF16, device=cuda)
    check_slice(q, k, k, dout, slice(batch - 1, batch))


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_no_host_synchronisation(cuda):
    x = make_inputs(Case(causal=True, layout="contiguous"), cuda)
    leaves = [t.requires_grad_() for t in (x.q, x.k, x.v)]
    cu = torch.tensor([0, x.q.shape[1]], dtype=torch.int32, device=cuda)
    longest = x.q.shape[1]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for deterministic in (False, True):
            out = flash_attn_func(*leaves, causal=True, deterministic=deterministic)
            torch.autograd.grad(out, leaves, x.dout)
            rows = [t.detach()[0].requires_grad_() for t in leaves]
            out = flash_attn_varlen_func(*rows, cu, cu, longest, longest, causal=True)
            torch.autograd.grad(out, rows, x.dout[0])
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize(("b", "s"), [(2, 300), (40, 600)])  # the second with ordered dQ
def test_capture_in_a_graph(cuda, d, b, s, deterministic):
    x, lse = inputs(cuda, d, d, b=b, h=8, hk=8, sq=s, sk=s)
    expected = by_hand(x, lse, deterministic=True)
    dout = torch.zeros_like(x.dout)
    with torch.cuda.stream(torch.cuda.Stream()):
        by_hand(x, lse, dout, deterministic)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = by_hand(x, lse, dout, deterministic)
    dout.copy_(x.dout)
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_calls_of_the_op_by_hand_cannot_fault(cuda):
    """A kernel that read past its operands would take the process down."""
    x, lse = inputs(cuda, 64, 64, sq=20, sk=20)
    op = torch.ops.flash_attn._flash_attn_backward
    tail = (0.0, 0.125, False, -1, -1, 0.0, None, False)
    call = [x.dout, x.q, x.k, x.v, x.dout, lse, *map(torch.empty_like, (x.q, x.k, x.v))]
    wrong = {
        "dout": (0, x.dout[:, :-1]),
        "out": (4, x.dout[:, :, :1]),
        "softmax_lse": (5, lse[..., :-1]),
        "dq": (6, x.q[:, :-1]),
        "dk": (7, x.q),
        "dv": (8, x.v.transpose(-1, -2)),
    }
    for name, (at, tensor) in wrong.items():
        with pytest.raises(ValueError, match=name):
            op(*call[:at], tensor, *call[at + 1 :], *tail)
    with pytest.raises(ValueError, match="rng_state"):
        op(*call, 0.5, *tail[1:])
    with pytest.raises(ValueError, match="dlse"):
        op(*call, *tail, dlse=lse[:1])
    with pytest.raises(ValueError, match="ds_aux"):
        op(*call, *tail, ds_aux=torch.zeros(4, device=cuda))


def test_passes_that_tiles_share_get_the_shared_memory_of_each(cuda):
    """In a new process, smaller tiles first: nothing may have asked for more before."""
    program = (
        "import torch, flash_attn\n"
        "for d in (192, 256):\n"
        "    q = torch.randn(1, 300, 2, d, dtype=torch.bfloat16, device='cuda')\n"
        "    q.requires_grad_()\n"
        "    flash_attn.flash_attn_func(q, q, q).sum().backward()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
