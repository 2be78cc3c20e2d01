"""Numbers cover each tile exactly once, whatever the grid and the order."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

INT_MAX = 2**31 - 1
sizes = st.integers(1, 6)
groups = st.integers(1, 12)
# The number of sequences first, or long lists would hardly be drawn.
lengths = st.integers(0, 80).flatmap(
    lambda batch: st.lists(
        st.one_of(st.just(0), st.integers(0, 40)), min_size=batch, max_size=batch
    )
)


def all_blocks(numbers, num_blocks, *lengths):
    """Tiles of every thread block of a grid, one list per block."""
    return [
        numbers.tiles(*lengths, block=block, num_blocks=num_blocks) for block in range(num_blocks)
    ]


def starts(seqlens_q):
    return [0, *itertools.accumulate(seqlens_q)]


def varlen_tiles(seqlens_q, block_m, heads):
    return [
        (m_block, head, sequence)
        for sequence, seqlen_q in enumerate(seqlens_q)
        for m_block in range(-(-seqlen_q // block_m))
        for head in range(heads)
    ]


@settings(deadline=None)
@given(sizes, sizes, sizes, groups, st.booleans(), st.integers(1, 300))
def test_dense_covers_each_tile_once(
    core, m_blocks, heads, batch, group, longest_first, num_blocks
):
    numbers = core.DenseTiles(
        m_blocks=m_blocks, heads=heads, batch=batch, group=group, longest_first=longest_first
    )
    done = [tile for tiles in all_blocks(numbers, num_blocks) for tile in tiles]
    assert sorted(done) == list(itertools.product(range(m_blocks), range(heads), range(batch)))


@pytest.mark.parametrize(("m_blocks", "heads", "batch"), [(0, 2, 2), (2, 0, 2), (2, 2, 0)])
def test_dense_without_tiles(core, m_blocks, heads, batch):
    numbers = core.DenseTiles(m_blocks=m_blocks, heads=heads, batch=batch)
    assert numbers.num_tiles() == 0
    assert numbers.tiles(block=0, num_blocks=1) == []


def test_dense_starts_the_longest_rows_of_all_heads_first(core):
    numbers = core.DenseTiles(m_blocks=3, heads=2, batch=2, group=4, longest_first=True)
    tiles = numbers.tiles(block=0, num_blocks=1)
    assert [m_block for m_block, _, _ in tiles] == [2] * 4 + [1] * 4 + [0] * 4


def test_dense_beyond_the_limits_of_a_grid(core):
    """More heads than grid y has, and more tiles than a grid has blocks."""
    numbers = core.DenseTiles(m_blocks=7, heads=70_000, batch=80_000)
    assert numbers.num_tiles() == 7 * 70_000 * 80_000
    num_blocks = min(numbers.num_tiles(), INT_MAX)
    assert num_blocks == INT_MAX

    last_round = numbers.num_tiles() // num_blocks
    block = numbers.num_tiles() - 1 - last_round * num_blocks
    tiles = numbers.tiles(block=block, num_blocks=num_blocks)
    assert len(tiles) == last_round + 1
    assert tiles[-1] == (6, 69_999, 79_999)


def varlen_numbers(core, seqlens_q, block_m, heads, group, longest_first):
    return core.VarlenTiles(
        total_q=sum(seqlens_q), block_m=block_m, heads=heads, batch=len(seqlens_q), group=group,
        longest_first=longest_first,
    )  # fmt: skip


@settings(deadline=None)
@given(lengths, st.integers(1, 17), sizes, groups, st.booleans())
def test_varlen_covers_each_tile_once(core, seqlens_q, block_m, heads, group, longest_first):
    """One tile per block: the grid that is launched where the lengths are not known."""
    numbers = varlen_numbers(core, seqlens_q, block_m, heads, group, longest_first)
    per_block = all_blocks(numbers, numbers.num_tiles(), starts(seqlens_q))
    expected = varlen_tiles(seqlens_q, block_m, heads)

    assert all(len(tiles) <= 1 for tiles in per_block)
    assert sorted(tile for tiles in per_block for tile in tiles) == sorted(expected)
    # Not more surplus than the bound on the number of tiles has anyway.
    surplus = numbers.num_tiles() - len(expected)
    assert surplus <= (len(seqlens_q) + sum(n > 0 for n in seqlens_q)) * heads


@settings(deadline=None)
@given(lengths, st.integers(1, 17), sizes, groups, st.booleans(), st.integers(1, 40))
def test_varlen_persistent_grid(core, seqlens_q, block_m, heads, group, longest_first, num_blocks):
    """Blocks that take many tiles go through the sequences in order."""
    numbers = varlen_numbers(core, seqlens_q, block_m, heads, group, longest_first)
    per_block = all_blocks(numbers, num_blocks, starts(seqlens_q))
    assert sorted(itertools.chain(*per_block)) == sorted(varlen_tiles(seqlens_q, block_m, heads))
    for tiles in per_block:
        sequences = [sequence for _, _, sequence in tiles]
        assert sequences == sorted(sequences)


@pytest.mark.parametrize("batch", [31, 32, 33, 64, 65, 1000])
def test_varlen_with_one_sequence_in_use(core, batch):
    """Empty sequences before it, behind it, and both."""
    for used in (0, 30, 31, 32, 63, 64, batch - 1):
        if used >= batch:
            continue
        seqlens_q = [0] * batch
        seqlens_q[used] = 5
        numbers = core.VarlenTiles(total_q=5, block_m=2, heads=1, batch=batch)
        tiles = numbers.tiles(starts(seqlens_q), block=0, num_blocks=1)
        assert tiles == [(m, 0, used) for m in range(3)]


@pytest.mark.parametrize("num_blocks", [1, 7, 10_000])
def test_varlen_of_many_sequences(core, num_blocks):
    seqlens_q = [(37 * sequence) % 11 for sequence in range(200)]
    numbers = core.VarlenTiles(total_q=sum(seqlens_q), block_m=4, heads=2, batch=200)
    done = [tile for tiles in all_blocks(numbers, num_blocks, starts(seqlens_q)) for tile in tiles]
    assert sorted(done) == sorted(varlen_tiles(seqlens_q, 4, 2))


def test_varlen_of_the_largest_lengths(core):
    seqlens_q = [2**30, 0, 2**30 - 1]
    numbers = core.VarlenTiles(
        total_q=sum(seqlens_q), block_m=64, heads=64, batch=3, longest_first=True
    )
    first_of_last = (2**30 // 64 + 2) * 64  # row blocks of sequences 0 and 1, with a surplus each
    tiles = numbers.tiles(starts(seqlens_q), block=first_of_last, num_blocks=2**31)
    assert tiles == [(2**24 - 1, 0, 2)]


@settings(deadline=None)
@given(lengths, st.integers(0, 40), st.integers(1, 17), sizes, groups, st.booleans(), st.booleans())
def test_grid_of_a_varlen_call(
    core, seqlens_q, behind, block_m, heads, group, longest_first, of_keys
):
    """Rows behind the last sequence are one more sequence, so that they are written too."""
    cu_q = [0, *itertools.accumulate(seqlens_q)]
    tiles = core.tile_grid(
        batch=len(seqlens_q), total_q=cu_q[-1] + behind, cu_q=cu_q, heads=heads, block_m=block_m,
        group=group, longest_first=longest_first, of_keys=of_keys,
    )  # fmt: skip
    expected = varlen_tiles([*seqlens_q, behind], block_m, heads)
    assert sorted(tile for tile in tiles if tile is not None) == sorted(expected)


@settings(deadline=None)
@given(lengths, st.integers(0, 40), st.integers(1, 17), st.integers(0, 41), st.booleans())
def test_grid_without_short_sequences(core, seqlens_q, behind, block_m, few_q, by_first_blocks):
    """Those of few queries are another kernel's; the rows behind the last sequence are not."""
    cu_q = [0, *itertools.accumulate(seqlens_q)]
    tiles = core.tile_grid(
        batch=len(seqlens_q), total_q=cu_q[-1] + behind, cu_q=cu_q, heads=2, block_m=block_m,
        group=1, longest_first=False, by_first_blocks=by_first_blocks, few_q=few_q,
    )  # fmt: skip
    kept = [n if n > few_q else 0 for n in seqlens_q]
    expected = varlen_tiles([*kept, behind], block_m, 2)
    assert sorted(tile for tile in tiles if tile is not None) == sorted(expected)


@settings(deadline=None)
@given(sizes, st.integers(0, 40), st.integers(1, 17), sizes, groups, st.booleans(), st.booleans())
def test_grid_of_a_dense_call(core, batch, seqlen_q, block_m, heads, group, longest_first, of_keys):
    tiles = core.tile_grid(
        batch=batch, seqlen_q=seqlen_q, heads=heads, block_m=block_m, group=group,
        longest_first=longest_first, of_keys=of_keys,
    )  # fmt: skip
    assert sorted(tiles) == sorted(varlen_tiles([seqlen_q] * batch, block_m, heads))


@given(st.integers(1, 300), st.integers(0, 3000))
def test_even_groups_leave_no_small_rest(core, group, columns):
    """No more groups than the widest allow, and the last one lacks fewer columns than there are."""
    even = core.even_group(group, columns)
    assert 1 <= even <= group
    groups = -(-columns // group)
    assert -(-columns // even) == groups
    if groups > 1:
        assert even * groups - columns < groups
