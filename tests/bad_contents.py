"""Index tensors whose contents lie outside, by call; see bad_input.py."""

from __future__ import annotations

from bad_input import Bad, device_of, int32, rotary, set_to


def pages(*table: tuple[int, ...], size: int = 4):
    """The keys of a call in 3 pages of 4, with this table."""

    def change(call: dict) -> dict:
        names = ("k", "v") if "k_cache" not in call else ("k_cache", "v_cache")
        flat = (call[name].flatten(0, -3)[: 3 * size] for name in names)
        held = {name: x.unflatten(0, (3, size)).contiguous() for name, x in zip(names, flat)}
        rows = [int32(device_of(call), *row) for row in table]
        return {**held, "block_table": rows[0].new_tensor([row.tolist() for row in rows])}

    return change


def both(*changes):
    """All of these changes, one after the other."""

    def change(call: dict) -> dict:
        made: dict = {}
        for one in changes:
            made |= one({**call, **made})
        return made

    return change


def lengths(*values: int):
    return set_to(cache_seqlens=lambda device: int32(device, *values))


def one_new_key(call: dict) -> dict:
    return {name: call[name][:, :1] for name in ("q", "k", "v")}


CASES = [
    *(
        case
        for which in ("cu_seqlens_q", "cu_seqlens_k")
        for case in (
            Bad(
                f"{which} decreases",
                "varlen",
                set_to(**{which: lambda d: int32(d, 0, 8, 4)}),
                f"{which}[2]: got 4 after 8",
            ),
            Bad(
                f"{which} negative",
                "varlen",
                set_to(**{which: lambda d: int32(d, -1, 4, 12)}),
                f"{which}[0]: got -1",
            ),
            Bad(
                f"{which} beyond the rows",
                "varlen",
                set_to(**{which: lambda d: int32(d, 0, 6, 13)}),
                f"{which}[-1]: got 13",
                "at most 12",
            ),
        )
    ),
    Bad("max_seqlen_q", "varlen", set_to(max_seqlen_q=7), "max_seqlen_q: got 7", "one of 8"),
    Bad("max_seqlen_k", "varlen", set_to(max_seqlen_k=7), "max_seqlen_k: got 7", "one of 8"),
    Bad("no such page", "varlen", pages((0, 9), (1, 3)), "block_table[1]: got page 3", "to 2"),
    Bad("page -2", "varlen", pages((0, 0), (-2, 1)), "block_table[1]: got page -2"),
    Bad("table too short", "varlen", pages((0,), (1,)), "got 8 keys for sequence 1", "at most 4"),
    # cache: 16 positions, 6 new keys
    Bad("overflow", "cache", lengths(3, 11), "cache_seqlens[1]: got 11", "holds 16"),
    Bad(
        "more keys than the table has pages for",
        "cache",
        both(one_new_key, pages((0, 2), (1, 2)), lengths(3, 8)),
        "cache_seqlens[1]: got 8 and 1 new keys",
        "block_table has room for 2 pages of 4 keys, 8 keys, per sequence",
    ),
    Bad(
        "more keys than the table has pages for, none of them new",
        "cache",
        both(pages((0, 2), (1, 2)), set_to(k=None, v=None), lengths(8, 9)),
        "cache_seqlens[1]: got 9",
        "block_table has room for 2 pages of 4 keys, 8 keys, per sequence",
    ),
    Bad("length -2", "cache", lengths(-2, 3), "cache_seqlens[0]: got -2", "-1 (skip)"),
    Bad(
        "batch idx beyond",
        "cache",
        set_to(cache_batch_idx=lambda d: int32(d, 0, 2)),
        "cache_batch_idx[1]: got 2",
        "0 to 1",
    ),
    Bad(
        "batch idx negative",
        "cache",
        set_to(cache_batch_idx=lambda d: int32(d, -1, 0)),
        "cache_batch_idx[0]: got -1",
    ),
    Bad(
        "leftpad negative",
        "cache",
        set_to(cache_leftpad=lambda d: int32(d, 0, -1)),
        "cache_leftpad: got [0, -1]",
    ),
    Bad(
        "leftpad beyond the keys",
        "cache",
        both(set_to(cache_leftpad=lambda d: int32(d, 9, 10)), lengths(3, 3)),
        "cache_leftpad[1]: got 10",
        "at most 9",
    ),
    Bad(
        "no such page of a cache",
        "cache",
        both(one_new_key, pages((0, 2), (1, 3)), lengths(5, 5)),
        "block_table[1]: got page 3",
    ),
    Bad(
        "positions beyond the table of rotary",
        "cache",
        both(
            lambda c: {name: c[name][:, :2] for name in ("k", "v")},
            lambda c: rotary(device_of(c)),
            set_to(causal=True),
            lengths(14, 0),
        ),
        "rotary_cos: got 16 positions",
        "at least 20",
    ),
    # Two appends to one place
    Bad(
        "values in the memory of the keys",
        "cache",
        lambda c: {"v_cache": c["k_cache"][:]},
        "v_cache: got the memory of k_cache",
    ),
    Bad(
        "one row of the cache twice",
        "cache",
        both(one_new_key, set_to(cache_batch_idx=lambda d: int32(d, 1, 1)), lengths(3, 7)),
        "cache_batch_idx: got 1 at 0 and at 1",
    ),
    Bad(
        "one page of two sequences",
        "cache",
        both(one_new_key, pages((0, 2), (1, 2)), lengths(5, 5)),
        "page 2",
        "sequences [0, 1]",
    ),
    Bad(
        "new keys in a page that another sequence has filled",
        "cache",
        both(one_new_key, pages((0, 2), (2, 1)), lengths(5, 5)),
        "page 2",
        "sequences [0, 1]",
    ),
    Bad(
        "one page twice in a sequence",
        "cache",
        both(one_new_key, pages((2, 2), (1, 0)), lengths(5, 5)),
        "page 2",
        "sequences [0]",
    ),
]
