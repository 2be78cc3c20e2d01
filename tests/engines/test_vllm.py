"""The backend for vLLM, driven as vLLM drives it: with the engine's own classes where it is
installed, with a stub of its interface elsewhere."""

from __future__ import annotations

import inspect
import threading
from dataclasses import replace
from functools import partial
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch
from compare import assert_bitwise
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from examples.serve import Engine
from flash_attn import engines
from tests.engines import steps, stubs, vllm_stub
from tests.engines.steps import DIM, HEADS, NAN, Sequences, asked_of_kernels

PAGE = 16
WIDE = 40  # pages of a table's row, whatever is needed


@pytest.fixture
def backend():
    """The class that vLLM finds in its registry."""
    with stubs.serving("vllm", vllm_stub.MODULES) as module:
        yield module.FlashAttnBackend


def make_builder(backend, device="cpu"):
    return backend.get_builder_cls()(
        vllm_stub.SPEC, ["layer"], vllm_stub.CONFIG, torch.device(device)
    )


def make_impl(backend, heads_kv: int = 2, head_dim: int = DIM, heads: int = HEADS, **options):
    return backend.get_impl_cls()(heads, head_dim, head_dim**-0.5, heads_kv, **options)


def make_cache(blocks: int, heads_kv: int, dtype, device, heads_first: bool = False, d=DIM):
    """(blocks, heads_kv, page, 2 d) with rows or heads first in memory; NaN where no key is. Bytes
    are codes."""
    shape = (blocks, heads_kv, PAGE) if heads_first else (blocks, PAGE, heads_kv)
    nan = 0x7F if dtype == torch.uint8 else NAN
    cache = torch.full((*shape, 2 * d), nan, dtype=dtype, device=device)
    return cache if heads_first else cache.transpose(1, 2)


def common(seqs: Sequences, device, requests: int = 0, tokens: int = 0, bound: int = 0):
    """The engine's metadata; with padding up to so many requests and tokens, as graphs have it."""
    metadata = import_module("vllm.v1.attention.backend").CommonAttentionMetadata
    n, total = max(len(seqs.lengths), requests), max(seqs.starts[-1], tokens)
    idle = n - len(seqs.lengths)
    starts = torch.tensor(seqs.starts + [seqs.starts[-1]] * idle, dtype=torch.int32)
    lens = torch.tensor(seqs.totals + [0] * idle, dtype=torch.int32, device=device)
    table = seqs.table(WIDE, stale=-1) + [[0] * WIDE] * idle
    slots = seqs.slots(PAGE, old=False)
    slots = torch.tensor(slots + [-1] * (total - len(slots)), device=device)
    return metadata(
        query_start_loc=starts.to(device), query_start_loc_cpu=starts, seq_lens=lens, num_reqs=n,
        num_actual_tokens=total, max_query_len=bound or max(new for _, new in seqs.lengths),
        max_seq_len=WIDE * PAGE if bound else max(seqs.totals),
        block_table_tensor=torch.tensor(table, dtype=torch.int32, device=device),
        slot_mapping=slots,
    )  # fmt: skip


def put(impl, cache: Tensor, k: Tensor, v: Tensor, slots: list[int]) -> None:
    slots = torch.tensor(slots, dtype=torch.long, device=cache.device)
    impl.do_kv_cache_update(vllm_stub.LAYER, k, v, cache, slots)


def run(impl, seqs: Sequences, cache: Tensor, metadata, output: Tensor | None = None) -> Tensor:
    """One layer of a step: the cache is written, then attention; rows of padding follow."""
    rows = metadata.num_actual_tokens
    q, k, v = (padded(x, rows) for x in (seqs.q, seqs.new(seqs.k), seqs.new(seqs.v)))
    impl.do_kv_cache_update(vllm_stub.LAYER, k, v, cache, metadata.slot_mapping)
    output = torch.full_like(q, NAN) if output is None else output
    assert impl.forward(vllm_stub.LAYER, q, k, v, cache, metadata, output=output) is output
    return output


def padded(x: Tensor, rows: int) -> Tensor:
    return torch.cat([x, torch.full_like(x[:1], NAN).expand(rows - len(x), *x.shape[1:])])


SCORES = {
    "plain": ({}, {}),
    "window": ({"sliding_window": 24}, {"window_size": (23, 0)}),
    "softcap": ({"logits_soft_cap": 5.0}, {"softcap": 5.0}),
    "alibi": ({"alibi_slopes": [0.1, 0.02, 0.3, 0.05]}, {}),
    "sinks": ({"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])}, {}),
}


@pytest.mark.parametrize("heads_first", [False, True], ids=["rows-first", "heads-first"])
@pytest.mark.parametrize("scores", SCORES)
def test_mixed_batches(backend, device, scores, heads_first):
    """Prompts, chunks, drafts and single tokens in one call, beside padding."""
    ours, reference = ({**x} for x in SCORES[scores])
    if scores == "alibi":
        reference["alibi_slopes"] = torch.tensor(ours["alibi_slopes"], device=device)
    if scores == "sinks":
        ours["sinks"] = reference["s_aux"] = ours["sinks"].to(device)
    with torch.device(device):  # as the engine makes its layers
        impl = make_impl(backend, **ours)
    seqs = Sequences.of(steps.MIXED, 2, PAGE, device)
    cache = make_cache(WIDE, 2, torch.bfloat16, device, heads_first)
    put(impl, cache, seqs.old(seqs.k), seqs.old(seqs.v), seqs.slots(PAGE, old=True))
    metadata = make_builder(backend, device).build(0, common(seqs, device, requests=6, tokens=70))
    out = run(impl, seqs, cache, metadata)
    assert not out[seqs.starts[-1] :].any()
    seqs.assert_attended(out[: seqs.starts[-1]], **reference)


@pytest.mark.parametrize("dtype", ["fp8", "fp8_e4m3"])
@pytest.mark.parametrize("scales", steps.SCALES)
def test_caches_of_codes(backend, device, monkeypatch, scales, dtype):
    """Pages of bytes, with a layer's scales, which are read again."""
    k_scale, v_scale = (x.to(device, copy=True) for x in steps.SCALES[scales])
    layer = SimpleNamespace(_k_scale=k_scale, _v_scale=v_scale)
    monkeypatch.setattr(vllm_stub, "LAYER", layer)
    impl = make_impl(backend, kv_cache_dtype=dtype, sliding_window=60)
    seqs = Sequences.of(steps.MIXED, 2, PAGE, device)
    cache = make_cache(WIDE, 2, torch.uint8, device, heads_first=dtype == "fp8")
    put(impl, cache, seqs.old(seqs.k), seqs.old(seqs.v), seqs.slots(PAGE, old=True))
    metadata = make_builder(backend, device).build(0, common(seqs, device, requests=6, tokens=70))
    out = run(impl, seqs, cache, metadata)
    assert not out[seqs.starts[-1] :].any()
    expected = steps.stored(seqs, (k_scale, v_scale))
    expected.assert_attended(out[: seqs.starts[-1]], window_size=(59, 0))
    k_scale.mul_(2.0)
    impl.forward(layer, padded(seqs.q, 70), None, None, cache, metadata, output=out)
    expected = replace(expected, k=[2 * x for x in expected.k])
    expected.assert_attended(out[: seqs.starts[-1]], window_size=(59, 0))


@pytest.mark.parametrize(
    ("first", "then"), [(steps.TOKENS, steps.LATER), (steps.MIXED, [*steps.LATER, (0, 30)])]
)
def test_a_graph_replays_other_batches(backend, device, first, then):
    """What was captured reads the engine's buffers again, and keeps the bounds of the capture."""
    impl, builder = make_impl(backend), make_builder(backend, device)
    requests, tokens = 5, sum(new for _, new in first) + 1
    bound = 1 if first is steps.TOKENS else tokens
    seqs = Sequences.of(first, 2, PAGE, device)
    cache = make_cache(WIDE, 2, torch.bfloat16, device)
    put(impl, cache, seqs.old(seqs.k), seqs.old(seqs.v), seqs.slots(PAGE, old=True))
    buffers = common(seqs, device, requests, tokens, bound)
    captured = builder.build_for_cudagraph_capture(buffers)
    q = padded(seqs.q, tokens)
    out, graph = torch.full_like(q, NAN), None
    run(impl, seqs, cache, captured, out)
    seqs.assert_attended(out[: seqs.starts[-1]])
    if device == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            impl.forward(vllm_stub.LAYER, q, None, None, cache, captured, output=out)

    seqs = Sequences.of(then, 2, PAGE, device)
    cache.fill_(NAN)
    put(impl, cache, seqs.old(seqs.k), seqs.old(seqs.v), seqs.slots(PAGE, old=True))
    put(impl, cache, seqs.new(seqs.k), seqs.new(seqs.v), seqs.slots(PAGE, old=False))
    now = common(seqs, device, requests, tokens, bound)
    for name in ("query_start_loc", "seq_lens", "block_table_tensor"):
        getattr(buffers, name).copy_(getattr(now, name))
    builder.build(0, buffers)  # before each replay
    q.copy_(padded(seqs.q, tokens))
    if graph is not None:
        graph.replay()
    else:
        impl.forward(vllm_stub.LAYER, q, None, None, cache, captured, output=out)
    seqs.assert_attended(out[: seqs.starts[-1]])
    assert not out[seqs.starts[-1] :].any()


def test_the_host_reads_no_tensor(backend):
    """A step of tensors without data: whatever asked for a value would raise."""
    seqs = Sequences.of(steps.MIXED, 2, PAGE, "cpu")
    impl, batch = make_impl(backend), common(seqs, "cpu", requests=6, tokens=70)
    cache = make_cache(WIDE, 2, torch.bfloat16, "cpu")
    with FakeTensorMode() as mode:
        fakes = {k: mode.from_tensor(x) for k, x in vars(batch).items() if isinstance(x, Tensor)}
        metadata = make_builder(backend).build(0, replace(batch, **fakes))
        q = torch.empty(70, HEADS, DIM, dtype=torch.bfloat16)
        output = torch.empty_like(q)
        impl.forward(
            vllm_stub.LAYER, q, None, None, mode.from_tensor(cache), metadata, output=output
        )
    assert backend.get_builder_cls()._cudagraph_support.name == "ALWAYS"


def test_batch_invariance(backend, device, monkeypatch):
    """With VLLM_BATCH_INVARIANT a sequence has the bits that it has alone."""
    monkeypatch.setattr("vllm.envs.VLLM_BATCH_INVARIANT", True)
    impl, builder = make_impl(backend), make_builder(backend, device)
    asked = asked_of_kernels(monkeypatch)
    seqs = Sequences.of(steps.MIXED, 2, PAGE, device)
    cache = make_cache(WIDE, 2, torch.bfloat16, device)
    put(impl, cache, seqs.old(seqs.k), seqs.old(seqs.v), seqs.slots(PAGE, old=True))
    together = run(impl, seqs, cache, builder.build(0, common(seqs, device)))
    for i, (begin, end) in enumerate(zip(seqs.starts, seqs.starts[1:], strict=False)):
        alone = Sequences(
            [seqs.lengths[i]], seqs.q[begin:end], [seqs.k[i]], [seqs.v[i]], [seqs.pages[i]]
        )
        out = run(impl, alone, cache, builder.build(0, common(alone, device)))
        assert_bitwise("out", out, together[begin:end])
    assert len(asked) == 1 + len(steps.MIXED)
    assert all(call.batch_invariant for call in asked)


class ServedByVllm(Engine):
    """The example's engine, whose attention goes through the backend's interface."""

    def __init__(self, backend, *args):
        super().__init__(*args)
        c, (layers, _, pages, *_) = self.model.config, self.cache.shape
        self.builder, self.metadata = make_builder(backend), (None, None)
        self.impls = [make_impl(backend, c.heads_kv, c.head_dim, c.heads) for _ in range(layers)]
        shape = (layers, pages, self.page_size, c.heads_kv, 2 * c.head_dim)
        self.caches = torch.zeros(shape, dtype=self.dtype).transpose(2, 3)

    def attend(self, layer, q, k, v, step):
        if self.metadata[0] is not step:  # one for all layers
            self.metadata = step, self.builder.build(0, self.common(step))
        cache, impl, metadata = self.caches[layer], self.impls[layer], self.metadata[1]
        impl.do_kv_cache_update(vllm_stub.LAYER, k, v, cache, metadata.slot_mapping)
        return impl.forward(vllm_stub.LAYER, q, k, v, cache, metadata, output=torch.empty_like(q))

    def common(self, step):
        batch = step.batch
        return import_module("vllm.v1.attention.backend").CommonAttentionMetadata(
            query_start_loc=batch["cu_seqlens_q"], query_start_loc_cpu=batch["cu_seqlens_q"],
            seq_lens=batch["cu_seqlens_k"].diff(), num_reqs=len(batch["block_table"]),
            num_actual_tokens=len(step.positions), max_query_len=batch["max_seqlen_q"],
            max_seq_len=batch["max_seqlen_k"], block_table_tensor=batch["block_table"],
            slot_mapping=step.pages * self.page_size + step.rows,
        )  # fmt: skip


@pytest.mark.parametrize("pages", [9, 100], ids=["evictions", "room"])
def test_a_model_writes_the_same_text(backend, pages):
    steps.assert_same_text(partial(ServedByVllm, backend), pages)


@pytest.mark.parametrize("dtype", ["auto", "fp8"])
@pytest.mark.parametrize("sinks", [None, torch.tensor([0.5, -1.0, 2.0, 0.0])])
def test_decode_context_parallelism(backend, monkeypatch, sinks, dtype):
    """Two ranks have every second run of 4 tokens each, and two heads each: their parts merge. What
    the step itself adds is read before it becomes codes."""
    scales = steps.SCALES["of a layer"]
    layer = SimpleNamespace(_k_scale=scales[0], _v_scale=scales[1])
    monkeypatch.setattr(vllm_stub, "LAYER", layer)
    stored = torch.bfloat16 if dtype == "auto" else torch.uint8
    seqs = Sequences.of(steps.MIXED, 1, PAGE, "cpu")
    parts, barrier, outs, errors = [None] * 2, threading.Barrier(2, timeout=60), [None] * 2, []

    def serve_rank(rank: int) -> None:
        try:
            vllm_stub.ranks.group = vllm_stub.Group(2, rank, parts, barrier)
            heads = slice(2 * rank, 2 * rank + 2)
            own = None if sinks is None else sinks[heads]
            impl = make_impl(backend, 1, heads=2, sinks=own, kv_cache_dtype=dtype)
            cache = make_cache(WIDE, 1, stored, "cpu")
            for i, (old, _) in enumerate(seqs.lengths):
                mine = torch.arange(old)
                mine = mine[mine // 4 % 2 == rank]
                table = torch.tensor(seqs.pages[i])
                here = torch.arange(len(mine))
                slots = table[here // PAGE] * PAGE + here % PAGE
                put(impl, cache, seqs.k[i][mine], seqs.v[i][mine], slots.tolist())
            batch = common(seqs, "cpu", requests=6, tokens=70)
            metadata = make_builder(backend).build(0, batch)
            q, k, v = (
                padded(x, 70) for x in (seqs.q[:, heads], seqs.new(seqs.k), seqs.new(seqs.v))
            )
            outs[rank] = impl.forward(
                vllm_stub.LAYER, q, k, v, cache, metadata, output=torch.full_like(q, NAN)
            )
        except Exception as error:
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=serve_rank, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    out = torch.cat(outs, dim=1)
    if dtype == "fp8":
        seqs = steps.stored(seqs, scales, new=False)
    seqs.assert_attended(out[: seqs.starts[-1]], s_aux=sinks)
    assert not out[seqs.starts[-1] :].any()


@pytest.fixture
def two_ranks(monkeypatch):
    monkeypatch.setattr(
        vllm_stub.ranks, "group", SimpleNamespace(world_size=2, rank_in_group=0), raising=False
    )


def test_a_graph_reads_the_lengths_of_other_ranks_again(backend, two_ranks):
    builder, seen = make_builder(backend), []
    for lengths in (steps.TOKENS, steps.LATER):
        seqs = Sequences.of(lengths, 1, PAGE, "cpu")
        seen.append(builder.build(0, common(seqs, "cpu", requests=3)).context.seqused_k)
    assert seen[0].data_ptr() == seen[1].data_ptr()
    assert seen[0].tolist() == [4, 44, 0]  # of 7 and 88 tokens, in runs of 4


def test_what_is_refused(backend, two_ranks):
    for options, said in (
        ({"kv_cache_dtype": "fp8_e5m2"}, "KV cache of fp8_e5m2; .* and float8_e4m3fn"),
        ({"attn_type": "encoder"}, "decoders alone"),
        ({"sliding_window": 8}, "decode context parallelism"),
        ({"alibi_slopes": [0.1] * HEADS}, "decode context parallelism"),
    ):
        with pytest.raises(NotImplementedError, match=said):
            make_impl(backend, **options)
    with pytest.raises(TypeError, match="chunk_lookback"):
        make_impl(backend, chunk_lookback=4)


def test_steps_that_are_refused(backend):
    seqs = Sequences.of(steps.TOKENS, 2, PAGE, "cpu")
    builder, impl = make_builder(backend), make_impl(backend)
    for causal in (False, torch.tensor([True, False, True])):
        with pytest.raises(NotImplementedError, match="causal"):
            builder.build(0, replace(common(seqs, "cpu"), causal=causal))
    metadata = builder.build(0, common(seqs, "cpu"))
    q, out = seqs.q, torch.empty_like(seqs.q)
    with pytest.raises(ValueError, match="2 \\* head_size"):
        impl.forward(None, q, None, None, torch.zeros(2, 9, PAGE, 2, DIM), metadata, output=out)
    with pytest.raises(NotImplementedError, match="quantized"):
        impl.forward(None, q, None, None, None, metadata, output=out, output_scale=out)
    assert not impl.forward(None, q, None, None, None, None, output=out).any()  # a memory profile


def test_what_the_engine_is_told(backend):
    assert backend.get_name() == "CUSTOM"
    assert [d for d in (60, 64, 80, 512, 520) if backend.supports_head_size(d)] == [64, 80, 512]
    majors = [m for m in (7, 8, 9) if backend.supports_compute_capability(SimpleNamespace(major=m))]
    assert majors == [8, 9]
    assert backend.supports_sink()
    assert backend.supports_sliding_window()
    assert backend.supports_batch_invariance()
    assert backend.get_impl_cls().supports_dcp
    others, served = (16, False, False, False, False, None), (None, "auto", "bfloat16", "fp8")
    for dtype in (*served, "fp8_e4m3", "fp8_e5m2", "fp8_per_token_head", "nvfp4"):
        why = backend.supports_combination(64, torch.bfloat16, dtype, *others)
        assert (why is None) == (dtype in (*served, "fp8_e4m3"))
    assert "choose 'fp8_e4m3'" in why
    assert "up to 256" in backend.supports_combination(512, torch.bfloat16, "fp8", *others)
    assert backend.supports_combination(512, torch.bfloat16, "auto", *others) is None
    assert "float16" in backend.supports_combination(64, torch.bfloat16, "float16", *others)
    assert {"auto", "bfloat16", "fp8", "fp8_e4m3"} <= set(backend.supported_kv_cache_dtypes)


def test_registration(backend, monkeypatch):
    """By hand, and by the engine's own plugins unless the name is taken."""
    registry = import_module("vllm.v1.attention.backends.registry")
    custom = registry.AttentionBackendEnum.CUSTOM
    registry.register_backend(custom, "somebody.Else")
    engines.vllm_plugin()
    assert custom.get_path() == "somebody.Else"
    engines.register_vllm()
    assert custom.get_path() == f"{backend.__module__}.{backend.__name__}"


@pytest.mark.skipif(not stubs.is_installed("vllm"), reason="vLLM is not installed")
@pytest.mark.parametrize(("name", "stub"), vllm_stub.MODULES["vllm.v1.attention.backend"].items())
def test_the_stub_is_like_vllm(name, stub):
    real = getattr(import_module("vllm.v1.attention.backend"), name)
    if issubclass(stub, vllm_stub.Enum):
        assert {x.name: x.value for x in stub}.items() <= {x.name: x.value for x in real}.items()
    elif stub is vllm_stub.CommonAttentionMetadata:
        fields = inspect.signature(real).parameters
        assert set(inspect.signature(stub).parameters) <= set(fields)
    else:
        stubs.assert_like(stub, real)
