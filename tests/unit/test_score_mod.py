"""Softcap and ALiBi of one score."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

softcaps = st.sampled_from([0.5, 1.0, 15.0, 50.0])


@given(softcaps, st.sampled_from([0.125, 1.0, -0.5]), st.floats(-200, 200, width=32))
def test_softcap(core, softcap, scale, product):
    mod = core.ScoreMod(softcap=softcap, softmax_scale=scale)
    expected = softcap * math.tanh(scale * product / softcap)
    assert mod.cap(product) == pytest.approx(expected, abs=1e-6 * softcap)
    assert mod.scaled(product) == mod.cap(product)


@pytest.mark.parametrize("scale", [0.125, 0.0, -2.0])
def test_scale_alone_is_left_to_the_exponent_if_it_keeps_the_order(core, scale):
    mod = core.ScoreMod(softmax_scale=scale)
    assert mod.scaled(3.0) == 3.0 * scale
    assert mod.scales_only() == (scale > 0)
    assert mod.exponent_scale() == (scale if scale > 0 else 1.0)
    for hook in ({"softcap": 5.0}, {"alibi_slope": 0.25}):
        mod = core.ScoreMod(softmax_scale=scale, **hook)
        assert not mod.scales_only()
        assert mod.exponent_scale() == 1.0


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
