"""flash_attn.explain, with and without a compiled library (simulated here)."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses import FakeTensorMode

import flash_attn
from flash_attn import backend
from flash_attn.cpu import native
from flash_attn.dispatch import fp8

ROW = {
    "name": "fwd_sm80_bf16_d64_plain",
    "direction": "fwd",
    "dtype": "bf16",
    "head_dim": 64,
    "head_dim_v": 64,
    "block_m": 128,
    "block_n": 64,
    "scores": "plain",
    "why": "a test",
}


LONG_BLOCK_N = 176  # of the row's kernel for rows that see many keys


class Library:
    """Stands in for flash_attn._C: one kernel, for plain bf16 attention of head dim 64, and one for
    a single query of it."""

    def __init__(self, cuda: int = 13000):
        self.asked: list[tuple] = []
        self.asked_about_decode: list[tuple] = []
        self.asked_of_codes: list[bool] = []
        self.packed_batches: list[tuple] = []
        self.cuda = cuda

    def cuda_version(self) -> int:
        return self.cuda

    def compiled_variants(self) -> str:
        return json.dumps([ROW])

    def explain_decode(self, *request) -> str | None:
        batch, seqlen_q, seqlen_k, total_q, _total_k, heads, heads_kv = request[8:15]
        num_splits, page_size, cached, batch_invariant = request[17:21]
        self.asked_about_decode.append((num_splits, page_size, cached))
        self.asked_of_codes.append(request[-1])
        self.packed_batches.append((batch, seqlen_q, seqlen_k, heads, heads_kv, total_q,
                                    batch_invariant))  # fmt: skip
        row = ROW | {"name": "decode_test", "direction": "decode"}
        is_mixed = total_q >= 0 and page_size > 0 and min(seqlen_q, total_q) > 1
        answer = {"variant": row, "rejected": [], "splits": 12, "few_queries": 1 * is_mixed,
                  "block_n": row["block_n"]}  # fmt: skip
        return json.dumps(answer) if seqlen_q == 1 or is_mixed else None

    def explain_forward(self, *request) -> str:
        answer = json.loads(self._select(request, ROW))
        if request[10] >= 4096:
            answer |= {"block_n": LONG_BLOCK_N, "splits": 3}
        return json.dumps(answer)

    def explain_backward(self, *request) -> str:
        answer = json.loads(self._select(request, ROW | {"name": "bwd_test", "direction": "bwd"}))
        choices = [{"text": "ordered dQ", "us": 8.0}, {"text": "tiles", "us": 7.5}]
        return json.dumps(answer | {"plan": {"choices": choices, "text": "tiles", "us": 7.5}})

    def _select(self, request: tuple, row: dict) -> str:
        self.asked.append(request)
        dtype, head_dim, _, full_scores = request[1:5]
        fits = dtype == "bf16" and head_dim <= 64 and not full_scores
        rejected = [] if fits else [{"name": row["name"], "why": "does not serve this"}]
        return json.dumps({"variant": row if fits else None, "rejected": rejected, "splits": 1,
                           "block_n": row["block_n"] if fits else 0})  # fmt: skip


@pytest.fixture
def library(monkeypatch) -> Library:
    """A compiled library with forward kernels, CUDA 13 in torch, and a Hopper GPU."""
    fake("cuda", (1,))  # asks for a GPU the first time, and is to find out that there is none
    simulated = Library()
    monkeypatch.setattr(backend, "library", simulated)
    monkeypatch.setattr(backend, "_missing", {"_flash_attn_with_kvcache"})
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    gpu = SimpleNamespace(
        multi_processor_count=132, L2_cache_size=60 << 20, memory_clock_rate=3_200_000,
        memory_bus_width=6016,
    )  # fmt: skip
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: gpu)
    return simulated


def fake(device: str, *shapes, dtype=torch.bfloat16) -> list[torch.Tensor]:
    with FakeTensorMode():
        return [torch.empty(shape, device=device, dtype=dtype) for shape in shapes]


def qkv(device: str = "cuda", head_dim: int = 64, **kwargs) -> list[torch.Tensor]:
    return fake(device, *[(2, 100, 4, head_dim)] * 3, **kwargs)


def test_cpu():
    choice = flash_attn.explain(*(torch.zeros(2, 5, 4, 64) for _ in "qkv"), causal=True)
    assert choice.backend == "cpu"
    assert choice.operation == "_flash_attn_forward"
    assert choice.kernel
    text = str(choice)
    for words in ("(2, 5, 4, 64)", "float32 on cpu", "causal", "q is on cpu"):
        assert words in text


def test_cpu_names_the_options_and_the_operation():
    q, k, v = fake("cpu", *[(7, 4, 32)] * 3)
    (ends,) = fake("cpu", (3,), dtype=torch.int32)
    choice = flash_attn.explain(q, k, v, 0.1, window_size=(4, 0), softcap=30.0, cu_seqlens_q=ends)
    assert choice.operation == "_flash_attn_varlen_forward"
    for words in ("window (4, 0)", "dropout", "softcap"):
        assert words in choice.call
    q, cache = fake("cpu", (2, 1, 4, 32), (2, 64, 4, 32))
    for arguments in ({"kvcache": True}, {"cache_seqlens": 3}):
        choice = flash_attn.explain(q, cache, cache, **arguments)
        assert choice.operation == "_flash_attn_with_kvcache"


@pytest.mark.parametrize(
    ("arguments", "obstacle"),
    [
        ({"softcap": 1.0}, "has no softcap"),
        ({"dropout_p": 0.5}, "has no dropout"),
        ({"v": torch.zeros(2, 5, 4, 32)}, "has no head_dim 32 of v beside 64 of q"),
        ({}, None),
        ({"causal": True, "s_aux": torch.zeros(4), "alibi_slopes": torch.ones(4)}, None),
    ],
)
def test_cpu_says_which_of_its_two_ways(monkeypatch, arguments, obstacle):
    """And the CPU backend goes that way."""
    x = torch.zeros(2, 5, 4, 64)
    arguments = {"q": x, "k": x, "v": x, **arguments}
    choice = flash_attn.explain(**arguments)
    by_torch = "torch's own CPU flash attention"
    if obstacle is None:
        assert choice.kernel == by_torch
    else:
        assert choice.kernel.startswith("tiled")
        assert (by_torch, obstacle) in choice.rejected
    calls = []
    right = native.forward
    monkeypatch.setattr(native, "forward", lambda *args: calls.append(1) or right(*args))
    flash_attn.flash_attn_func(**arguments)
    assert bool(calls) == (obstacle is None)


def test_explain_computes_nothing():
    from torch.utils._python_dispatch import TorchDispatchMode

    class Forbid(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            raise AssertionError(f"explain called {function}")

    tensors = [torch.zeros(2, 5, 4, 64) for _ in "qkv"]
    with Forbid():
        flash_attn.explain(*tensors, causal=True)


def test_explain_checks_like_the_call():
    q = torch.zeros(2, 5, 4, 64)
    with pytest.raises(ValueError, match="k: got 3 heads"):
        flash_attn.explain(q, q[:, :, :3], q[:, :, :3])


def test_cuda_without_a_library(monkeypatch):
    monkeypatch.setattr(backend, "library", None)
    monkeypatch.setattr(backend, "why_not_loaded", "nothing was built")
    choice = flash_attn.explain(*qkv())
    assert choice.backend == "none"
    assert choice.kernel is None
    assert choice.why == "nothing was built"
    assert "NotImplementedError" in str(choice)


def test_a_named_gpu(library, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", None)
    choice = flash_attn.explain(*qkv("meta"), gpu="A100")
    assert choice.backend == "cuda"
    assert "on A100" in choice.call
    sm, *_, sm_count, l2_bytes, memory_rate = library.asked[-1][:8]
    assert (sm, sm_count, l2_bytes, memory_rate) == (80, 108, 40 << 20, 2_039_000)
    assert flash_attn.explain(*qkv("cpu"), gpu="H100").backend == "cuda"
    with pytest.raises(ValueError, match="gpu: got 'H101'; one of H200, H100"):
        flash_attn.explain(*qkv("cpu"), gpu="H101")


def test_a_named_gpu_and_fp32(library):
    choice = flash_attn.explain(*qkv("cpu", dtype=torch.float32), gpu="H100")
    assert choice.backend == "none"
    assert "fp16 and bf16" in choice.why


def test_a_named_gpu_without_a_library(monkeypatch):
    monkeypatch.setattr(backend, "library", None)
    monkeypatch.setattr(backend, "why_not_loaded", "nothing was built")
    choice = flash_attn.explain(*qkv("cpu"), gpu="H100")
    assert choice.backend == "none"
    assert "the compiled library" in choice.why


def test_cuda_without_a_gpu(library, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    choice = flash_attn.explain(*qkv())
    assert choice.backend == "none"
    assert choice.why == "no GPU was found"


def test_cuda_picks_a_variant(library):
    choice = flash_attn.explain(*qkv(), causal=True)
    size = (132, 60 << 20, 4_812_800, 2, 100, 100, -1, -1, 4, 4, -1, 0)
    asked = (90, "bf16", 64, 64, False, *size, 0, 0, *[False] * 5, 0, False)
    assert library.asked == [asked]
    assert choice.backend == "cuda"
    assert choice.kernel == ROW["name"]
    assert choice.tile == (128, 64)
    assert choice.splits == 1
    assert choice.variant == ROW
    for words in (ROW["name"], "128 rows x 64 keys", "splits     1", "sm_90"):
        assert words in str(choice)


def test_cuda_tile_depends_on_the_keys(library):
    """A row may have a kernel of longer tiles, and cut the keys of few rows."""
    q, k = fake("cuda", (2, 100, 4, 64), (2, 4096, 2, 64))
    choice = flash_attn.explain(q, k, k, causal=True, window_size=(7, 9), num_splits=5)
    assert (choice.tile, choice.splits) == ((128, LONG_BLOCK_N), 3)
    assert "splits     up to 3" in str(choice)
    size = (132, 60 << 20, 4_812_800, 2, 100, 4096, -1, -1, 4, 2, 7, 0)
    assert library.asked[-1][5:] == (*size, 5, 0, False, False, False, False, False, 0, False)
    assert flash_attn.explain(*qkv()).tile == (128, 64)
    assert flash_attn.explain(*qkv(), backward=True).tile == (128, 64)


def test_cuda_largest_logits(library):
    """Plain kernels may keep them; the library knows which."""
    flash_attn.explain(*qkv(), return_max_logits=True)
    assert (library.asked[-1][4], library.asked[-1][-3]) == (False, True)


def test_cuda_backward_of_a_softcap(library):
    """Hopper's kernels do not serve every size of it."""
    flash_attn.explain(*qkv(), softcap=300.0, backward=True)
    assert library.asked[-1][:6] == (90, "bf16", 64, 64, True, 300.0)


def test_cuda_backward_has_a_plan(library):
    """What the library is told, and what it says of the choices."""
    q, k, v = fake("cuda", *[(2, 100, heads, 64) for heads in (4, 2, 2)])
    choice = flash_attn.explain(q, k, v, window_size=(7, -1), deterministic=True, backward=True)
    size = (132, 60 << 20, 4_812_800, 2, 100, 100, -1, -1, 4, 2, 7, -1, True)
    assert library.asked[-1] == (90, "bf16", 64, 64, False, 0.0, *size)
    assert (choice.plan, choice.microseconds) == ("tiles", 7.5)
    assert choice.choices == (("tiles", 7.5), ("ordered dQ", 8.0))
    assert "plan       tiles: 8 µs predicted\nor         ordered dQ: 8 µs" in str(choice)
    assert not flash_attn.explain(q, k, v).plan


def test_cuda_pages_with_left_padding(library, monkeypatch):
    """Hopper's boxes have no place for it, nor for batch strides by which rows have no numbers."""
    monkeypatch.setattr(backend, "_missing", set())
    q, pages = fake("cuda", (2, 70, 4, 64), (9, 16, 4, 64))
    table, padding = fake("cuda", (2, 3), (2,), dtype=torch.int32)
    for more, page_size in (({}, 16), ({"cache_leftpad": padding}, 1)):
        flash_attn.explain(q, pages, pages, block_table=table, kvcache=True, **more)
        assert library.asked[-1][18] == page_size
    with FakeTensorMode():
        cache = torch.empty(2, 64 * 256 + 8, device="cuda", dtype=torch.bfloat16)
        cache = cache.as_strided((2, 64, 4, 64), (64 * 256 + 8, 256, 64, 1))
    flash_attn.explain(q, cache, cache, kvcache=True)
    assert library.asked[-1][0] == 80


def test_cuda_tile_of_packed_sequences(library):
    tensors, options = packed(7)
    assert flash_attn.explain(*tensors, **options).tile == (128, 64)
    # Beside decode, which has the sequences of up to one query.
    size = (132, 60 << 20, 4_812_800, 5, 7, 48, 7, -1, 4, 2, -1, -1)
    assert library.asked[-1][5:] == (*size, 0, 16, False, False, False, True, False, 1, False)


def test_cuda_says_what_was_rejected(library):
    choice = flash_attn.explain(*qkv(dtype=torch.float16))
    assert choice.backend == "none"
    assert choice.rejected == ((ROW["name"], "does not serve this"),)
    assert f"{ROW['name']}: does not serve this" in str(choice)


@pytest.mark.parametrize(
    "arguments", [{"softcap": 1.0}, {"dropout_p": 0.1}, {"softmax_scale": -1.0}]
)
def test_cuda_asks_for_full_scores(library, arguments):
    assert flash_attn.explain(*qkv(), **arguments).backend == "none"
    assert [asked[:5] for asked in library.asked] == [(90, "bf16", 64, 64, True)]


def test_cuda_sinks_do_not_ask_for_full_scores(library):
    (sinks,) = fake("cuda", (4,), dtype=torch.float32)
    choice = flash_attn.explain(*qkv(), s_aux=sinks)
    assert [asked[:5] for asked in library.asked] == [(90, "bf16", 64, 64, False)]
    assert choice.kernel == ROW["name"]


def test_cuda_says_that_it_pads(library):
    choice = flash_attn.explain(*qkv(head_dim=60))
    assert [asked[:5] for asked in library.asked] == [(90, "bf16", 64, 64, False)]
    assert "head_dim 60 is padded to 64" in choice.why


def test_cuda_few_queries_may_be_cut(library):
    """A dense call with few rows goes to a decode kernel, unless that would show in its result."""
    few = fake("cuda", *[(2, 1, 4, 64)] * 3)
    choice = flash_attn.explain(*few)
    assert (choice.kernel, choice.splits) == ("decode_test", 12)
    assert library.asked_about_decode == [(0, False, False)]
    for options in ({"batch_invariant": True}, {"dropout_p": 0.1}):
        flash_attn.explain(*few, **options)
    assert len(library.asked_about_decode) == 1
    assert flash_attn.explain(*qkv()).kernel == ROW["name"]


def packed(longest: int | None) -> tuple[list, dict]:
    q, pages = fake("cuda", (7, 4, 64), (9, 16, 2, 64))
    ends, table = fake("cuda", (6,), (5, 3), dtype=torch.int32)
    options = {"cu_seqlens_q": ends, "block_table": table, "max_seqlen_q": longest}
    return [q, pages, pages], options


def test_cuda_packed_batch_of_few_queries(library):
    tensors, options = packed(1)
    choice = flash_attn.explain(*tensors, **options, num_splits=3)
    assert (choice.kernel, choice.splits, choice.few_kernel) == ("decode_test", 12, None)
    assert library.asked_about_decode == [(3, 16, False)]
    assert library.packed_batches == [(5, 1, 48, 4, 2, 7, False)]
    assert not library.asked
    flash_attn.explain(*tensors, **options, dropout_p=0.1)
    assert len(library.asked_about_decode) == 1


def test_cuda_pages_of_codes(library):
    """The library knows which kernels read them."""
    (q, pages, _), options = packed(1)
    for keys, are_codes in ((pages, False), (pages.to(torch.float8_e4m3fn), True)):
        flash_attn.explain(q, keys, keys, **options)
        assert library.asked_of_codes[-1] == are_codes
    (of_rows,) = fake("cuda", keys.shape[:3], dtype=torch.float32)
    said = flash_attn.explain(q, keys, keys, **options, k_descale=of_rows)
    assert library.asked_of_codes[-1] == 2  # of rows, which decode alone takes
    assert "descales of rows" in str(said)


class CodedLibrary(Library):
    """Has a kernel of fp8 products too."""

    def compiled_variants(self) -> str:
        return json.dumps([ROW, ROW | {"dtype": "e4m3"}])

    def _select(self, request: tuple, row: dict) -> str:
        if request[1] == "e4m3":
            self.asked.append(request)
            row |= {"name": "fwd_sm90_e4m3", "dtype": "e4m3"}
            return json.dumps({"variant": row, "rejected": [], "splits": 1, "block_n": 128})
        return super()._select(request, row)


@pytest.fixture
def coded_library(library, monkeypatch) -> CodedLibrary:
    simulated = CodedLibrary()
    monkeypatch.setattr(backend, "library", simulated)
    monkeypatch.setattr(fp8, "has_kernel", True)
    return simulated


@pytest.mark.parametrize("gpu", ["H200", "A100"])
@pytest.mark.parametrize("asked", [True, False])
def test_codes_of_q(coded_library, gpu, asked):
    q, k = fake("meta", (2, 40, 4, 40), (2, 50, 2, 40), dtype=torch.float8_e4m3fn)
    said = flash_attn.explain(q, k, k, gpu=gpu, fp8_products=asked)
    if gpu == "H200" and asked:
        assert (said.operation, said.kernel) == ("_flash_attn_fp8_forward", "fwd_sm90_e4m3")
        request = coded_library.asked[-1]
        assert (request[:5], request[-1]) == ((90, "e4m3", 48, 48, False), 4)
        assert "fp8 products" in said.call
        assert not any("converts" in reason for reason in said.slow)
    else:
        assert (said.operation, said.kernel) == ("_flash_attn_forward", ROW["name"])
        request = coded_library.asked[-1]
        assert (request[1:5], request[-1]) == (("bf16", 40, 40, False), 0)
        assert "as bfloat16" in said.call
        assert "each call converts q, k and v to bfloat16" in said.slow
        ((who, why), *_) = said.rejected
        assert who == "kernels of fp8 products"
        assert ("need a Hopper GPU" if asked else "fp8_products=True") in why


def test_codes_in_pages_of_few_queries(coded_library):
    """Decode serves them, with queries of 16 bits."""
    (q, pages, _), options = packed(1)
    q, pages = q.to(torch.float8_e4m3fn), pages.to(torch.float8_e4m3fn)
    said = flash_attn.explain(q, pages, pages, **options, gpu="H200", fp8_products=True,
                              out_dtype=torch.float16)  # fmt: skip
    assert (said.operation, said.kernel) == ("_flash_attn_varlen_forward", "decode_test")
    assert coded_library.asked_of_codes == [1]
    assert "each call converts q to float16" in said.slow
    assert "leave pages to decode" in dict(said.rejected)["kernels of fp8 products"]


def test_codes_have_no_backward(coded_library):
    (q,) = fake("meta", (2, 40, 4, 64), dtype=torch.float8_e4m3fn)
    said = flash_attn.explain(q, q, q, gpu="H200", backward=True)
    assert "there is no backward of a cache, pages or codes" in said.why


@pytest.mark.parametrize("longest", [7, None])
def test_cuda_packed_batch_that_two_kernels_share(library, longest):
    tensors, options = packed(longest)
    choice = flash_attn.explain(*tensors, **options, batch_invariant=True)
    assert library.packed_batches == [(5, 7, 48, 4, 2, 7, True)]
    assert [(asked[:5], asked[18]) for asked in library.asked] == [
        ((90, "bf16", 64, 64, False), 16)
    ]
    assert (choice.kernel, choice.few_kernel, choice.few_queries) == (ROW["name"], "decode_test", 1)
    assert choice.splits == 12
    assert "decode_test for sequences of up to 1" in str(choice)


def test_cuda_packed_keys(library):
    q, k, ends = *fake("cuda", (7, 4, 64), (90, 4, 64)), torch.empty(6)
    longest = {"max_seqlen_q": 1, "max_seqlen_k": 40}
    assert flash_attn.explain(q, k, k, cu_seqlens_q=ends, **longest).kernel == "decode_test"
    assert flash_attn.explain(q, k, k, cu_seqlens_q=ends).kernel == ROW["name"]
    assert library.packed_batches == [(5, 1, 40, 4, 4, 7, False), (5, 7, 90, 4, 4, 7, False)]


def test_cuda_numbers_beyond_an_int(library, monkeypatch):
    """What a call takes as good as unlimited does not fit the library's ints."""
    flash_attn.explain(*qkv(), window_size=(2**40, -(2**40)))
    assert library.asked[-1][15:17] == (-1, -1)
    monkeypatch.setattr(backend, "_missing", set())
    q, cache = fake("cuda", (2, 1, 4, 64), (2, 64, 4, 64))
    flash_attn.explain(q, cache, cache, kvcache=True, num_splits=2**40)
    num_splits, *_ = library.asked_about_decode[-1]
    assert 64 < num_splits < 2**31


@pytest.mark.parametrize("longest", [-1, 2**30])
def test_cuda_lengths_that_a_call_refuses(library, longest):
    tensors, options = packed(longest)
    choice = flash_attn.explain(*tensors, **options)
    assert choice.backend == "none"
    assert "length" in choice.why
    assert not library.asked


def test_cuda_operation_without_a_kernel(library):
    q, cache = fake("cuda", (2, 1, 4, 64), (2, 64, 4, 64))
    choice = flash_attn.explain(q, cache, cache, kvcache=True)
    assert choice.backend == "none"
    assert "_flash_attn_with_kvcache has no CUDA kernel yet" in choice.why
    assert ROW["name"] in choice.why


def test_cuda_option_without_a_kernel(library):
    (table,) = fake("cuda", (2, 3), dtype=torch.int32)
    q, pages, ends = *fake("cuda", (7, 4, 64), (9, 16, 4, 64)), torch.empty(3)
    options = {"cu_seqlens_q": ends, "block_table": table}
    choice = flash_attn.explain(q, pages, pages, return_attn_probs=True, **options)
    assert choice.backend == "none"
    assert "attn_probs of pages" in choice.why
    assert flash_attn.explain(q, pages, pages, **options).backend == "cuda"
    assert [(asked[:5], asked[18]) for asked in library.asked] == [
        ((90, "bf16", 64, 64, False), 16)
    ]


def test_cuda_probabilities_change_nothing_about_the_kernel(library):
    choice = flash_attn.explain(*qkv(), return_attn_probs=True)
    assert [asked[:5] for asked in library.asked] == [(90, "bf16", 64, 64, False)]
    assert choice.kernel == ROW["name"]
    assert "attn_probs" in choice.call
