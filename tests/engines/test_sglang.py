"""The backend for SGLang, driven as SGLang drives it: with the engine's own classes where it is
installed, with a stub of its interface elsewhere."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch
from compare import assert_bitwise
from torch import Tensor

from examples.serve import Engine
from flash_attn import engines
from tests.engines import sglang_stub, steps, stubs
from tests.engines.sglang_stub import Batch, Layer, Pool, WindowPool, model_runner
from tests.engines.steps import DIM, HEADS, NAN, Sequences, asked_of_kernels

PAGES = 320  # tokens of them, whatever a page has
LONGEST = 200


@pytest.fixture
def module():
    with stubs.serving("sglang", sglang_stub.MODULES) as module:
        yield module


class Requests:
    """A backend, its pools, and what an engine keeps of the requests of a step."""

    def __init__(self, module, seqs: Sequences, page: int, windows=False, scales=None, **runner):
        self.module, self.page, self.windows = module, page, windows
        device = seqs.q.device
        self.scales = scales or (None, None)  # of k and v, which are codes then
        dtype = torch.float8_e4m3fn if scales else seqs.q.dtype
        kind = Pool
        if windows:  # the backend asks for the engine's class
            kind = type("WindowPool", (WindowPool, module.SWAKVPool), {})
        self.pool = kind(PAGES, 2, seqs.k[0].shape[1], DIM, dtype, device)
        if windows:
            turned = (torch.arange(PAGES).view(-1, page).roll(3, 0)).flatten()
            self.pool.mapping = turned.to(device)
        self.req_to_token = torch.zeros(12, LONGEST, dtype=torch.int32, device=device)
        runner = model_runner(self.pool, page, self.req_to_token, **runner)
        self.backend = module.FlashAttnBackend(runner)
        self.admit(seqs)

    def admit(self, seqs: Sequences) -> None:
        """Rows of req_to_token, in any order, and the keys of earlier steps."""
        self.rows = [7, 2, 9, 4][: len(seqs.lengths)]
        self.req_to_token.zero_()
        for row, pages, total in zip(self.rows, seqs.pages, seqs.totals, strict=True):
            at = [pages[i // self.page] * self.page + i % self.page for i in range(total)]
            self.req_to_token[row, :total] = torch.tensor(at, dtype=torch.int32)
        for layer in range(2):
            self.pool.get_kv_buffer(layer)[0].fill_(NAN)
            self.pool.get_kv_buffer(layer)[1].fill_(NAN)
        old = torch.tensor(seqs.slots(self.page, old=True), dtype=torch.long)
        old_kv = [seqs.old(parts).clone() for parts in (seqs.k, seqs.v)]
        loc = sglang_stub.KVWriteLoc(old, self.pool.mapping[old] if self.windows else None)
        for layer in range(1 + self.windows):
            kv = [x.clone() for x in old_kv]
            self.pool.set_kv_buffer(Layer(layer), loc, *kv, *self.scales)

    def batch(self, seqs: Sequences, mode: str, idle: int = 0) -> Batch:
        """With sequences of padding, as graphs have them."""
        device = seqs.q.device

        def ints(values, dtype=torch.long):
            return torch.tensor(values, dtype=dtype, device=device)

        return Batch(
            self.module.ForwardMode[mode],
            ints(self.rows + [0] * idle),
            ints(seqs.totals + [1] * idle),
            ints(seqs.slots(self.page, old=False) + [0] * idle),
            None if mode == "DECODE" else ints([new for _, new in seqs.lengths], torch.int32),
        )

    def layer(self, **changed) -> Layer:
        changed.setdefault("attn_type", self.module.AttentionType.DECODER)
        return Layer(**{"tp_k_head_num": self.pool.kv.shape[3], **changed})

    def run(self, seqs: Sequences, batch: Batch, layer: Layer | None = None, **kwargs) -> Tensor:
        """(tokens, heads, d) of one layer; rows of padding are after them."""
        idle = len(batch.out_cache_loc) - len(seqs.q)
        q, k, v = (
            torch.cat([x, torch.zeros_like(x[:1]).expand(idle, *x.shape[1:])])
            for x in (seqs.q, seqs.new(seqs.k), seqs.new(seqs.v))
        )
        out = self.backend.forward(q.flatten(1), k, v, layer or self.layer(), batch, **kwargs)
        return out.view(-1, HEADS, DIM)


SCORES = {
    "plain": ({}, {}, {}),
    "window": ({"sliding_window_size": 23}, {}, {"window_size": (23, 0)}),
    "softcap": ({"logit_cap": 5.0}, {}, {"softcap": 5.0}),
    "sinks": ({}, {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])}, {}),
}


@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("scores", SCORES)
def test_mixed_batches(module, device, scores, page):
    """Prompts, chunks of them and single tokens in one call."""
    layer, given, reference = SCORES[scores]
    given = {name: x.to(device) for name, x in given.items()}
    seqs = Sequences.of(steps.MIXED, 2, page, device)
    requests = Requests(module, seqs, page)
    batch = requests.batch(seqs, "MIXED")
    requests.backend.init_forward_metadata(batch)
    out = requests.run(seqs, batch, requests.layer(**layer), **given)
    if given:
        reference = {"s_aux": given["sinks"]}
    seqs.assert_attended(out, **reference)


@pytest.mark.parametrize("windows", [False, True])
def test_a_graph_replays_other_batches(module, device, windows):
    """What was captured reads the backend's buffers again; padding has one key, in page 0."""
    page, layer_id = 16, int(windows)
    seqs = Sequences.of(steps.TOKENS, 2, page, device)
    requests = Requests(module, seqs, page, windows)
    backend, graph = requests.backend, None
    backend.init_cuda_graph_state(6, 6)
    batch = requests.batch(seqs, "DECODE", idle=1)
    layer = requests.layer(layer_id=layer_id)
    backend.init_forward_metadata_out_graph(batch, in_capture=True)
    backend.init_forward_metadata_in_graph(batch)
    captured = backend.forward_metadata
    seqs.assert_attended(requests.run(seqs, batch, layer)[: len(seqs.q)])
    if device == "cuda":
        static, graph = torch.zeros(4, HEADS * DIM, dtype=seqs.q.dtype, device=device), None
        new = [torch.zeros(4, 2, DIM, dtype=seqs.q.dtype, device=device) for _ in "kv"]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            backend.init_forward_metadata_in_graph(batch)
            result = backend.forward(static, *new, layer, batch)

    seqs = Sequences.of(steps.LATER, 2, page, device)
    requests.admit(seqs)
    now = requests.batch(seqs, "DECODE", idle=2)
    batch.seq_lens_cpu = now.seq_lens_cpu
    for name in ("req_pool_indices", "seq_lens", "out_cache_loc"):
        getattr(batch, name).copy_(getattr(now, name))
    backend.init_forward_metadata_out_graph(batch)
    if graph is None:
        backend.forward_metadata = captured
        backend.init_forward_metadata_in_graph(batch)
        out = requests.run(seqs, batch, layer)
    else:
        static[:2].copy_(seqs.q.flatten(1))
        for x, parts in zip(new, (seqs.k, seqs.v), strict=True):
            x[:2].copy_(seqs.new(parts))
        graph.replay()
        out = result.view(-1, HEADS, DIM)
    seqs.assert_attended(out[: len(seqs.q)])


def test_layers_with_a_window_have_pages_of_their_own(module, device):
    seqs = Sequences.of(steps.MIXED, 2, 16, device)
    requests = Requests(module, seqs, 16, windows=True)
    batch = requests.batch(seqs, "EXTEND")
    requests.backend.init_forward_metadata(batch)
    seqs.assert_attended(requests.run(seqs, batch, requests.layer(layer_id=0)))
    layer = requests.layer(layer_id=1, sliding_window_size=20)
    seqs.assert_attended(requests.run(seqs, batch, layer), window_size=(20, 0))


SCALES = {
    "parameters": (torch.tensor(0.5), torch.tensor(0.125)),
    "numbers": (0.5, 0.125),
    "none": (None, None),
}


@pytest.mark.parametrize("windows", [False, True])
@pytest.mark.parametrize("kind", SCALES)
def test_pools_of_codes(module, device, kind, windows):
    """With a layer's scales; what is larger than any code becomes the largest."""
    scales = tuple(x.to(device) if isinstance(x, Tensor) else x for x in SCALES[kind])
    seqs = Sequences.of(steps.MIXED, 2, 16, device)
    seqs.v[0][5] *= 1000.0
    requests = Requests(module, seqs, 16, windows, scales)
    layer = requests.layer(
        layer_id=int(windows), k_scale=scales[0], v_scale=scales[1], sliding_window_size=30
    )
    batch = requests.batch(seqs, "MIXED")
    requests.backend.init_forward_metadata(batch)
    out = requests.run(seqs, batch, layer)
    steps.stored(seqs, scales).assert_attended(out, window_size=(30, 0))


def test_keys_that_are_there_already(module):
    seqs = Sequences.of(steps.TOKENS, 2, 16, "cpu")
    requests = Requests(module, seqs, 16)
    batch = requests.batch(seqs, "DECODE")
    requests.backend.init_forward_metadata(batch)
    first = requests.run(seqs, batch)
    kept, requests.pool.set_kv_buffer = requests.pool.kv.clone(), None  # nothing calls it
    out = requests.backend.forward(
        seqs.q.flatten(1), None, None, requests.layer(), batch, save_kv_cache=False
    )
    assert_bitwise("out", out.view_as(first), first)
    assert_bitwise("kv", requests.pool.kv, kept)


def test_batch_invariance(module, device, monkeypatch):
    """With enable_deterministic_inference a sequence has the bits that it has alone."""
    args = SimpleNamespace(enable_deterministic_inference=True, dcp_size=1)
    seqs = Sequences.of(steps.MIXED, 2, 16, device)
    requests = Requests(module, seqs, 16, server_args=args)
    asked = asked_of_kernels(monkeypatch)
    batch = requests.batch(seqs, "MIXED")
    requests.backend.init_forward_metadata(batch)
    together, rows = requests.run(seqs, batch), requests.rows
    for i, (begin, end) in enumerate(zip(seqs.starts, seqs.starts[1:], strict=False)):
        alone = Sequences(
            [seqs.lengths[i]], seqs.q[begin:end], [seqs.k[i]], [seqs.v[i]], [seqs.pages[i]]
        )
        requests.rows = [rows[i]]
        batch = requests.batch(alone, "MIXED")
        requests.backend.init_forward_metadata(batch)
        assert_bitwise("out", requests.run(alone, batch), together[begin:end])
    assert all(call.batch_invariant for call in asked)


class ServedBySGLang(Engine):
    """The example's engine, whose attention goes through the backend's interface."""

    def __init__(self, module, *args):
        super().__init__(*args)
        c, (layers, _, pages, page, *_) = self.model.config, self.cache.shape
        self.module, self.step_of = module, (None, None)
        self.pool = Pool(pages * page, layers, c.heads_kv, c.head_dim, self.dtype, "cpu")
        self.req_to_token = torch.zeros(16, c.max_seqlen, dtype=torch.int32)
        self.backend = module.FlashAttnBackend(model_runner(self.pool, page, self.req_to_token))
        self.layers = [
            Layer(
                i, c.heads, c.heads_kv, c.head_dim, c.head_dim, c.head_dim**-0.5,
                attn_type=module.AttentionType.DECODER,
            )
            for i in range(layers)
        ]  # fmt: skip

    def attend(self, layer, q, k, v, step):
        if self.step_of[0] is not step:
            self.step_of = step, self.begin(step)
        out = self.backend.forward(q.flatten(1), k, v, self.layers[layer], self.step_of[1])
        return out.view_as(q)

    def begin(self, step) -> Batch:
        batch, page = step.batch, self.page_size
        pages, rows = batch["block_table"], len(batch["block_table"])
        tokens = (pages[:, :, None] * page + torch.arange(page)).flatten(1)
        self.req_to_token[:rows, : tokens.shape[1]] = tokens
        counts = batch["cu_seqlens_q"].diff()
        mode = "DECODE" if batch["max_seqlen_q"] == 1 else "EXTEND"
        given = Batch(
            self.module.ForwardMode[mode], torch.arange(rows), batch["cu_seqlens_k"].diff().long(),
            step.pages * page + step.rows, counts,
        )  # fmt: skip
        self.backend.init_forward_metadata(given)
        return given


@pytest.mark.parametrize("pages", [9, 100], ids=["evictions", "room"])
def test_a_model_writes_the_same_text(module, pages):
    steps.assert_same_text(partial(ServedBySGLang, module), pages)


def test_models_that_are_refused(module):
    seqs = Sequences.of(steps.TOKENS, 2, 16, "cpu")
    sharded = SimpleNamespace(enable_deterministic_inference=False, dcp_size=2)
    for runner, said in (
        ({"kv_cache_dtype": torch.float8_e5m2}, "float8_e5m2; .* and float8_e4m3fn"),
        ({"use_mla_backend": True}, "MLA"),
        ({"server_args": sharded}, "dcp_size: got 2"),
    ):
        with pytest.raises(NotImplementedError, match=said):
            Requests(module, seqs, 16, **runner)


def test_layers_and_steps_that_are_refused(module):
    seqs = Sequences.of(steps.TOKENS, 2, 16, "cpu")
    requests = Requests(module, seqs, 16)
    backend, batch = requests.backend, requests.batch(seqs, "EXTEND")
    backend.init_cuda_graph_state(4, 4)
    with pytest.raises(NotImplementedError, match="CUDA graph of forward_mode EXTEND"):
        backend.init_forward_metadata_out_graph(batch, in_capture=True)
    with pytest.raises(NotImplementedError, match="TARGET_VERIFY"):
        backend.init_forward_metadata(requests.batch(seqs, "TARGET_VERIFY"))
    backend.init_forward_metadata(batch)
    for layer, said in (
        ({"attn_type": module.AttentionType.ENCODER_ONLY}, "decoders alone"),
        ({"is_cross_attention": True}, "decoders alone"),
        ({"use_irope": True}, "use_irope"),
        ({"pos_encoding_mode": "ALIBI"}, "pos_encoding_mode: got ALIBI"),
        ({"logit_cap": 1.0, "logit_capping_method": "sigmoid"}, "logit_capping_method"),
        ({"xai_temperature_len": 9}, "xai_temperature_len"),
    ):
        with pytest.raises(NotImplementedError, match=said):
            requests.run(seqs, batch, requests.layer(**layer))
    with pytest.raises(NotImplementedError, match="q_rope"):
        requests.run(seqs, batch, q_rope=seqs.q, k_rope=None)


def test_an_idle_rank(module):
    seqs = Sequences.of(steps.TOKENS, 2, 16, "cpu")
    requests = Requests(module, seqs, 16)
    batch = requests.batch(seqs, "IDLE")
    requests.backend.init_forward_metadata(batch)
    assert requests.run(seqs, batch).shape == seqs.q.shape
    assert requests.backend.get_cuda_graph_seq_len_fill_value() == 1


def test_registration(module):
    registry = import_module("sglang.srt.layers.attention.attention_registry")
    choices = import_module("sglang.srt.arg_groups.choices")
    for _ in range(2):
        engines.register_sglang()
    assert choices.ATTENTION_BACKEND_CHOICES.count("flash_attn") == 1
    assert choices.DETERMINISTIC_ATTENTION_BACKEND_CHOICES.count("flash_attn") == 1
    seqs = Sequences.of(steps.TOKENS, 2, 16, "cpu")
    requests = Requests(module, seqs, 16)
    runner = model_runner(requests.pool, 16, requests.req_to_token)
    made = registry.ATTENTION_BACKENDS["flash_attn"](runner)
    assert type(made) is import_module("flash_attn.engines.sglang").FlashAttnBackend


@pytest.mark.skipif(not stubs.is_installed("sglang"), reason="SGLang is not installed")
def test_the_stub_is_like_sglang():
    def real(path: str, name: str):
        return getattr(import_module(f"sglang.srt.{path}"), name)

    backend = real("layers.attention.base_attn_backend", "AttentionBackend")
    stubs.assert_like(sglang_stub.AttentionBackend, backend)
    fields = real("model_executor.forward_batch_info", "ForwardBatch").__dataclass_fields__
    assert set(Batch.__dataclass_fields__) <= set(fields)
    stubs.assert_like(
        sglang_stub.ForwardMode, real("model_executor.forward_batch_info", "ForwardMode")
    )
    layer = real("layers.radix_attention", "RadixAttention")(4, 64, 64**-0.5, 2, 0)
    for name, value in vars(Layer()).items():
        assert hasattr(layer, name), name
        assert name == "attn_type" or getattr(layer, name) == value
    pool = real("mem_cache.swa_memory_pool", "SWAKVPool")
    for name in ("translate_loc_from_full_to_swa", "set_kv_buffer", "get_kv_buffer"):
        assert hasattr(pool, name)
