"""Rows of the table that only a GPU can break: sizes, grids, streams, synchronisation."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
import torch
from cases import BF16, Case, make_inputs
from compare import assert_accurate, assert_bitwise
from reference import attention_ref, standard_attention

from flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache


def compare_slice(out, q, k, v, **kwargs) -> None:
    ref, _, _ = attention_ref(q, k, v, **kwargs)
    std, _, _ = standard_attention(q, k, v, **kwargs)
    assert_accurate("out", out, ref, std)


def test_more_than_2_31_query_elements(cuda, need_memory):
    need_memory(12)
    seqlen_q = 2**31 // (64 * 64) + 256
    q = torch.randn(1, seqlen_q, 64, 64, dtype=BF16, device=cuda)
    k = torch.randn(1, 128, 1, 64, dtype=BF16, device=cuda)
    out = flash_attn_func(q, k, k)
    compare_slice(out[:, -300:], q[:, -300:], k, k)


def test_more_than_2_31_key_elements(cuda, need_memory):
    need_memory(12)
    total_k = 2**31 // (8 * 128) + 256
    k = torch.randn(total_k, 8, 128, dtype=BF16, device=cuda)
    q = torch.randn(2, 8, 128, dtype=BF16, device=cuda)
    cu_q = torch.tensor([0, 1, 2], dtype=torch.int32, device=cuda)
    cu_k = torch.tensor([0, total_k - 200, total_k], dtype=torch.int32, device=cuda)
    out = flash_attn_varlen_func(q, k, k, cu_q, cu_k, 1, total_k)
    compare_slice(out[None, 1:], q[None, 1:], k[None, -200:], k[None, -200:])


def test_batch_stride_beyond_2_31(cuda, need_memory):
    need_memory(12)
    buffer = torch.empty(2, 2**31 // 64 + 64, 1, 64, dtype=BF16, device=cuda)
    q = buffer[:, :150]
    q.normal_()
    out = flash_attn_func(q, q, q, causal=True)
    compare_slice(out, q, q, q, causal=True)


@pytest.mark.parametrize("shape", [(70_000, 1, 1), (1, 70_000, 70_000), (9, 8_000, 1_000)])
def test_more_than_65535_batches_or_heads(shape, cuda):
    b, h, hk = shape
    case = Case(b=b, h=h, hk=hk, sq=3, sk=5, causal=True, layout="contiguous")
    x = make_inputs(case, cuda)
    out = flash_attn_func(x.q, x.k, x.v, causal=True)
    compare_slice(out, x.q, x.k, x.v, causal=True)


def test_more_than_65535_packed_sequences(cuda):
    count = 70_000
    q = torch.randn(count * 2, 1, 64, dtype=BF16, device=cuda)
    cu = torch.arange(0, 2 * count + 1, 2, dtype=torch.int32, device=cuda)
    out = flash_attn_varlen_func(q, q, q, cu, cu, 2, 2, causal=True)
    batch = q.view(count, 2, 1, 64)
    compare_slice(out.view(count, 2, 1, 64), batch, batch, batch, causal=True)


def test_current_stream_is_honoured(cuda):
    """The inputs are written late on a side stream; a kernel on another stream would miss them."""
    x = make_inputs(Case(causal=True, layout="contiguous"), cuda)
    expected = flash_attn_func(x.q, x.k, x.v, causal=True)
    late = torch.zeros_like(x.q)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(200_000_000)
        late.copy_(x.q)
        out = flash_attn_func(late, x.k, x.v, causal=True)
    torch.cuda.synchronize()
    assert_bitwise("out", out, expected)


def test_non_default_device(cuda):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    x = make_inputs(Case(causal=True, layout="contiguous"), "cuda:1")
    assert torch.cuda.current_device() == 0
    out = flash_attn_func(x.q, x.k, x.v, causal=True)
    assert out.device == x.q.device
    compare_slice(out, x.q, x.k, x.v, causal=True)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_no_host_synchronisation(cuda):
    x = make_inputs(Case(causal=True, layout="contiguous"), cuda)
    cu = torch.tensor([0, x.q.shape[1]], dtype=torch.int32, device=cuda)
    longest = x.q.shape[1]
    on_gpu = torch.tensor(longest, device=cuda)
    torch.cuda.set_sync_debug_mode("error")
    try:
        flash_attn_func(x.q, x.k, x.v, causal=True)
        flash_attn_varlen_func(x.q[0], x.k[0], x.v[0], cu, cu, longest, longest, causal=True)
        flash_attn_varlen_func(x.q[0], x.k[0], x.v[0], cu, cu, on_gpu, on_gpu, causal=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_capture_in_a_graph(cuda):
    x = make_inputs(Case(causal=True, layout="contiguous"), cuda)
    expected = flash_attn_func(x.q, x.k, x.v, causal=True)
    q = torch.zeros_like(x.q)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        flash_attn_func(q, x.k, x.v, causal=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flash_attn_func(q, x.k, x.v, causal=True)
    q.copy_(x.q)
    graph.replay()
    torch.cuda.synchronize()
    assert_bitwise("out", out, expected)


def shared_work(device):
    """Calls whose thread blocks share counters: tiles that are drawn, pieces that are merged."""
    q = torch.randn(4, 700, 16, 64, dtype=BF16, device=device)
    cache = torch.randn(2, 3000, 2, 128, dtype=BF16, device=device)
    used = torch.tensor([3000, 1234], dtype=torch.int32, device=device)
    step = torch.randn(2, 1, 8, 128, dtype=BF16, device=device)
    return {
        "tiles": lambda: flash_attn_func(q, q, q, causal=True),
        "pieces": lambda: flash_attn_with_kvcache(step, cache, cache, cache_seqlens=used),
    }


@pytest.mark.parametrize("kind", ["tiles", "pieces"])
def test_counters_in_graphs_and_streams(cuda, kind):
    """Replayed beside themselves in other streams: each has counters of its own."""
    call = shared_work(cuda)[kind]
    expected = call()
    torch.cuda.synchronize()
    graphs, outs = [], []
    for _ in range(2):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outs.append(call())
            outs.append(call())
        graphs.append(graph)
    streams = [torch.cuda.Stream() for _ in range(3)]
    for _ in range(20):
        for graph, stream in zip(graphs, streams):
            with torch.cuda.stream(stream):
                graph.replay()
        with torch.cuda.stream(streams[2]):
            outs.append(call())
    torch.cuda.synchronize()
    for out in outs:
        assert_bitwise(kind, out, expected)


def test_no_hidden_copy(cuda):
    """Peak memory grows by the output and the LSE alone, whatever the strides."""
    case = Case(b=2, sq=4096, sk=4096, h=8, hk=8, d=128, layout="packed")
    x = make_inputs(case, cuda)
    flash_attn_func(x.q, x.k, x.v)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = flash_attn_func(x.q, x.k, x.v)
    grown = torch.cuda.max_memory_allocated() - before
    assert grown < out.nbytes * 1.2


def by_hand(q, k, v, **keywords):
    """The op itself: none of the package's checks stand before those of the library."""
    op = torch.ops.flash_attn._flash_attn_forward
    return op(q, k, v, 0.0, 0.125, False, -1, -1, 0.0, None, False, **keywords)


def test_calls_of_the_op_by_hand_cannot_fault(cuda):
    """A kernel that read past its operands would take the process down."""
    q = torch.randn(1, 20, 2, 64, dtype=BF16, device=cuda)
    square = torch.randn(1, 20, 64, 64, dtype=BF16, device=cuda)
    with pytest.raises(ValueError, match="which does not go with q of shape"):
        by_hand(q, q[:, :, :0], q[:, :, :0])
    with pytest.raises(ValueError, match="stride"):
        by_hand(square.transpose(-1, -2), square, square)
    with pytest.raises(ValueError, match="multiple of 8"):
        by_hand(q[..., :20], q[..., :20], q[..., :20])
    with pytest.raises(ValueError, match="16 bytes"):
        by_hand(q[..., 1:57], q[..., 1:57], q[..., 1:57])
    state = torch.zeros(2, dtype=torch.int64)  # on the CPU
    op = torch.ops.flash_attn._flash_attn_forward
    with pytest.raises(ValueError, match="rng_state"):
        op(q, q, q, 0.5, 0.125, False, -1, -1, 0.0, None, False, rng_state=state)


def test_more_rows_than_an_int_counts_are_rejected(cuda):
    """Before anything of that size is allocated: q is one row, 2^31 times."""
    q = torch.zeros(1, 1, 8, dtype=BF16, device=cuda)
    ends = torch.tensor([0, 1], dtype=torch.int32, device=cuda)
    op = torch.ops.flash_attn._flash_attn_varlen_forward
    with pytest.raises(ValueError, match="total_q: got 2147483648; 0 to"):
        op(q.expand(2**31, 1, 8), q, q, ends, ends, 1, 1, 0.0, 1.0, False)


def test_lack_of_memory_is_torch_s_error(cuda):
    """Of which a training loop recovers: 2 TiB are asked for, and nothing is left behind."""
    q = torch.zeros(1, 1, 1, 64, dtype=BF16, device=cuda).expand(1, 2**20, 2**14, 64)
    with pytest.raises(torch.OutOfMemoryError, match=r"CUDA out of memory.*2199023255552 bytes"):
        flash_attn_func(q, q, q)
    q = torch.randn(1, 20, 2, 64, dtype=BF16, device=cuda)
    compare_slice(flash_attn_func(q, q, q), q, q, q)


LOST_CONTEXT = """
import torch
from flash_attn import flash_attn_func
q = torch.randn(1, 256, 2, 64, device="cuda", dtype=torch.bfloat16)
flash_attn_func(q, q, q)  # leaves memory at hand: the call below allocates none
torch.zeros(1, device="cuda")[torch.tensor([7], device="cuda")]
try:
    torch.cuda.synchronize()
except RuntimeError:
    pass
try:
    flash_attn_func(q, q, q)
except Exception as error:
    print(type(error).__name__, error)
"""


def test_a_failure_of_cuda_has_its_name(cuda):
    """Not a ValueError: no argument is wrong. In a process of its own, whose context is lost."""
    done = subprocess.run([sys.executable, "-c", LOST_CONTEXT], capture_output=True, text=True)
    # The driver's name or the runtime's, whichever is asked for something first.
    name = r"(CUDA_ERROR_ASSERT|cudaErrorAssert)"
    assert re.match(rf"RuntimeError flash_attn: {name}: ", done.stdout), done
