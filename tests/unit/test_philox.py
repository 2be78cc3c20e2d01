"""Philox against the vectors its authors publish, and against the formula."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flash_attn.cpu import philox as cpu

from .brute_force import philox4x32

word = st.integers(0, 2**32 - 1)
ONES = 0xFFFFFFFF

# Random123's kat_vectors: counter, key, bits.
KNOWN_ANSWERS = {
    7: [
        ("00000000 00000000 00000000 00000000", "00000000 00000000",
         "5f6fb709 0d893f64 4f121f81 4f730a48"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff",
         "5207ddc2 45165e59 4d8ee751 8c52f662"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0",
         "4dfccaba 190a87f0 c47362ba b6b5242a"),
    ],
    10: [
        ("00000000 00000000 00000000 00000000", "00000000 00000000",
         "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff",
         "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0",
         "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
}  # fmt: skip
CASES = [(rounds, *vector) for rounds, vectors in KNOWN_ANSWERS.items() for vector in vectors]


def words(text):
    return [int(word, 16) for word in text.split()]


def philox(core, rounds):
    return {7: core.philox_7, 10: core.philox_10}[rounds]


@pytest.mark.parametrize(("rounds", "counter", "key", "bits"), CASES)
def test_known_answers(core, rounds, counter, key, bits):
    assert philox(core, rounds)(words(key), words(counter)) == words(bits)
    assert philox4x32(rounds, words(key), words(counter)) == words(bits)


@given(st.tuples(word, word), st.tuples(word, word, word, word), st.sampled_from([7, 10]))
def test_equals_the_formula(core, key, counter, rounds):
    assert philox(core, rounds)(key, counter) == philox4x32(rounds, key, counter)


@given(st.tuples(word, word), st.tuples(word, word, word, word))
def test_wide_products_are_the_same(core, key, counter):
    assert core.philox_7_wide(key, counter) == core.philox_7(key, counter)


@given(st.tuples(word, word), st.lists(st.tuples(word, word, word, word), min_size=1, max_size=8))
def test_equals_the_cpu_backend(core, key, counters):
    columns = torch.tensor(counters, dtype=torch.int64).unbind(1)
    drawn = torch.stack(cpu.philox4x32(columns, key), dim=1)
    assert drawn.tolist() == [core.philox_7(key, counter) for counter in counters]
