"""Bad input: each raises, and the message names the argument, what it got, and what is accepted."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flash_attn import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)

HALF = torch.bfloat16
INF = float("inf")


def tensors(device: str, *shape: int, heads_k: int = 2) -> dict[str, Tensor]:
    """q (*shape, 4, 32), k and v (*shape, heads_k, 32)."""
    heads = {"q": 4, "k": heads_k, "v": heads_k}
    return {
        name: torch.randn(*shape, h, 32, device=device, dtype=HALF) for name, h in heads.items()
    }


def dense(device: str) -> dict:
    return tensors(device, 2, 6)


def int32(device: str, *values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def varlen(device: str) -> dict:
    ends = int32(device, 0, 4, 12)
    lengths = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": 8, "max_seqlen_k": 8}
    return {**tensors(device, 12), **lengths}


def cache(device: str) -> dict:
    """A cache of 16 positions with 5 in use, and 6 new keys."""
    new = dense(device)
    caches = {
        name: torch.randn(2, 16, 2, 32, device=device, dtype=HALF)
        for name in ("k_cache", "v_cache")
    }
    return {"q": new["q"], **caches, "k": new["k"], "v": new["v"], "cache_seqlens": 5}


def rotary(device: str, rows: int = 16, columns: int = 16) -> dict:
    return {
        name: torch.ones(rows, columns, device=device, dtype=HALF)
        for name in ("rotary_cos", "rotary_sin")
    }


CALLS = {
    "dense": (flash_attn_func, dense),
    "varlen": (flash_attn_varlen_func, varlen),
    "cache": (flash_attn_with_kvcache, cache),
}


def changed(name: str, change):
    """A case that replaces argument ``name`` by ``change`` of it."""
    return lambda call: {name: change(call[name])}


def set_to(**arguments):
    return lambda call: {
        name: value(call["q"].device.type) if callable(value) else value
        for name, value in arguments.items()
    }


def last_stride_two(x: Tensor) -> Tensor:
    return x.repeat_interleave(2, dim=-1)[..., ::2]


# (case, calls it applies to, change, exception, what the message has to say)
CASES = [
    # q, k and v
    ("q list", "all", changed("q", lambda x: x.tolist()), TypeError, ["q: got list", "Tensor"]),
    ("v none", "dense varlen", set_to(v=None), TypeError, ["v: got NoneType", "Tensor"]),
    ("q int", "all", changed("q", lambda x: x.int()), ValueError, ["q: got dtype torch.int32", "float16"]),
    ("k fp32", "dense varlen", changed("k", lambda x: x.float()), ValueError, ["k: got dtype torch.float32", "that of q, torch.bfloat16"]),
    ("cache fp16", "cache", changed("v_cache", lambda x: x.half()), ValueError, ["v_cache: got dtype torch.float16", "that of q, torch.bfloat16"]),
    ("new k fp16", "cache", changed("k", lambda x: x.half()), ValueError, ["k: got dtype torch.float16", "torch.bfloat16"]),
    ("k meta", "dense varlen", changed("k", lambda x: x.to("meta")), ValueError, ["k: got device meta", "that of q"]),
    ("q rank", "all", changed("q", lambda x: x[0]), ValueError, ["q: got shape (", "heads, head_dim) is needed"]),
    ("k rank", "dense varlen", changed("k", lambda x: x[None]), ValueError, ["k: got shape (1,", "heads_k, head_dim) is needed"]),
    ("cache rank", "cache", changed("k_cache", lambda x: x[0]), ValueError, ["k_cache: got shape (16, 2, 32)", "(batch_cache, seqlen_cache, heads_k, head_dim)"]),
    ("heads", "dense varlen", lambda c: {n: c[n][..., :1, :].repeat_interleave(3, -2) for n in "kv"}, ValueError, ["k: got 3 heads", "4 heads of q"]),
    ("cache heads", "cache", lambda c: {n: c[n].repeat_interleave(3, -2) for n in ("k_cache", "v_cache")}, ValueError, ["k_cache: got 6 heads", "4 heads of q"]),
    ("no heads", "dense varlen", lambda c: {n: c[n][..., :0, :] for n in "kv"}, ValueError, ["k: got 0 heads", "4 heads of q"]),
    ("v heads", "dense varlen", changed("v", lambda x: x[..., :1, :]), ValueError, ["v: got shape", "that of k"]),
    ("v length", "dense varlen", changed("v", lambda x: x.narrow(-3, 0, 5)), ValueError, ["v: got shape", "that of k"]),
    ("k batch", "dense", lambda c: {n: c[n][:1] for n in "kv"}, ValueError, ["k: got batch 1", "that of q, 2"]),
    ("k head_dim", "dense varlen", changed("k", lambda x: x[..., :16]), ValueError, ["k: got head_dim 16", "that of q, 32"]),
    ("q stride", "all", changed("q", last_stride_two), ValueError, ["q: got strides", "must be 1", "contiguous()"]),
    ("v stride", "dense varlen", changed("v", last_stride_two), ValueError, ["v: got strides", "must be 1"]),
    ("cache stride", "cache", changed("v_cache", last_stride_two), ValueError, ["v_cache: got strides", "must be 1"]),
    ("head_dim 257", "dense varlen", lambda c: {n: c[n].repeat_interleave(9, -1)[..., :257].contiguous() for n in "qkv"}, ValueError, ["q: got head_dim 257", "1 to 256"]),
    ("head_dim 0", "dense varlen", lambda c: {n: c[n][..., :0] for n in "qkv"}, ValueError, ["q: got head_dim 0", "1 to 256"]),
    # scores
    ("dropout 1", "dense varlen", set_to(dropout_p=1.0), ValueError, ["dropout_p: got 1.0", "< 1"]),
    ("dropout negative", "dense varlen", set_to(dropout_p=-0.1), ValueError, ["dropout_p: got -0.1", "0 <="]),
    ("dropout nan", "dense varlen", set_to(dropout_p=float("nan")), ValueError, ["dropout_p: got nan"]),
    ("softcap negative", "all", set_to(softcap=-1.0), ValueError, ["softcap: got -1.0", "positive"]),
    ("softcap inf", "all", set_to(softcap=INF), ValueError, ["softcap: got inf"]),
    ("scale tensor", "all", set_to(softmax_scale=lambda d: torch.ones((), device=d)), TypeError, ["softmax_scale: got a Tensor", "number"]),
    ("window int", "all", set_to(window_size=3), ValueError, ["window_size: got 3", "(left, right)"]),
    ("window three", "all", set_to(window_size=(1, 2, 3)), ValueError, ["window_size: got (1, 2, 3)", "pair"]),
    ("window none", "all", set_to(window_size=(None, 0)), ValueError, ["window_size: got (None, 0)", "-1 is unbounded"]),
    ("alibi shape", "all", set_to(alibi_slopes=lambda d: torch.ones(3, device=d)), ValueError, ["alibi_slopes: got shape (3,)", "(4,)", "(2, 4)"]),
    ("alibi dtype", "all", set_to(alibi_slopes=lambda d: torch.ones(4, device=d, dtype=HALF)), ValueError, ["alibi_slopes: got dtype torch.bfloat16", "float32"]),
    ("alibi gradient", "all", set_to(alibi_slopes=lambda d: torch.ones(4, device=d, requires_grad=True)), RuntimeError, ["alibi_slopes: requires_grad", "no gradient"]),
    ("sinks shape", "all", set_to(s_aux=lambda d: torch.ones(2, device=d)), ValueError, ["s_aux: got shape (2,)", "(4,)"]),
    ("sinks dtype", "all", set_to(s_aux=lambda d: torch.ones(4, device=d, dtype=torch.int32)), ValueError, ["s_aux: got dtype torch.int32", "floating"]),
    ("sinks number", "all", set_to(s_aux=1.0), TypeError, ["s_aux: got float", "Tensor"]),
    # varlen
    ("cu int64", "varlen", changed("cu_seqlens_q", lambda x: x.long()), ValueError, ["cu_seqlens_q: got dtype torch.int64", "torch.int32"]),
    ("cu_k int64", "varlen", changed("cu_seqlens_k", lambda x: x.long()), ValueError, ["cu_seqlens_k: got dtype torch.int64", "torch.int32"]),
    ("cu list", "varlen", changed("cu_seqlens_q", lambda x: x.tolist()), TypeError, ["cu_seqlens_q: got list", "Tensor"]),
    ("cu rank", "varlen", changed("cu_seqlens_q", lambda x: x[None]), ValueError, ["cu_seqlens_q: got shape (1, 3)", "(batch + 1,)"]),
    ("cu empty", "varlen", changed("cu_seqlens_q", lambda x: x[:0]), ValueError, ["cu_seqlens_q: got shape (0,)", "(batch + 1,)"]),
    ("cu lengths", "varlen", changed("cu_seqlens_k", lambda x: x[:2]), ValueError, ["cu_seqlens_k: got shape (2,)", "that of cu_seqlens_q, (3,)"]),
    ("cu meta", "varlen", changed("cu_seqlens_k", lambda x: x.to("meta")), ValueError, ["cu_seqlens_k: got device meta", "that of q"]),
    ("cu stride", "varlen", changed("cu_seqlens_k", lambda x: x.repeat_interleave(2)[::2]), ValueError, ["cu_seqlens_k: got strides (2,)", "must be 1"]),
    ("max negative", "varlen", set_to(max_seqlen_q=-1), ValueError, ["max_seqlen_q: got -1", "0 or more"]),
    ("max float", "varlen", set_to(max_seqlen_k=8.0), TypeError, ["max_seqlen_k: got 8.0", "int"]),
    ("max vector", "varlen", set_to(max_seqlen_k=lambda d: int32(d, 8)), TypeError, ["max_seqlen_k: got tensor", "0-d"]),
    ("pages rank", "varlen", set_to(block_table=lambda d: int32(d, 0)[None].expand(2, 1)), ValueError, ["k: got shape (12, 2, 32)", "(num_blocks, page_size, heads_k, head_dim) with block_table"]),
    # cache
    ("k without v", "cache", set_to(v=None), ValueError, ["v: got None", "together"]),
    ("v without k", "cache", set_to(k=None), ValueError, ["k: got None", "together"]),
    ("no lengths", "cache", set_to(cache_seqlens=None), ValueError, ["cache_seqlens: got None", "new keys"]),
    ("lengths int64", "cache", set_to(cache_seqlens=lambda d: int32(d, 5, 5).long()), ValueError, ["cache_seqlens: got dtype torch.int64", "int32"]),
    ("lengths shape", "cache", set_to(cache_seqlens=lambda d: int32(d, 5)), ValueError, ["cache_seqlens: got shape (1,)", "(2,)"]),
    ("lengths float", "cache", set_to(cache_seqlens=5.0), TypeError, ["cache_seqlens: got float", "int"]),
    ("lengths too large", "cache", set_to(cache_seqlens=11), ValueError, ["cache_seqlens: got 11", "6 new keys", "0 to 10"]),
    ("lengths negative", "cache", set_to(cache_seqlens=-2), ValueError, ["cache_seqlens: got -2", "-1"]),
    ("too many new", "cache", lambda c: {n: c[n].repeat_interleave(3, 1) for n in "kv"}, ValueError, ["k: got 18 new keys", "holds 16"]),
    ("new heads", "cache", changed("k", lambda x: x[:, :, :1]), ValueError, ["k: got shape (2, 6, 1, 32)", "(2, seqlen_new, 2, 32)"]),
    ("new lengths", "cache", changed("v", lambda x: x[:, :5]), ValueError, ["v: got shape (2, 5, 2, 32)", "that of k"]),
    ("cache batch", "cache", lambda c: {n: c[n][:1] for n in ("k_cache", "v_cache")}, ValueError, ["k_cache: got batch 1", "cache_batch_idx"]),
    ("batch idx shape", "cache", set_to(cache_batch_idx=lambda d: int32(d, 0)), ValueError, ["cache_batch_idx: got shape (1,)", "(2,)"]),
    ("batch idx dtype", "cache", set_to(cache_batch_idx=lambda d: int32(d, 0, 1).long()), ValueError, ["cache_batch_idx: got dtype torch.int64", "int32"]),
    ("leftpad shape", "cache", set_to(cache_leftpad=lambda d: int32(d, 0)), ValueError, ["cache_leftpad: got shape (1,)", "(2,)"]),
    ("table shape", "cache", set_to(block_table=lambda d: int32(d, 0, 1)), ValueError, ["block_table: got shape (2,)", "(batch, max_blocks)"]),
    ("table batch", "cache", set_to(block_table=lambda d: int32(d, 0, 1)[None]), ValueError, ["block_table: got shape (1, 2)", "(2, max_blocks)"]),
    ("table int64", "cache", set_to(block_table=lambda d: int32(d, 0, 1)[:, None].long()), ValueError, ["block_table: got dtype torch.int64", "int32"]),
    ("table and batch idx", "cache", set_to(block_table=lambda d: int32(d, 0, 1)[:, None], cache_batch_idx=lambda d: int32(d, 0, 1)), ValueError, ["cache_batch_idx", "block_table"]),
    ("splits", "cache", set_to(num_splits=-1), ValueError, ["num_splits: got -1", "0"]),
    ("cos without sin", "cache", lambda c: {"rotary_cos": rotary(c["q"].device.type)["rotary_cos"]}, ValueError, ["rotary_sin: got None", "together"]),
    ("rotary without keys", "cache", lambda c: {"k": None, "v": None, **rotary(c["q"].device.type)}, ValueError, ["rotary_cos", "without new keys"]),
    ("rotary dtype", "cache", lambda c: {n: x.float() for n, x in rotary(c["q"].device.type).items()}, ValueError, ["rotary_cos: got dtype torch.float32", "torch.bfloat16"]),
    ("rotary wide", "cache", lambda c: rotary(c["q"].device.type, columns=17), ValueError, ["rotary_cos: got shape (16, 17)", "rotary_dim <= 32"]),
    ("rotary short", "cache", lambda c: rotary(c["q"].device.type, rows=15), ValueError, ["rotary_cos: got shape (15, 16)", "16 positions"]),
    ("rotary shapes", "cache", lambda c: {**rotary(c["q"].device.type), "rotary_sin": rotary(c["q"].device.type, rows=20)["rotary_sin"]}, ValueError, ["rotary_sin: got shape (20, 16)", "(16, 16)"]),
    ("q gradient", "cache", changed("q", lambda x: x.requires_grad_()), RuntimeError, ["q: requires_grad", "no_grad"]),
    ("cache gradient", "cache", changed("k_cache", lambda x: x.requires_grad_()), RuntimeError, ["k_cache: requires_grad", "no backward"]),
    ("new gradient", "cache", changed("v", lambda x: x.requires_grad_()), RuntimeError, ["v: requires_grad", "no_grad"]),
]  # fmt: skip
PAIRS = [
    pytest.param(call, *case[2:], id=f"{call}-{case[0].replace(' ', '_')}")
    for case in CASES
    for call in (CALLS if case[1] == "all" else case[1].split())
]


@pytest.mark.parametrize(("call", "change", "error", "says"), PAIRS)
def test_message(device, call, change, error, says):
    function, make = CALLS[call]
    arguments = make(device)
    arguments.update(change(arguments))
    with pytest.raises(error) as raised:
        function(**arguments)
    assert raised.type is error
    for words in says:
        assert words in str(raised.value)


@pytest.mark.parametrize("call", CALLS)
def test_the_unchanged_calls_are_good(device, needs, call):
    """Otherwise the cases above could raise for another reason."""
    function, make = CALLS[call]
    with needs(*(["kvcache"] if call == "cache" else [])):
        assert function(**make(device)).isfinite().all()
    if call == "cache":
        with needs("kvcache"):
            assert function(**make(device), **rotary(device)).isfinite().all()


@pytest.mark.parametrize(
    ("function", "name", "shape", "accepted", "others"),
    [
        (flash_attn_qkvpacked_func, "qkv", (2, 6, 2, 4, 32), "(batch, seqlen, 3, heads, head_dim)", ()),
        (flash_attn_qkvpacked_func, "qkv", (2, 6, 4, 32), "(batch, seqlen, 3, heads, head_dim)", ()),
        (flash_attn_kvpacked_func, "kv", (2, 6, 3, 4, 32), "(batch, seqlen, 2, heads, head_dim)", (2, 6)),
        (flash_attn_varlen_qkvpacked_func, "qkv", (12, 2, 4, 32), "(total, 3, heads, head_dim)", ()),
        (flash_attn_varlen_kvpacked_func, "kv", (12, 3, 4, 32), "(total, 2, heads, head_dim)", (12,)),
    ],
)  # fmt: skip
def test_packed_message(device, function, name, shape, accepted, others):
    packed = torch.zeros(shape, device=device, dtype=HALF)
    arguments = {name: packed}
    if others:
        arguments["q"] = torch.zeros(*others, 4, 32, device=device, dtype=HALF)
    ends = int32(device, 0, 12)
    if function is flash_attn_varlen_qkvpacked_func:
        arguments |= {"cu_seqlens": ends, "max_seqlen": 12}
    if function is flash_attn_varlen_kvpacked_func:
        arguments |= {f"cu_seqlens_{x}": ends for x in "qk"}
        arguments |= {f"max_seqlen_{x}": 12 for x in "qk"}
    with pytest.raises(ValueError) as raised:
        function(**arguments)
    assert f"{name}: got shape {shape}" in str(raised.value)
    assert accepted in str(raised.value)


def test_packed_needs_a_tensor():
    with pytest.raises(TypeError, match="qkv: got list"):
        flash_attn_qkvpacked_func([1])


# --- Contents: only on the CPU, where looking costs no synchronisation ----------------------------


@pytest.mark.parametrize("which", ["cu_seqlens_q", "cu_seqlens_k"])
def test_decreasing_cu_seqlens(which):
    arguments = varlen("cpu")
    arguments[which] = int32("cpu", 0, 8, 4)
    with pytest.raises(ValueError, match=which):
        flash_attn_varlen_func(**arguments)


def test_cache_overflow():
    arguments = cache("cpu") | {"cache_seqlens": int32("cpu", 3, 11)}
    before = arguments["k_cache"].clone()
    with pytest.raises(ValueError, match="cache"):
        flash_attn_with_kvcache(**arguments)
    assert torch.equal(arguments["k_cache"], before)


# --- Addresses ------------------------------------------------------------------------------------


def test_address_between_two_elements():
    memory = bytearray(2 * 6 * 4 * 32 * 2 + 1)
    misaligned = torch.frombuffer(memory, dtype=HALF, offset=1).view(2, 6, 4, 32)
    arguments = dense("cpu") | {"q": misaligned}
    with pytest.raises(ValueError, match=r"q: got address 0x.*a multiple of 2 is needed"):
        flash_attn_func(**arguments)


def test_address_that_is_no_multiple_of_16_bytes(cuda):
    x = torch.zeros(2 * 6 * 4 * 32 + 1, device=cuda, dtype=HALF)[1:].view(2, 6, 4, 32)
    with pytest.raises(ValueError, match=r"k: got address 0x.*16 bytes"):
        flash_attn_func(**dense(cuda) | {"k": x, "v": x})


def test_rows_that_are_no_multiple_of_16_bytes_apart(cuda):
    x = torch.zeros(2, 6, 4, 33, device=cuda, dtype=HALF)[..., :32]
    with pytest.raises(ValueError, match=r"q: got strides .*16 bytes"):
        flash_attn_func(**dense(cuda) | {"q": x})


def test_cuda_takes_half_precision_only(cuda):
    arguments = {name: x.float() for name, x in dense(cuda).items()}
    with pytest.raises(ValueError, match=r"q: got dtype torch.float32; accepted on cuda are"):
        flash_attn_func(**arguments)


def test_unsupported_gpu(monkeypatch):
    """Turing, seen from a machine that may have no GPU at all."""
    from flash_attn import backend

    backend.check_gpu.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    with pytest.raises(NotImplementedError, match=r"Tesla T4 .* 7\.5; 8\.0 .* is needed"):
        backend.check_gpu(torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    backend.check_gpu(torch.device("cuda", 0))
    backend.check_gpu.cache_clear()


def test_unsupported_device(monkeypatch):
    q = torch.empty(2, 6, 4, 32, device="meta", dtype=HALF)
    assert flash_attn_func(q, q, q).shape == q.shape  # shapes only, but accepted
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        q = torch.empty(2, 6, 4, 32, device="xpu", dtype=HALF)
        with pytest.raises(ValueError, match="q: got device xpu.*cpu and cuda"):
            flash_attn_func(q, q, q)


def test_no_backward_through_pages():
    q = torch.randn(4, 2, 32, requires_grad=True)
    pages = torch.randn(2, 4, 2, 32)
    ends = int32("cpu", 0, 4)
    table = int32("cpu", 1)[None]
    out = flash_attn_varlen_func(q, pages, pages, ends, ends, 4, 4, block_table=table)
    with pytest.raises(NotImplementedError, match="no backward through block_table"):
        out.sum().backward()
