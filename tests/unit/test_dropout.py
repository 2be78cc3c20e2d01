"""The keep mask: position to bits, and what each thread of a kernel holds."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flash_attn.cpu import philox as cpu

from .brute_force import random_bits

int64 = st.integers(-(2**63), 2**63 - 1)
position = st.integers(0, 2**31 - 1)
BLOCK = list(itertools.product(range(16), range(16)))  # query, key
LANES = range(32)
FIRST = 8  # of a word's bits, those of the second block
PROBABILITIES = [0.0, 1e-6, 0.1, 0.17, 0.25, 0.5, 0.9, 0.99999, 1 - 1e-9]


def mask(core, seed=1234, offset=5, batch=0, heads_q=1, head=0, threshold=1 << 15):
    return core.DropoutMask(
        seed=seed, offset=offset, batch=batch, heads_q=heads_q, head=head, threshold=threshold
    )


@given(st.integers(0, 2**32 - 1), st.integers(0, 65535))
def test_each_half_of_a_word_keeps_or_drops_its_entry(core, word, threshold):
    lower, upper = mask(core, threshold=threshold).drop(word, 2.0, 3.0)
    assert lower == (2.0 if word % 65536 >= threshold else 0.0)
    assert upper == (3.0 if word // 65536 >= threshold else 0.0)


def accumulator(lane):
    """(row, column) of the eight values that a lane of mma.m16n8k16 holds in two n = 8 tiles."""
    return [
        (lane // 4 + 8 * high_row, 8 * n_tile + lane % 4 * 2 + odd)
        for n_tile in range(2)
        for high_row in range(2)
        for odd in range(2)
    ]


@given(int64, int64, st.integers(0, 2**20), st.integers(1, 2**12), st.data(), position, position)
def test_keep_is_a_function_of_the_position(core, seed, offset, batch, heads_q, data, query, key):
    head = data.draw(st.integers(0, heads_q - 1))
    bits = random_bits(seed, offset, batch * heads_q + head, query, key)
    for threshold in {0, bits, bits + 1, 65535}:
        kept = mask(core, seed, offset, batch, heads_q, head, threshold).keep(query, key)
        assert kept == (bits >= threshold)


blocks = st.integers(0, 2**20)


@given(int64, int64, st.integers(0, 2**20), blocks, blocks, st.data())
def test_a_part_keeps_what_the_whole_keeps(core, seed, offset, first_head, row, column, data):
    head, query, key = (data.draw(st.integers(0, n)) for n in (63, 300, 300))
    bits = random_bits(seed, offset, first_head + head, 16 * row + query, 16 * column + key)
    for threshold in {0, bits, bits + 1, 65535}:
        kept = core.part_keeps(
            (seed, offset), (first_head, 16 * row, 16 * column), 64, head, threshold, query, key
        )
        assert kept == (bits >= threshold)


@given(
    int64, int64, st.integers(0, 100), st.integers(1, 64), st.data(), st.sampled_from([0.1, 0.5])
)
def test_the_cpu_backend_drops_the_same(core, seed, offset, batch, heads_q, data, dropout_p):
    head = data.draw(st.integers(0, heads_q - 1))
    first_row, first_col = data.draw(st.tuples(st.integers(0, 2**20), st.integers(0, 2**20)))
    rows, cols = range(first_row, first_row + 19), range(first_col, first_col + 18)

    keeps = mask(core, seed, offset, batch, heads_q, head, core.dropout_threshold(dropout_p))
    head_id = torch.tensor(batch * heads_q + head)
    blocks = [torch.arange(x.start // 16, -(-x.stop // 16)) for x in (rows, cols)]
    kept = cpu.keep_blocks(seed, offset, head_id, *blocks, dropout_p)
    kept = kept[first_row % 16 :, first_col % 16 :][: len(rows), : len(cols)]
    assert kept.tolist() == [[keeps.keep(row, col) for col in cols] for row in rows]


@pytest.mark.parametrize("dropout_p", [*PROBABILITIES, 0.5 / 65536, 1.5 / 65536, 2.5 / 65536])
def test_threshold_rounds_as_python_does(core, dropout_p):
    assert core.dropout_threshold(dropout_p) == min(65535, round(dropout_p * 65536))


@pytest.mark.parametrize("dropout_p", PROBABILITIES)
def test_rate_is_what_the_threshold_drops(core, dropout_p):
    threshold = core.dropout_threshold(dropout_p)
    assert core.dropout_rate(threshold) * 65536 == threshold < 65536
    assert cpu.kept_share(dropout_p) == 1 - core.dropout_rate(threshold)


def test_nothing_is_dropped_at_zero(core):
    keeps = mask(core, threshold=core.dropout_threshold(0.0))
    assert all(keeps.keep(query, key) for query, key in BLOCK)


@pytest.mark.parametrize("dropout_p", [0.1, 0.5, 0.9])
def test_share_of_kept_entries(core, dropout_p):
    keeps = mask(core, threshold=core.dropout_threshold(dropout_p))
    size = 256
    kept = sum(
        keeps.keep_bits(row, col).bit_count()
        for row in range(size // 2)
        for col in range(size // 4)
    )
    tolerance = 5 * (size * size * dropout_p * (1 - dropout_p)) ** 0.5
    assert abs(kept - size * size * (1 - dropout_p)) < tolerance


def test_a_group_and_a_bit_name_one_entry(core):
    places = {
        (core.dropout_octet(query, key), core.dropout_bit(query, key))
        for query in range(48)
        for key in range(48)
    }
    assert len(places) == 48 * 48


def test_seed_offset_head_and_batch_matter(core):
    def bits(**changed):
        keeps = mask(core, **{"heads_q": 2, **changed})
        return [keeps.keep_bits(row, col) for row in range(4) for col in range(4)]

    variants = [
        bits(),
        bits(seed=1235),
        bits(seed=1234 + 2**32),
        bits(offset=6),
        bits(offset=5 + 2**33),
        bits(head=1),
        bits(batch=1),
    ]
    assert all(a != b for a, b in itertools.combinations(variants, 2))


@pytest.mark.parametrize(("block_row", "block_col"), [(0, 0), (3, 5), (2**20, 2**21)])
def test_forward_fragment(core, block_row, block_col):
    """One group covers the eight values a thread holds, in the order of its registers."""
    keeps = mask(core)
    for lane in LANES:
        held = [(16 * block_row + row, 16 * block_col + col) for row, col in accumulator(lane)]
        groups = {core.dropout_octet(query, key) for query, key in held}
        assert len(groups) == 1
        bits = keeps.keep_bits(*groups.pop())
        assert [bits >> i & 1 for i in range(8)] == [keeps.keep(*entry) for entry in held]


def test_bits_as_masks_of_halves(core):
    for bits, mask in [(0, 0), (1, 0xFFFF), (2, 0xFFFF0000), (3, 0xFFFFFFFF)]:
        for first in range(0, 32, 2):
            others = 0xFFFFFFFF & ~(3 << first)
            assert core.halves_of_bits(bits << first, first) == mask
            assert core.halves_of_bits(bits << first | others, first) == mask


def test_a_bit_of_two_words_as_masks_of_halves(core):
    for lower, upper in [(0, 0), (1, 0), (0, 1), (1, 1)]:
        for bit in range(32):
            expected = lower * 0xFFFF + upper * 0xFFFF0000
            others = 0xFFFFFFFF & ~(1 << bit)
            assert core.halves_of_bit(lower << bit, upper << bit, bit) == expected
            words = (lower << bit | others, upper << bit | others)
            assert core.halves_of_bit(*words, bit) == expected


@given(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1), st.integers(0, 7))
def test_permuted_bytes(core, a, b, byte):
    x = (b << 32 | a) >> 8 * byte & 0xFF
    assert core.permuted_bytes(a, b, byte << 4) & 0xFF00 == x << 8
    sign = 0xFF if x & 0x80 else 0
    assert core.permuted_bytes(a, b, (byte | 8) << 12) >> 24 == sign


def test_halves_below_every_threshold(core):
    """Beside each other, all numbers that can go wrong: by the threshold, and by the sign."""
    assert core.HalvesBelow.largest == 0x8000
    for threshold in range(0x8001):
        below = core.HalvesBelow(threshold)
        numbers = {0, threshold - 1, threshold, threshold + 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF}
        for x in numbers - {-1}:
            y = 0xFFFF - x
            expected = (x < threshold) * 0xFFFF + (y < threshold) * 0xFFFF0000
            assert below(y << 16 | x) == expected, (threshold, x)


@pytest.mark.parametrize("threshold", [0, 1, 6554, 0x7FFF, 0x8000])
def test_halves_below_a_threshold(core, threshold):
    below = core.HalvesBelow(threshold)
    for x in range(2**16):
        assert below(x) == (x < threshold) * 0xFFFF + (threshold > 0) * 0xFFFF0000


@pytest.mark.parametrize(("block_row", "block_col"), [(0, 0), (3, 5)])
def test_transposed_fragment(core, block_row, block_col):
    """Two lanes that draw one group each, and swap them, know all their sixteen entries."""
    keeps = mask(core)
    lanes = [core.TransposedDropout(lane) for lane in LANES]
    drawn = [
        keeps.keep_by_parity(
            *core.dropout_octet(16 * block_row + lane.query(), 16 * block_col + lane.key()),
            first=FIRST,
        )
        for lane in lanes
    ]
    for number, lane in enumerate(lanes):
        assert lanes[lane.partner()].partner() == number
        received = lanes[lane.partner()].for_partner(drawn[lane.partner()])
        bits = lane.keep_bits(drawn[number], received) >> FIRST
        held = [(16 * block_row + col, 16 * block_col + row) for row, col in accumulator(number)]
        assert [bits >> i & 1 for i in range(8)] == [keeps.keep(*entry) for entry in held]
