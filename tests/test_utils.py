"""flash_attn.utils: sampling and the loop around a model, the textbook formula, timing, weights."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from flash_attn import flash_attn_func, flash_attn_varlen_func
from flash_attn.bert_padding import pad_input, unpad_input
from flash_attn.modules.block import Block
from flash_attn.modules.embedding import GPT2Embeddings
from flash_attn.modules.mha import MHA
from flash_attn.utils import benchmark
from flash_attn.utils.generation import (
    GenerationMixin,
    InferenceParams,
    decode,
    modify_logits_for_top_k_filtering,
    modify_logits_for_top_p_filtering,
    sample,
)
from flash_attn.utils.pretrained import state_dict_from_pretrained
from flash_attn.utils.testing import (
    attention_ref,
    construct_local_mask,
    generate_random_padding_mask,
)
from flash_attn.utils.torch import custom_bwd, custom_fwd

# --- Generation -----------------------------------------------------------------------------------


class Model(nn.Module, GenerationMixin):
    """A block and a head, as small as they get."""

    def __init__(self, vocab: int = 13):
        super().__init__()
        torch.manual_seed(0)
        self.embeddings = GPT2Embeddings(32, vocab, 16)
        self.block = Block(
            32, lambda dim: MHA(dim, 4, causal=True, use_flash_attn=True, layer_idx=0)
        )
        self.head = nn.Linear(32, vocab)

    def forward(self, ids, position_ids=None, inference_params=None, num_last_tokens=0):
        kwargs = {} if inference_params is None else {"inference_params": inference_params}
        out, residual = self.block(self.embeddings(ids, position_ids), mixer_kwargs=kwargs)
        return SimpleNamespace(logits=self.head(out + residual)[:, -num_last_tokens:])


PROMPT = torch.tensor([[3, 1, 4], [1, 5, 9]])


def greedy(model, ids, length):
    while ids.shape[1] < length:
        ids = torch.cat((ids, model(ids).logits[:, -1:].argmax(-1)), 1)
    return ids


def test_decode_is_the_greedy_loop():
    model = Model()
    output = model.generate(PROMPT, 9, return_dict_in_generate=True, output_scores=True)
    assert torch.equal(output.sequences, greedy(model, PROMPT, 9))
    assert len(output.scores) == 6
    torch.testing.assert_close(output.scores[-1], model(output.sequences[:, :-1]).logits[:, -1])
    assert torch.equal(model.generate(PROMPT, 9), output.sequences)
    assert model.generate(PROMPT, 9, return_dict_in_generate=True).scores is None
    shared = model.generate(PROMPT, 9, tensor_parallel=2)  # its layers would know
    assert torch.equal(shared, output.sequences)


def test_decode_stops_streams_and_is_taught():
    model, seen = Model(), []
    wanted = torch.cat((PROMPT, torch.tensor([[7, 8, 2, 2], [6, 5, 2, 2]])), 1)
    streamer = SimpleNamespace(put=seen.append, end=lambda: seen.append("end"))
    output = decode(PROMPT, model, 9, teacher_outputs=wanted, eos_token_id=2, streamer=streamer)
    assert torch.equal(output.sequences, wanted[:, :6])
    assert seen[-1] == "end"
    assert torch.equal(torch.cat(seen[:-1], 1), wanted[:, :6])
    assert decode(PROMPT, model, 4, vocab_size=5).sequences[:, 3].max() < 5
    with pytest.raises(NotImplementedError, match=r"cg=True: .*torch\.compile"):
        decode(PROMPT, model, 9, cg=True)
    with pytest.raises(NotImplementedError):
        model.allocate_inference_cache(1, 1)


LOGITS = torch.tensor([[0.0, 3.0, 1.0, 2.0]])


def test_generation_starts_over_with_the_same_caches():
    caches = {0: torch.ones(1)}
    state = InferenceParams(8, 2, 5, 1, caches, torch.tensor([3, 4], dtype=torch.int32))
    state.reset(16, 4)
    assert (state.max_seqlen, state.max_batch_size, state.seqlen_offset) == (16, 4, 0)
    assert state.key_value_memory_dict is caches
    assert state.lengths_per_sample.tolist() == [0, 0]


def test_filters():
    logits = LOGITS.clone()
    modify_logits_for_top_k_filtering(logits, 2)
    assert logits.isfinite().tolist() == [[False, True, False, True]]
    for top_p, kept in ((0.6, [1]), (0.7, [1, 3]), (0.9, [1, 2, 3]), (1.0, [0, 1, 2, 3])):
        logits = LOGITS.clone()  # probabilities .03, .64, .09, .24
        modify_logits_for_top_p_filtering(logits, top_p)
        assert logits[0].isfinite().nonzero().flatten().tolist() == kept


def test_sample():
    assert sample(LOGITS).tolist() == [1]
    torch.manual_seed(0)
    many, before = LOGITS.expand(20000, 4), LOGITS.clone()
    counts = torch.bincount(sample(many, top_k=0, temperature=2.0), minlength=4) / 20000
    torch.testing.assert_close(counts, (LOGITS / 2)[0].softmax(0), atol=0.02, rtol=0)
    assert set(sample(many, top_k=2).tolist()) == {1, 3}
    assert set(sample(many, top_k=0, top_p=0.7).tolist()) == {1, 3}
    assert torch.equal(LOGITS, before)
    with pytest.raises(ValueError, match=r"top_p: got 1\.5"):
        sample(LOGITS, top_k=0, top_p=1.5)


# --- The textbook formula -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [{}, {"causal": True}, {"window_size": (2, 1)}, {"causal": True, "window_size": (3, 5)},
     {"softcap": 2.0}],
)  # fmt: skip
def test_attention_ref(options):
    q, k, v = torch.randn(2, 6, 4, 8), torch.randn(2, 9, 2, 8), torch.randn(2, 9, 2, 8)
    expected = flash_attn_func(q, k, v, **options)
    for extra in ({}, {"upcast": False}, {"reorder_ops": True}):
        out, weights = attention_ref(q, k, v, **options, **extra)
        torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, 6))


def test_attention_ref_of_padded_batches():
    q, k, v = (torch.randn(3, 7, 2, 8) for _ in "qkv")
    mask_q, mask_k = (torch.arange(7) < torch.tensor(n)[:, None] for n in ([7, 3, 1], [5, 2, 7]))
    packed = [unpad_input(x, m) for x, m in ((q, mask_q), (k, mask_k), (v, mask_k))]
    lengths = [packed[i][j] for j in (2, 3) for i in (0, 1)]
    for window in ((-1, -1), (1, -1)):
        expected = flash_attn_varlen_func(
            *(p[0] for p in packed), *lengths, causal=True, window_size=window
        )
        expected = pad_input(expected, packed[0][1], 3, 7)
        out, _ = attention_ref(q, k, v, mask_q, mask_k, causal=True, window_size=window)
        torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


def test_attention_ref_with_left_padding_dropout_and_bias():
    q, k, v = (torch.randn(2, 5, 2, 8) for _ in "qkv")
    leftpad = torch.tensor([0, 2])
    out, _ = attention_ref(q, k, v, key_leftpad=leftpad, causal=True)
    alone, _ = attention_ref(q[1:], k[1:, 2:], v[1:, 2:], causal=True)
    torch.testing.assert_close(out[1:], alone)
    kept = torch.rand(2, 2, 5, 5) < 0.5
    dropped, weights = attention_ref(q, k, v, dropout_p=0.5, dropout_mask=kept)
    torch.testing.assert_close(dropped, torch.einsum("bhts,bshd->bthd", weights * kept * 2, v))
    bias = torch.randn(2, 1, 5, 5)
    _, biased = attention_ref(q, k, v, attn_bias=bias)
    _, plain = attention_ref(q, k, v)
    torch.testing.assert_close(biased, (plain.log() + bias).softmax(-1))


def test_local_mask():
    hidden = construct_local_mask(2, 5, (1, 0))
    assert hidden.int().tolist() == [[1, 1, 0, 0, 1], [1, 1, 1, 0, 0]]
    sinks = construct_local_mask(2, 5, (1, None), sink_token_length=1)
    assert sinks.int().tolist() == [[0, 1, 0, 0, 0], [0, 1, 1, 0, 0]]


def test_padding_masks():
    torch.manual_seed(0)
    for mode, least in (("full", 9), ("random", 1), ("third", 3)):
        mask = generate_random_padding_mask(9, 200, "cpu", mode)
        lengths = mask.sum(1)
        assert torch.equal(mask, torch.arange(9) < lengths[:, None])
        assert (int(lengths.min()), int(lengths.max())) == (least, 9)
    assert generate_random_padding_mask(2, 200, "cpu", zero_lengths=True).sum(1).min() == 0
    with pytest.raises(ValueError, match="mode: got 'half'"):
        generate_random_padding_mask(2, 2, "cpu", "half")


# --- The others -----------------------------------------------------------------------------------


def test_benchmark(capsys):
    x = torch.randn(8, 8, requires_grad=True)
    options = {"repeats": 2, "desc": "a product"}
    results = benchmark.benchmark_all(torch.mm, x, x, **options)
    assert [measurement.mean > 0 for _, measurement in results] == [True] * 3
    printed = capsys.readouterr().out
    for words in ("a product - Forward pass", "- Backward pass", "- Forward + Backward pass"):
        assert words in printed
    benchmark.benchmark_fwd_bwd(torch.mm, x, x, verbose=False, amp=True, amp_dtype=torch.bfloat16)
    benchmark.pytorch_profiler(torch.mm, x, x, backward=True, verbose=False)
    assert capsys.readouterr().out == ""
    with pytest.raises(ValueError, match=r"grad: got shape \(2,\)"):
        benchmark.benchmark_backward(torch.mm, x, x, grad=torch.ones(2))


def test_profiler_writes_a_trace(tmp_path, capsys):
    path = tmp_path / "trace.json"
    benchmark.pytorch_profiler(torch.mm, *torch.randn(2, 4, 4), trace_filename=str(path), cpu=True)
    assert json.loads(path.read_text())["traceEvents"]
    assert "aten::mm" in capsys.readouterr().out


def test_memory_needs_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="needs a GPU"):
        benchmark.benchmark_memory(torch.mm)


def test_peak_memory(cuda):
    x = torch.zeros(2**28, device=cuda, dtype=torch.int8)
    before = torch.cuda.memory_allocated() / 2**30
    peak = benchmark.benchmark_memory(torch.clone, x, verbose=False)
    assert peak - before == pytest.approx(0.25, rel=0.1)


def test_custom_forward_and_backward():
    class Double(torch.autograd.Function):
        @staticmethod
        @custom_fwd
        def forward(ctx, x):
            return 2 * x

        @staticmethod
        @custom_bwd
        def backward(ctx, dout):
            return 2 * dout

    x = torch.randn(3, requires_grad=True)
    Double.apply(x).sum().backward()
    assert x.grad.tolist() == [2.0] * 3


WEIGHTS = {"a": torch.ones(2), "b": torch.arange(3)}


@pytest.mark.parametrize("kind", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("sharded", [False, True])
def test_weights_of_a_folder(tmp_path, kind, sharded):
    safetensors = pytest.importorskip("safetensors.torch")
    save = safetensors.save_file if kind.endswith("safetensors") else torch.save
    if sharded:
        for name, x in WEIGHTS.items():
            save({name: x}, tmp_path / f"{name}-{kind}")
        index = {"weight_map": {name: f"{name}-{kind}" for name in WEIGHTS}}
        (tmp_path / f"{kind}.index.json").write_text(json.dumps(index))
    else:
        save(WEIGHTS, tmp_path / kind)
    found = state_dict_from_pretrained(str(tmp_path))
    assert found.keys() == WEIGHTS.keys()
    assert all(torch.equal(found[name], x) for name, x in WEIGHTS.items())
    half = state_dict_from_pretrained(str(tmp_path), dtype=torch.float16)
    assert (half["a"].dtype, half["b"].dtype) == (torch.float16, torch.int64)


def test_weights_of_a_name_are_those_that_the_hub_has(tmp_path, monkeypatch):
    hub = pytest.importorskip("transformers.utils")
    torch.save(WEIGHTS, tmp_path / "pytorch_model.bin")
    asked = []

    def cached_file(name, file, **options):
        asked.append((name, file, options))
        return str(tmp_path / file) if file == "pytorch_model.bin" else None

    monkeypatch.setattr(hub, "cached_file", cached_file)
    assert state_dict_from_pretrained("maker/model").keys() == WEIGHTS.keys()
    missing_is_fine = {"_raise_exceptions_for_missing_entries": False}
    assert asked[-1] == ("maker/model", "pytorch_model.bin", missing_is_fine)


def test_a_shard_is_missing(tmp_path):
    index = {"weight_map": {"a": "1-of-3.bin", "b": "2-of-3.bin", "c": "3-of-3.bin"}}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    torch.save({"b": torch.ones(1)}, tmp_path / "2-of-3.bin")
    said = r"has no 1-of-3\.bin, 3-of-3\.bin, which its pytorch_model\.bin\.index\.json names"
    with pytest.raises(OSError, match=said):
        state_dict_from_pretrained(str(tmp_path))


def test_no_weights(tmp_path):
    with pytest.raises(OSError, match=r"has none of model\.safetensors"):
        state_dict_from_pretrained(str(tmp_path))
