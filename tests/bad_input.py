"""Every bad input of the public functions: how to make it, and what the message has to say."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache

HALF = torch.bfloat16


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


class Bad:
    """One bad input.

    calls: the functions it applies to, by their names in CALLS. change: arguments → the ones to
    replace. says: parts of the message.
    """

    def __init__(
        self,
        name: str,
        calls: str,
        change: Callable[[dict], dict],
        *says: str,
        error: type[Exception] = ValueError,
    ):
        self.name = name
        self.calls = list(CALLS) if calls == "all" else calls.split()
        self.change = change
        self.says = says
        self.error = error


def device_of(call: dict) -> str:
    return call["q"].device.type


def changed(name: str, change):
    """A case that replaces argument ``name`` by ``change`` of it."""
    return lambda call: {name: change(call[name])}


def set_to(**arguments):
    return lambda call: {
        name: value(device_of(call)) if callable(value) else value
        for name, value in arguments.items()
    }


def last_stride_two(x: Tensor) -> Tensor:
    return x.repeat_interleave(2, dim=-1)[..., ::2]


CASES = [
    # q, k and v
    Bad("q list", "all", changed("q", Tensor.tolist), "q: got list", "Tensor", error=TypeError),
    Bad("v none", "dense varlen", set_to(v=None), "v: got NoneType", "Tensor", error=TypeError),
    Bad("q int", "all", changed("q", lambda x: x.int()), "q: got dtype torch.int32", "float16"),
    Bad(
        "k fp32",
        "dense varlen",
        changed("k", lambda x: x.float()),
        "k: got dtype torch.float32",
        "that of q, torch.bfloat16",
    ),
    Bad(
        "cache fp16",
        "cache",
        changed("v_cache", lambda x: x.half()),
        "v_cache: got dtype torch.float16",
        "that of q, torch.bfloat16",
    ),
    Bad(
        "new k fp16",
        "cache",
        changed("k", lambda x: x.half()),
        "k: got dtype torch.float16",
        "torch.bfloat16",
    ),
    Bad(
        "k meta",
        "dense varlen",
        changed("k", lambda x: x.to("meta")),
        "k: got device meta",
        "that of q",
    ),
    Bad(
        "q rank",
        "all",
        changed("q", lambda x: x[0]),
        "q: got shape (",
        "heads, head_dim) is needed",
    ),
    Bad(
        "k rank",
        "dense varlen",
        changed("k", lambda x: x[None]),
        "k: got shape (1,",
        "heads_k, head_dim) ",
    ),
    Bad(
        "cache rank",
        "cache",
        changed("k_cache", lambda x: x[0]),
        "k_cache: got shape (16, 2, 32)",
        "(batch_cache, seqlen_cache, heads_k, head_dim)",
    ),
    Bad(
        "heads",
        "dense varlen",
        lambda c: {n: c[n][..., :1, :].repeat_interleave(3, -2) for n in "kv"},
        "k: got 3 heads",
        "4 heads of q",
    ),
    Bad(
        "cache heads",
        "cache",
        lambda c: {n: c[n].repeat_interleave(3, -2) for n in ("k_cache", "v_cache")},
        "k_cache: got 6 heads",
        "4 heads of q",
    ),
    Bad(
        "no heads",
        "dense varlen",
        lambda c: {n: c[n][..., :0, :] for n in "kv"},
        "k: got 0 heads",
        "4 heads of q",
    ),
    Bad(
        "no heads at all",
        "dense varlen",
        lambda c: {n: c[n][..., :0, :] for n in "qkv"},
        "q: got 0 heads",
        "1 or more",
    ),
    Bad(
        "v heads",
        "dense varlen",
        changed("v", lambda x: x[..., :1, :]),
        "v: got shape",
        "that of k",
    ),
    Bad(
        "v length",
        "dense varlen",
        changed("v", lambda x: x.narrow(-3, 0, 5)),
        "v: got shape",
        "that of k",
    ),
    Bad(
        "k batch", "dense", lambda c: {n: c[n][:1] for n in "kv"}, "k: got batch 1", "that of q, 2"
    ),
    Bad(
        "k head_dim",
        "dense varlen",
        changed("k", lambda x: x[..., :16]),
        "k: got head_dim 16",
        "that of q, 32",
    ),
    # The library rounds head dims up to chunks of 8.
    Bad(
        "cache head_dim",
        "cache",
        lambda c: {n: c[n][..., :28].contiguous() for n in ("k_cache", "k")},
        "k_cache: got head_dim 28",
        "that of q, 32",
    ),
    Bad(
        "pages head_dim",
        "varlen",
        lambda c: {
            "k": torch.zeros(2, 8, 2, 28, device=device_of(c), dtype=HALF),
            "v": torch.zeros(2, 8, 2, 32, device=device_of(c), dtype=HALF),
            "block_table": int32(device_of(c), 0, 1)[:, None],
        },
        "k: got head_dim 28",
        "that of q, 32",
    ),
    Bad(
        "v head_dim 0",
        "dense varlen",
        changed("v", lambda x: x[..., :0]),
        "v: got head_dim 0",
        "1 to 512",
    ),
    Bad("q scalar", "all", changed("q", lambda x: x[(0,) * x.dim()]), "q: got shape ()"),
    Bad(
        "q stride",
        "all",
        changed("q", last_stride_two),
        "q: got strides",
        "must be 1",
        "contiguous()",
    ),
    Bad(
        "q nested",
        "all",
        changed("q", lambda x: torch.nested.nested_tensor(list(x))),
        "q: got a nested tensor",
        "flash_attn_varlen_func",
    ),
    Bad(
        "k jagged",
        "dense varlen",
        changed("k", lambda x: torch.nested.nested_tensor(list(x), layout=torch.jagged)),
        "k: got a nested tensor",
        "offsets()",
    ),
    Bad("q sparse", "dense", changed("q", Tensor.to_sparse), "q: got layout torch.sparse", "dense"),
    Bad("v stride", "dense varlen", changed("v", last_stride_two), "v: got strides", "must be 1"),
    Bad(
        "cache stride",
        "cache",
        changed("v_cache", last_stride_two),
        "v_cache: got strides",
        "must be 1",
    ),
    Bad(
        "head_dim 513",
        "dense varlen",
        lambda c: {n: c[n].repeat_interleave(17, -1)[..., :513].contiguous() for n in "qkv"},
        "q: got head_dim 513",
        "1 to 512",
    ),
    Bad(
        "head_dim 0",
        "dense varlen",
        lambda c: {n: c[n][..., :0] for n in "qkv"},
        "q: got head_dim 0",
        "1 to 512",
    ),
    # varlen
    Bad(
        "pages without a table",
        "varlen",
        lambda c: {n: c[n][:, None] for n in "kv"},
        "k: got shape (12, 1, 2, 32)",
        "or pages with block_table",
    ),
    Bad(
        "cu int64",
        "varlen",
        changed("cu_seqlens_q", lambda x: x.long()),
        "cu_seqlens_q: got dtype torch.int64",
        "torch.int32",
        "call .int()",
    ),
    Bad(
        "cu_k int64",
        "varlen",
        changed("cu_seqlens_k", lambda x: x.long()),
        "cu_seqlens_k: got dtype torch.int64",
        "torch.int32",
    ),
    Bad(
        "cu list",
        "varlen",
        changed("cu_seqlens_q", lambda x: x.tolist()),
        "cu_seqlens_q: got list",
        "Tensor",
        error=TypeError,
    ),
    Bad(
        "cu rank",
        "varlen",
        changed("cu_seqlens_q", lambda x: x[None]),
        "cu_seqlens_q: got shape (1, 3)",
        "(batch + 1,)",
    ),
    Bad(
        "cu empty",
        "varlen",
        changed("cu_seqlens_q", lambda x: x[:0]),
        "cu_seqlens_q: got shape (0,)",
        "(batch + 1,)",
    ),
    Bad(
        "cu lengths",
        "varlen",
        changed("cu_seqlens_k", lambda x: x[:2]),
        "cu_seqlens_k: got shape (2,)",
        "that of cu_seqlens_q, (3,)",
    ),
    Bad(
        "cu meta",
        "varlen",
        changed("cu_seqlens_k", lambda x: x.to("meta")),
        "cu_seqlens_k: got device meta",
        "that of q",
    ),
    Bad(
        "cu stride",
        "varlen",
        changed("cu_seqlens_k", lambda x: x.repeat_interleave(2)[::2]),
        "cu_seqlens_k: got strides (2,)",
        "must be 1",
    ),
    Bad("max bool", "varlen", set_to(max_seqlen_q=True), "got True; an int", error=TypeError),
    Bad(
        "max tensor of bool",
        "varlen",
        set_to(max_seqlen_k=lambda d: torch.ones((), dtype=torch.bool, device=d)),
        "max_seqlen_k: got tensor(True",
        error=TypeError,
    ),
    Bad("max_k negative", "varlen", set_to(max_seqlen_k=-1), "max_seqlen_k: got -1", "0 or more"),
    Bad("max negative", "varlen", set_to(max_seqlen_q=-1), "max_seqlen_q: got -1", "0 or more"),
    Bad(
        "max float",
        "varlen",
        set_to(max_seqlen_k=8.0),
        "max_seqlen_k: got 8.0",
        "int",
        error=TypeError,
    ),
    Bad(
        "max vector",
        "varlen",
        set_to(max_seqlen_k=lambda d: int32(d, 8)),
        "max_seqlen_k: got tensor",
        "0-d",
        error=TypeError,
    ),
    Bad(
        "pages rank",
        "varlen",
        set_to(block_table=lambda d: int32(d, 0)[None].expand(2, 1)),
        "k: got shape (12, 2, 32)",
        "(num_blocks, page_size, heads_k, head_dim) with block_table",
    ),
]
