"""Which row blocks a block of keys is seen by, and which run mask code: not one too many."""

from hypothesis import given, settings
from hypothesis import strategies as st

from .lengths import WINDOWS, any_lengths, of_all_lengths
from .test_mask import visible


def check(core, left, right, seqlen_q, seqlen_k, block_m, block_n):
    mask = core.SequenceMask(left=left, right=right, seqlen_q=seqlen_q, seqlen_k=seqlen_k)
    seen = [set(visible(left, right, seqlen_q, seqlen_k, row)) for row in range(seqlen_q)]
    for key_begin in range(0, max(seqlen_k, 1), block_n):
        keys = set(range(key_begin, key_begin + block_n))
        found = mask.row_range(
            seqlen_q=seqlen_q, key_begin=key_begin, block_n=block_n, block_m=block_m
        )
        needed = sorted({row // block_m for row in range(seqlen_q) if seen[row] & keys})
        # Rows past the end of a block need no mask, keys past the end do.
        whole = [
            m_block
            for m_block in needed
            if all(keys <= row for row in seen[m_block * block_m : (m_block + 1) * block_m])
        ]
        visited = [found.block_at(step) for step in range(found.count())]
        assert sorted(visited) == needed
        assert visited[found.masked_count() :] == whole
        assert [found.from_last(step) for step in range(found.count())] == needed[::-1]
        assert [m_block for m_block in needed if not found.masked(m_block)] == whole
        assert found.begin <= found.left <= found.right <= found.end


test_short_sequences, test_any_lengths = of_all_lengths(check)


@settings(deadline=None, max_examples=200)
@any_lengths
def test_both_sides_agree(core, left, right, seqlen_q, seqlen_k, block_m, block_n):
    """The turn of a key block is its place among those of the row block: a deterministic backward
    counts them from the row's side, and goes through them from the keys'."""
    mask = core.SequenceMask(left=left, right=right, seqlen_q=seqlen_q, seqlen_k=seqlen_k)
    for n_block in range(-(-seqlen_k // block_n)):
        rows = mask.row_range(
            seqlen_q=seqlen_q, key_begin=n_block * block_n, block_n=block_n, block_m=block_m
        )
        for m_block in range(-(-seqlen_q // block_m)):
            end = min((m_block + 1) * block_m, seqlen_q)
            keys = mask.block_range(row_begin=m_block * block_m, row_end=end, block_n=block_n)
            assert (rows.begin <= m_block < rows.end) == (keys.begin <= n_block < keys.end)


def seen(core, left, right, key_begin, block_n, block_m):
    mask = core.SequenceMask(left=left, right=right, seqlen_q=1024, seqlen_k=1024)
    found = mask.row_range(seqlen_q=1024, key_begin=key_begin, block_n=block_n, block_m=block_m)
    blocks = [found.block_at(step) for step in range(found.count())]
    return blocks[: found.masked_count()], blocks[found.masked_count() :]


def test_a_causal_block(core):
    """The diagonal first, then the rows below it, in the direction in which all key blocks walk."""
    masked, whole = seen(core, -1, 0, 512, 128, 64)
    assert masked == [8, 9]
    assert whole == [10, 11, 12, 13, 14, 15]


def test_a_window_has_masks_at_both_ends(core):
    masked, whole = seen(core, 256, 0, 512, 128, 64)
    assert masked == [8, 9, 12, 13]
    assert whole == [10, 11]


@settings(deadline=None, max_examples=500)
@given(
    WINDOWS,
    WINDOWS,
    st.integers(1, 100),
    st.integers(1, 100),
    st.integers(1, 40),
    st.integers(1, 40),
)
def test_turns_of_key_blocks(core, left, right, seqlen_q, seqlen_k, block_m, block_n):
    """Which KV block is the first to see a row block, which the last, and how many come before."""
    mask = core.SequenceMask(left=left, right=right, seqlen_q=seqlen_q, seqlen_k=seqlen_k)
    key_begins = range(0, seqlen_k, block_n)
    for row_begin in range(0, seqlen_q, block_m):
        row_last = min(row_begin + block_m, seqlen_q) - 1
        seen = {
            key
            for row in range(row_begin, row_last + 1)
            for key in visible(left, right, seqlen_q, seqlen_k, row)
        }
        takers = [begin for begin in key_begins if seen & set(range(begin, begin + block_n))]
        for number, key_begin in enumerate(takers):
            turn = mask.dq_order(
                row_begin=row_begin, row_last=row_last, key_begin=key_begin, block_n=block_n
            )
            assert turn == (number == 0, number, number == len(takers) - 1)
