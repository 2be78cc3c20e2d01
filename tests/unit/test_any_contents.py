"""Index tensors may hold anything: whatever they do, no tile, row or key lies outside."""

import itertools
import random
from collections import defaultdict

import pytest

from tests.any_contents import any_int, any_offsets

VECTORS = 4000  # a mode


def random_grid(rng):
    total = rng.choice([0, 1, rng.randint(2, 70)])
    order = {"group": rng.randint(1, 6), "longest_first": rng.random() < 0.5}
    return total, {"heads": rng.randint(1, 3), "block_m": rng.choice([1, 4, 16])} | order


def well_formed(cu, total):
    return cu == sorted(cu) and cu[0] >= 0 and cu[-1] <= total


MODES = [{}, {"of_keys": True}, {"by_first_blocks": True}]


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_tiles_are_inside(core, mode):
    """Each is found once. A sequence's row blocks are the first ones, in order, so that no CTA
    waits for one that is missing; and all rows have one where nothing is wrong."""
    rng = random.Random(0)
    right = 0
    for _ in range(VECTORS):
        total, grid = random_grid(rng)
        cu, block_m = any_offsets(rng, total, rng.randint(0, 9)), grid["block_m"]
        what = (cu, total, grid)
        lengths = {"batch": len(cu) - 1, "total_q": total, "cu_q": cu}
        found = core.tile_grid(**lengths, **grid, **mode)
        blocks, rows = defaultdict(list), [0] * total
        for m_block, head, sequence in filter(None, found):
            info = core.block_info(sequence=sequence, **lengths)
            assert 0 <= head < grid["heads"], what
            assert 0 <= sequence < len(cu) + 1, what
            assert 0 <= m_block * block_m < info.seqlen_q, what
            assert 0 <= info.row_q <= info.row_q + info.seqlen_q <= total, what
            blocks[sequence, head].append(m_block)
            begin = info.row_q + m_block * block_m
            for row in range(begin, min(begin + block_m, info.row_q + info.seqlen_q)):
                rows[row] += 1
        for found_blocks in blocks.values():
            if mode.get("of_keys") and not grid["longest_first"]:
                assert found_blocks == list(range(len(found_blocks))), what
            else:
                assert sorted(found_blocks) == list(range(len(found_blocks))), what
        if well_formed(cu, total):
            right += 1
            assert rows == [grid["heads"]] * total, what
    assert right > VECTORS / 3


def test_row_blocks_have_a_place(core):
    """Of whatever sequence, in the backward's workspace."""
    rng = random.Random(1)
    for _ in range(VECTORS):
        total, grid = random_grid(rng)
        cu, block_m = any_offsets(rng, total, rng.randint(0, 9)), grid["block_m"]
        lengths = {"batch": len(cu) - 1, "total_q": total, "cu_q": cu}
        for sequence in range(len(cu) - 1):
            info = core.block_info(sequence=sequence, **lengths)
            first, count = core.row_block(sequence=sequence, block_m=block_m, **lengths)
            assert 0 <= first <= first + -(-info.seqlen_q // block_m) <= count, (cu, total, grid)


@pytest.mark.parametrize(
    "names", [(), ("used_k",), ("leftpad_k",), ("batch_k",), ("used_k", "leftpad_k", "batch_k")]
)
@pytest.mark.parametrize("keys", ["packed", "in_pages", "dense"])
def test_keys_are_inside(core, names, keys):
    rng = random.Random(2)
    for _ in range(VECTORS // 4):
        total, room = rng.randint(0, 60), rng.randint(0, 40)
        cu = any_offsets(rng, total, rng.randint(0, 9))
        batch, entries = len(cu) - 1, rng.randint(0, 5)
        call = {name: [any_int(rng, total) for _ in range(batch)] for name in names}
        call |= {"batch": batch, "new_k": rng.choice([0, 0, 3]), "batches_k": entries}
        call["seqlen_k"] = room
        if keys != "dense":
            call |= {"cu_k": cu, "total_k": total, "in_pages": keys == "in_pages"}
        for sequence in range(batch):
            info = core.block_info(sequence=sequence, **call)
            assert info.seqlen_k >= 0, call
            assert 0 <= info.leftpad <= info.slots_k, call
            assert info.leftpad + info.seqlen_k <= info.slots_k, call
            first = info.row_k - info.leftpad
            assert 0 <= first <= first + info.slots_k <= (total if keys == "packed" else room), call
            if "batch_k" in names:
                assert info.batch_k in range(-1, entries), call
                assert info.batch_k >= 0 or info.seqlen_k == 0, call


def test_pieces_of_any_lengths(core):
    """Each unit is in one piece, and none lies behind the workspace."""
    rng = random.Random(3)
    for _ in range(VECTORS // 4):
        lengths = [rng.choice([0, 1, rng.randint(0, 50), 2**30]) for _ in range(rng.randint(1, 40))]
        schedule = core.PieceSchedule(
            batch=len(lengths), tiles=1, min_units=rng.randint(1, 2),
            max_pieces=rng.choice([2, 9, 2**30]), slices=rng.choice([1, 8, 60]),
        )  # fmt: skip
        found = [schedule.piece(lengths, n) for n in range(schedule.num_pieces())]
        units = defaultdict(list)
        for index, piece in enumerate(found):
            if piece is not None:
                sequence, _, split, splits, first, step, begin, end = piece
                assert 0 <= split < splits, lengths
                assert index == first + split * step, lengths
                units[sequence].append((begin, end))
        assert sorted(units) == list(range(len(lengths))), lengths
        for sequence, ranges in units.items():
            edges = [0, *(end for _, end in sorted(ranges))]
            assert [begin for begin, _ in sorted(ranges)] == edges[:-1], lengths
            assert edges[-1] == lengths[sequence], lengths


def test_sequences_from_the_middle_of_a_packed_batch(core):
    """The rows before and behind them are two sequences more, without keys."""
    cu = [20, 25, 25, 60]
    lengths = {"batch": 3, "total_q": 100, "cu_q": cu, "total_k": 100, "cu_k": cu}
    runs = [(info.row_q, info.seqlen_q, info.seqlen_k, info.row_k, info.slots_k)
            for info in (core.block_info(sequence=b, **lengths) for b in range(5))]  # fmt: skip
    assert runs == [
        *((begin, end - begin, end - begin, begin, end - begin)
          for begin, end in itertools.pairwise(cu)),
        (60, 40, 0, 60, 40),
        (0, 20, 0, 0, 20),
    ]  # fmt: skip
