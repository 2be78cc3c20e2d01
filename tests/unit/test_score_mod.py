"""Softcap and ALiBi of one score."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

softcaps = st.sampled_from([0.5, 1.0, 15.0, 50.0])


@given(softcaps, st.floats(-200, 200, width=32))
def test_softcap(core, softcap, score):
    capped = core.ScoreMod(softcap=softcap).cap(score)
    assert capped == pytest.approx(softcap * math.tanh(score / softcap), abs=1e-6 * softcap)


@given(softcaps)
def test_softcap_ends(core, softcap):
    """An exponential that overflows, or vanishes, is the limit of tanh and not NaN."""
    cap = core.ScoreMod(softcap=softcap).cap
    assert cap(0.0) == 0.0
    for score in (1e4, 1e30, math.inf):
        assert cap(score) == softcap
        assert cap(-score) == -softcap


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(5, 5), (3, 8), (8, 3)])
@pytest.mark.parametrize("slope", [0.5, 1 / 256])
def test_alibi(core, seqlen_q, seqlen_k, slope):
    shift = seqlen_k - seqlen_q
    mod = core.ScoreMod(alibi_slope=slope, shift=shift)
    for row in range(seqlen_q):
        for key in range(seqlen_k):
            assert mod.bias(row, key) == -slope * abs(row + shift - key)
