"""What index tensors contain, where FA3's functions work with them before an operation does: looked
at on a CPU always, on a GPU with FLASH_ATTN_CHECK=1. Messages have the caller's names."""

from __future__ import annotations

import pytest
import torch
from compare import assert_bitwise
from torch import Tensor

import flash_attn_interface as fa3
from flash_attn import backend
from flash_attn_3 import _contents


def ints(device: str, *values) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def rows(device: str, *shape: int) -> Tensor:
    return torch.randn(*shape, 2, 16, device=device).bfloat16()


def packed(device: str) -> dict:
    x = rows(device, 6)
    ends = ints(device, 0, 2, 6)
    return {"q": x, "k": x, "v": x, "cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": 4,
            "max_seqlen_k": 4}  # fmt: skip


def pages(device: str) -> dict:
    """The same with 2 pages of 8 keys, one of each sequence."""
    table, used = ints(device, [0], [1]), ints(device, 3, 4)
    k, v = rows(device, 2, 8), rows(device, 2, 8)
    more = {"cu_seqlens_k": None, "max_seqlen_k": 8, "page_table": table, "seqused_k": used}
    return packed(device) | {"k": k, "v": v} | more


def cache(device: str) -> dict:
    """Packed queries beside 2 rows of 8 keys, of which 3 and 4 are in use."""
    return {"q": rows(device, 6), "k_cache": rows(device, 2, 8), "v_cache": rows(device, 2, 8),
            "cu_seqlens_q": ints(device, 0, 2, 6), "max_seqlen_q": 4,
            "cache_seqlens": ints(device, 3, 4)}  # fmt: skip


def append(device: str) -> dict:
    """And 3 and 1 new keys."""
    new = {"k": rows(device, 4), "v": rows(device, 4)}
    return cache(device) | new | {"cu_seqlens_k_new": ints(device, 0, 3, 4)}


def turned(device: str) -> dict:
    """One new key each, at rotary positions of their own."""
    tables = {"rotary_cos": torch.ones(8, 4, device=device)}
    tables["rotary_sin"] = torch.zeros(8, 4, device=device)
    call = cache(device) | {"q": rows(device, 2, 1), "cu_seqlens_q": None, "max_seqlen_q": None}
    return call | {"k": rows(device, 2, 1), "v": rows(device, 2, 1)} | tables


FUNCTIONS = {
    packed: fa3.flash_attn_varlen_func,
    pages: fa3.flash_attn_varlen_func,
    cache: fa3.flash_attn_with_kvcache,
    append: fa3.flash_attn_with_kvcache,
    turned: fa3.flash_attn_with_kvcache,
}
NO_SUCH_PAGE = ([0], [9])
#: The call, what is wrong in it, and what is said about it.
BAD = {
    "rows in use": (packed, {"seqused_q": (3, 4)}, r"seqused_q: got \[3, 4\]; .* \[2, 4\]"),
    "rows of which some are in use": (
        packed, {"seqused_q": (1, 1), "cu_seqlens_q": (0, 7, 6)}, r"cu_seqlens_q\[2\]: got 6 after",
    ),
    "keys beside rows in use": (
        packed, {"seqused_q": (1, 1), "seqused_k": (2, 9)}, "seqused_k: got 9 keys for sequence 1",
    ),
    "a page": (pages, {"page_table": NO_SUCH_PAGE}, r"page_table\[1\]: got page 9"),
    "a block": (
        pages, {"page_table": None, "block_table": NO_SUCH_PAGE}, r"block_table\[1\]: got page 9",
    ),
    "more keys than pages hold": (pages, {"seqused_k": (3, 9)}, "seqused_k: got 9 keys"),
    "a cache's page": (cache, {"page_table": NO_SUCH_PAGE}, r"page_table\[1\]: got page 9"),
    "a cache's row": (cache, {"cache_batch_idx": (0, 2)}, r"cache_batch_idx\[1\]: got 2; 0 to 1"),
    "a cache's negative row": (cache, {"cache_batch_idx": (0, -1)}, r"cache_batch_idx\[1\]: got -"),
    "more keys than a cache holds": (cache, {"cache_seqlens": (3, 9)}, "cache_seqlens: got 9 keys"),
    "a negative length": (cache, {"cache_seqlens": (3, -2)}, r"cache_seqlens\[1\]: got -2; -1"),
    "left padding": (cache, {"cache_leftpad": (0, 5)}, r"cache_leftpad\[1\]: got 5; at most 4"),
    "more new keys than room": (
        append, {"cache_seqlens": (6, 4)}, "cache_seqlens and cu_seqlens_k_new ask for more than",
    ),
    "new keys of no page": (append, {"page_table": NO_SUCH_PAGE}, r"page_table\[1\]: got page 9"),
    "new keys that decrease": (
        append, {"cu_seqlens_k_new": (0, 5, 4)}, r"cu_seqlens_k_new\[2\]: got 4 after 5",
    ),
    "new keys that are not there": (
        append, {"cu_seqlens_k_new": (0, 3, 5)}, r"cu_seqlens_k_new\[-1\]: got 5; at most 4",
    ),
    "a negative rotary position": (
        turned, {"rotary_seqlens": (0, -1)}, r"rotary_seqlens: got \[0, -1\]",
    ),
    "a rotary position beyond the table": (
        turned, {"rotary_seqlens": (0, 8)}, "rotary_cos: got 8 positions; 9 are needed",
    ),
}  # fmt: skip


def bad_call(name: str, device: str) -> tuple:
    make, change, says = BAD[name]
    given = {k: v if v is None else ints(device, *v) for k, v in change.items()}
    return FUNCTIONS[make], make(device) | given, says


@pytest.mark.parametrize("name", BAD)
def test_message(device, checking, name):
    function, call, says = bad_call(name, device)
    held = {n: call[n].clone() for n in ("k_cache", "v_cache") if n in call}
    with pytest.raises(ValueError, match=f"^{says}"):
        function(**call)
    for n, x in held.items():
        assert_bitwise(n, call[n], x)


def test_names_of_the_function_below(device, checking):
    """It has the operator's."""
    call = cache(device)
    q, k, v = call["q"], call["k_cache"], call["v_cache"]
    given = {"cu_seqlens_q": call["cu_seqlens_q"], "max_seqlen_q": 4}
    with pytest.raises(ValueError, match=r"^kv_batch_idx\[1\]: got 2; .* row of k, is"):
        fa3._flash_attn_forward(q, k, v, kv_batch_idx=ints(device, 0, 2), **given)
    with pytest.raises(ValueError, match=r"^seqused_k\[1\]: got -2"):
        fa3._flash_attn_forward(q, k, v, seqused_k=ints(device, 3, -2), **given)
    with pytest.raises(ValueError, match=r"^k: got shape"):
        fa3._flash_attn_forward(q, k[0], v[0], seqused_k=ints(device, 3, 2), **given)


@pytest.mark.parametrize("capturing", [False, True])
@pytest.mark.parametrize("asked", [False, True])
def test_a_gpu_is_waited_for_only_where_it_is_asked_for(asked, capturing, monkeypatch):
    class OnAGpu:
        is_cpu, is_cuda = False, True

    monkeypatch.setattr(_contents, "Tensor", OnAGpu)
    monkeypatch.setattr(backend, "CHECK", asked)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    assert _contents.can_look(OnAGpu()) == (asked and not capturing)


#: Of these a GPU's kernels and what comes before them stay within the tensors.
HARMLESS = [
    name for name in BAD if name not in ("rows of which some are in use", "a cache's negative row")
]


@pytest.mark.parametrize("name", HARMLESS)
def test_nothing_is_read_back_otherwise(cuda, monkeypatch, name):
    monkeypatch.setattr(backend, "CHECK", False)
    function, call, _ = bad_call(name, cuda)
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = function(**call)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert out.shape == call["q"].shape


def test_a_graph_is_captured_unchecked(cuda, checking):
    call = append(cuda)
    expected = fa3.flash_attn_with_kvcache(**call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = fa3.flash_attn_with_kvcache(**call)
    graph.replay()
    assert_bitwise("out", out, expected)
