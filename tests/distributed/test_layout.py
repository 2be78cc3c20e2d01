"""Layouts and plans by brute force: every token once, every visible pair once, nothing masked."""

from __future__ import annotations

import itertools

import pytest
import torch

from flash_attn.distributed import dense_layout, packed_layout, position_ids, shard_sequence
from flash_attn.distributed.calls import ring_plan, whole_plan
from flash_attn.distributed.layout import Segment, place
from flash_attn.distributed.shard import token_ids
from flash_attn.distributed.tiles import Mask, Tile, tiles

KINDS = ("zigzag", "contiguous", "balanced")
BATCHES = [(64,), (67,), (3,), (0,), (5, 40, 0, 1, 23, 3), (1,) * 9, (0, 0)]
CPU = torch.device("cpu")


def layouts(lengths, ranks: int, split: int = 1, multiple: int = 1):
    cu_seqlens = list(itertools.accumulate(lengths, initial=0))
    for kind in KINDS:
        yield packed_layout(cu_seqlens, ranks, kind, split=split, multiple=multiple)
        if len(lengths) == 1:
            yield dense_layout(lengths[0], ranks, kind, split=split, multiple=multiple)


@pytest.mark.parametrize("multiple", [1, 8])
@pytest.mark.parametrize("split", [1, 2, 4])
@pytest.mark.parametrize("lengths", BATCHES, ids=str)
def test_each_token_has_one_place(lengths, split, multiple):
    for layout in layouts(lengths, 4, split, multiple):
        assert layout.cut_at_multiples_of(multiple)
        held = [token_ids(layout, rank) for rank in range(4)]
        assert [len(ids) for ids in held] == [layout.tokens(rank) for rank in range(4)]
        assert torch.equal(torch.cat(held).sort().values, torch.arange(sum(lengths)))
        positions = torch.cat([torch.arange(n) for n in lengths])
        x = torch.randn(sum(lengths), 3)
        for rank, ids in enumerate(held):
            assert torch.equal(position_ids(layout, rank), positions[ids])
            whole = x if layout.packed else x[None]
            mine = shard_sequence(whole, layout, rank)
            assert torch.equal(mine if layout.packed else mine[0], x[ids])


def test_sharding_is_differentiable():
    layout = dense_layout(10, 2)
    x = torch.randn(1, 10, 2, requires_grad=True)
    shard_sequence(x, layout, 1).sum().backward()
    assert x.grad[0, :, 0].nonzero().flatten().tolist() == token_ids(layout, 1).tolist()


def test_zigzag_is_even_and_balanced_has_equal_work():
    zigzag = dense_layout(4096, 8)
    assert {zigzag.tokens(rank) for rank in range(8)} == {512}
    lengths = (300, 2000, 17, 900)
    layout = packed_layout(list(itertools.accumulate(lengths, initial=0)), 4)
    work = [int((position_ids(layout, r) + 1).sum()) for r in range(4)]
    assert max(work) - min(work) <= 2 * max(lengths)
    tokens = [layout.tokens(r) for r in range(4)]
    assert max(tokens) > 1.5 * min(tokens)
    # What a token costs beside its attention evens the tokens out.
    heavy = packed_layout(list(layout.cu_seqlens), 4, token_work=10**6)
    tokens = [heavy.tokens(r) for r in range(4)]
    assert max(tokens) - min(tokens) <= 3


def seen(tile: Tile) -> torch.Tensor:
    """(rows, keys) bool of the kernels' rule, a loop over the tile's entries."""
    shift = len(tile.keys) - len(tile.rows)
    i, j = torch.arange(len(tile.rows))[:, None], torch.arange(len(tile.keys))
    mask = torch.ones(len(tile.rows), len(tile.keys), dtype=torch.bool)
    if tile.left >= 0:
        mask &= j >= i + shift - tile.left
    if tile.right >= 0:
        mask &= j <= i + shift + tile.right
    return mask


MASKS = [
    Mask(*limits)
    for limits in itertools.product((-1, 0, 3, 14), (-1, 0, 2, 12), (False, True), (1, 4))
]


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_tiles_cover_what_is_visible_once(mask):
    """And ALiBi's distances, from the kernels' with the sign and the constant of the tile."""
    for lengths in ((29,), (3,), (10, 1, 15)):
        for layout in layouts(lengths, 3, multiple=mask.block):
            wholes = place(Segment(i, 0, n) for i, n in enumerate(lengths))
            where = {(s, r): i for s, r, i in _positions(lengths)}
            for shard, keys in itertools.product(range(3), [*map(layout.placed, range(3)), wholes]):
                _check_cover(layout.placed(shard), keys, mask, where)


def _positions(lengths):
    starts = itertools.accumulate(lengths, initial=0)
    for sequence, (start, length) in enumerate(zip(starts, lengths)):
        for position in range(length):
            yield sequence, position, start + position


def _rows(placed) -> list[tuple[int, int]]:
    """(sequence, position) of each row."""
    return [(p.segment.sequence, n) for p in placed for n in range(p.segment.start, p.segment.stop)]


def _check_cover(queries, keys, mask, where) -> None:
    q, k = _rows(queries), _rows(keys)
    count = torch.zeros(len(q), len(k), dtype=torch.int)
    for tile in tiles(queries, keys, mask):
        shown = seen(tile)
        assert shown.any(), "a tile of nothing"
        rows = slice(tile.rows.start, tile.rows.stop)
        count[rows, tile.keys.start : tile.keys.stop] += shown.int()
        first = q[tile.rows[0]], k[tile.keys[0]]
        assert first == ((tile.sequence, tile.first_query), (tile.sequence, tile.first_key))
        if mask.block > 1:
            assert tile.first_query % mask.block == tile.first_key % mask.block == 0
            for held, at in ((q, tile.rows), (k, tile.keys)):
                assert held[at[-1]][1] - held[at[0]][1] == len(at) - 1
        if mask.alibi:
            shift = len(tile.keys) - len(tile.rows)
            for i, j in shown.nonzero().tolist():
                true = -abs(q[tile.rows[i]][1] - k[tile.keys[j]][1])
                assert true == tile.bias - tile.sign * abs(i + shift - j)
    for (a, (seq_q, i)), (b, (seq_k, j)) in itertools.product(enumerate(q), enumerate(k)):
        visible = seq_q == seq_k
        visible &= mask.left < 0 or j >= i - mask.left
        visible &= mask.right < 0 or j <= i + mask.right
        assert count[a, b] == int(visible), (q[a], k[b])


def test_causal_zigzag_is_one_unmasked_call_a_step():
    """No masked waste, and the same work for every rank in every step."""
    layout, chunk = dense_layout(8 * 32, 4), 32
    for rank in range(4):
        (own,) = ring_plan(layout, rank, rank, Mask(-1, 0), CPU).calls
        assert own.tiles[0].causal
        assert len(own.rows) == len(own.keys) == 2 * chunk
        for source in set(range(4)) - {rank}:
            plan = ring_plan(layout, rank, source, Mask(-1, 0), CPU)
            (call,) = plan.calls
            assert call.tiles[0].unmasked
            assert len(call.rows) * len(call.keys) == 2 * chunk * chunk
            assert len(plan.keys) == (chunk if source < rank else 2 * chunk)


def test_windows_reach_the_ranks_before_them_only():
    layout = dense_layout(400, 8, "contiguous")
    for rank, source in itertools.product(range(8), repeat=2):
        keys = ring_plan(layout, rank, source, Mask(60, 0), CPU).keys
        # 50 tokens each: all of the rank before, 10 of the one before that
        wanted = {0: 50, 1: 50, 2: 10}.get(rank - source, 0)
        assert len(keys) == wanted


@pytest.mark.parametrize("kind", ["balanced", "contiguous"])
def test_packed_sequences_are_one_call(kind):
    layout = packed_layout(list(itertools.accumulate([5, 40, 0, 1, 23, 3], initial=0)), 4, kind)
    for rank in range(4):
        assert len(whole_plan(layout, rank, Mask(7, 0, alibi=True), CPU).calls) == 1


def test_zigzag_of_packed_sequences_is_two_calls_at_most():
    layout = packed_layout(list(itertools.accumulate([64, 400, 9, 230], initial=0)), 4, "zigzag")
    for rank, source in itertools.product(range(4), repeat=2):
        assert len(ring_plan(layout, rank, source, Mask(-1, 0), CPU).calls) <= 2


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: dense_layout(10, 0), "ranks: got 0"),
        (lambda: dense_layout(-1, 2), "seqlen: got -1"),
        (lambda: dense_layout(10, 4, split=3), "split: got 3"),
        (lambda: dense_layout(10, 4, "striped"), "kind: got 'striped'"),
        (lambda: packed_layout([], 2), "cu_seqlens"),
        (lambda: packed_layout([0, 5, 3], 2), "cu_seqlens"),
        (lambda: packed_layout(torch.tensor([1, 5]), 2), "cu_seqlens"),
        (lambda: dense_layout(10, 2).segments(2), "rank: got 2"),
        (lambda: shard_sequence(torch.zeros(1, 9), dense_layout(10, 2), 0), "got 9 tokens"),
    ],
)
def test_what_is_wrong_is_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()
