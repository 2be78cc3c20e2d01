"""Which KV blocks a row block sees, and which of them run mask code: not one too many."""

from .lengths import of_all_lengths
from .test_mask import visible


def check_rows(core, left, right, seqlen_q, seqlen_k, rows, block_n):
    mask = core.SequenceMask(left=left, right=right, seqlen_q=seqlen_q, seqlen_k=seqlen_k)
    found = mask.block_range(row_begin=rows[0], row_end=rows[-1] + 1, block_n=block_n)
    seen = [set(visible(left, right, seqlen_q, seqlen_k, row)) for row in rows]
    needed = sorted({key // block_n for keys in seen for key in keys})

    # Whole in every row, or else it needs the mask; keys past the end are in no row.
    whole = [
        n_block
        for n_block in needed
        if all(set(range(n_block * block_n, (n_block + 1) * block_n)) <= keys for keys in seen)
    ]
    assert found.count() == len(needed)
    visited = [found.block_at(step) for step in range(found.count())]
    assert sorted(visited) == needed
    assert sorted(visited[found.masked_count() :]) == whole
    for step, block in enumerate(visited):
        assert found.masked(block) == (step < found.masked_count())
        assert found.after(block) == (visited[step + 1] if step + 1 < len(visited) else -1)
    if needed:
        assert found.begin <= found.left <= found.right <= found.end
        assert (found.begin, found.end) == (needed[0], needed[-1] + 1)
        check_steps_right_of(mask, found, visited, seen, rows, block_n)
    for splits in (1, 2, 3, 32):
        check_splits(found, visited, splits)


def check_splits(found, visited, splits):
    """Together they are all blocks, and those with mask code first."""
    together = []
    for number in range(splits):
        split = found.split(number, splits)
        assert split.count() in (len(visited) // splits, -(-len(visited) // splits))
        blocks = [split.block_at(step) for step in range(split.count())]
        assert [found.masked(n) for n in blocks] == [
            step < split.masked_count() for step in range(split.count())
        ]
        together += blocks
    assert sorted(together) == sorted(visited)


def check_steps_right_of(mask, found, visited, seen, rows, block_n):
    """A part of the rows from the first one on leaves out the blocks right of all of its keys."""
    for part in range(1, len(rows) + 1):
        last_key = max((key for keys in seen[:part] for key in keys), default=-1)
        left_out = found.steps_right_of(mask=mask, row_end=rows[0] + part, block_n=block_n)
        right = [block for block in visited if block * block_n > last_key]
        assert visited[:left_out] == sorted(right, reverse=True)


def check(core, left, right, seqlen_q, seqlen_k, block_m, block_n):
    for first in range(0, seqlen_q, block_m):
        rows = range(first, min(first + block_m, seqlen_q))
        check_rows(core, left, right, seqlen_q, seqlen_k, rows, block_n)


test_short_sequences, test_any_lengths = of_all_lengths(check)


def seen(core, left, right, rows, block_n):
    mask = core.SequenceMask(left=left, right=right, seqlen_q=4096, seqlen_k=4096)
    found = mask.block_range(row_begin=rows[0], row_end=rows[-1] + 1, block_n=block_n)
    blocks = [found.block_at(step) for step in range(found.count())]
    return blocks[: found.masked_count()], blocks[found.masked_count() :]


def test_a_causal_block(core):
    """The common case, in numbers: masks at the diagonal, then an interior without any."""
    masked, whole = seen(core, -1, 0, range(1024, 1152), 64)
    assert masked == [17, 16]
    assert whole == list(range(15, -1, -1))


def test_a_window_has_masks_at_both_ends(core):
    masked, whole = seen(core, 512, 0, range(1024, 1152), 64)
    assert masked == [17, 16, 9, 8]
    assert whole == [15, 14, 13, 12, 11, 10]


def test_full_attention_runs_no_mask(core):
    masked, whole = seen(core, -1, -1, range(128), 64)
    assert masked == []
    assert whole == list(range(63, -1, -1))
