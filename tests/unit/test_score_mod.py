"""Softcap and ALiBi of one score."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flash_attn.cpu.scores import _softcap_in_range

softcaps = st.sampled_from([0.5, 1.0, 15.0, 50.0])


@given(softcaps, st.sampled_from([0.125, 1.0, -0.5]), st.floats(-200, 200, width=32))
def test_softcap(core, softcap, scale, product):
    mod = core.ScoreMod(softcap=softcap, softmax_scale=scale)
    expected = softcap * math.tanh(scale * product / softcap)
    assert mod.has_usual_cap()
    assert mod.usual_cap(product) == pytest.approx(expected, abs=1e-6 * softcap)
    assert mod.cap(product) == pytest.approx(expected, rel=5e-7, abs=1e-30)
    assert mod.scaled(product) == mod.cap(product)


@given(
    st.sampled_from([1e-20, 1e-3, 50.0, 257.0, 1e5, 1e7, 1e12, 1e30]),
    st.sampled_from([0.125, 1.0, -0.5]),
    st.floats(2**-10, 2**15, width=32),
)
def test_a_softcap_of_any_size(core, softcap, scale, product):
    """To rounding: scores far below a large cap keep all digits, and so differ as they did."""
    mod = core.ScoreMod(softcap=core.softcap_in_range(softcap), softmax_scale=scale)
    expected = softcap * math.tanh(scale * product / softcap)
    for cap in (mod.cap, mod.cap_by_case):
        assert cap(product) == pytest.approx(expected, rel=5e-7)


@pytest.mark.parametrize("softcap", [512.0, 2.0**17, 2.0**90])
def test_a_large_softcap_on_both_sides_of_where_its_formula_changes(core, softcap):
    mod = core.ScoreMod(softcap=softcap, softmax_scale=0.125)
    for eighth in (2.0**-20, 2.0**-9, *(n / 512 for n in range(1, 1200))):
        x = 8 * eighth  # no rounding: softcap and scale are powers of two
        for cap in (mod.cap, mod.cap_by_case):
            for sign in (1, -1):
                expected = sign * softcap * math.tanh(x)
                assert cap(sign * x * softcap * 8) == pytest.approx(expected, rel=3e-7)


@pytest.mark.parametrize("softcap", [1e5, 1e7, 1e30])
def test_a_cap_that_does_nothing(core, softcap):
    mod = core.ScoreMod(softcap=softcap, softmax_scale=0.125)
    assert not mod.has_usual_cap()
    for product in (1.0, -3.0, 40.5):
        assert mod.cap(product) == pytest.approx(0.125 * product, rel=2e-7)


def test_softcaps_that_arithmetic_would_overflow_for(core):
    assert core.softcap_in_range(0.0) == 0.0
    assert core.softcap_in_range(50.0) == 50.0
    assert core.softcap_in_range(1e-300) == pytest.approx(1e-20)
    for softcap in (1e31, 1e300, math.inf):
        assert core.softcap_in_range(softcap) == pytest.approx(1e30)


@pytest.mark.parametrize("softcap", [0.0, 1e-300, 1e-20, 50.0, 1e30, 1e300, math.inf])
def test_the_cpu_backend_has_the_same_range(core, softcap):
    of_cpu = _softcap_in_range(softcap)
    assert core.softcap_in_range(softcap) == pytest.approx(of_cpu, rel=1e-7, abs=0)


@given(st.floats(-20, 20, width=32))
def test_tanh(core, x):
    assert core.tanh_absolute(x) == pytest.approx(math.tanh(x), abs=5e-7)
    assert core.tanh_relative(x) == pytest.approx(math.tanh(x), rel=5e-7, abs=1e-30)


def test_tanh_of_nan_and_infinity(core):
    assert core.tanh_relative(math.inf) == 1.0
    assert core.tanh_relative(-math.inf) == -1.0
    assert math.isnan(core.tanh_relative(math.nan))


@given(softcaps, st.sampled_from([0.125, 1.0, -0.5]), st.floats(-1, 1, width=32))
def test_a_cap_of_small_scores(core, softcap, scale, part):
    """As far as it holds, which is three quarters of the cap, the same to rounding."""
    mod = core.ScoreMod(softcap=softcap, softmax_scale=scale)
    small = core.SmallCap(mod)
    assert small.limit == pytest.approx(0.75 * softcap / abs(scale))
    product = part * small.limit
    expected = softcap * math.tanh(scale * product / softcap)
    assert small(product) == pytest.approx(expected, abs=5e-7 * softcap)


@pytest.mark.parametrize("scale", [1e6, 3e38])
def test_no_score_is_small_beside_a_steep_slope(core, scale):
    assert core.SmallCap(core.ScoreMod(softcap=0.001, softmax_scale=scale)).limit < 0


@pytest.mark.parametrize("scale", [0.125, 1e-30, 0.0, -2.0])
@pytest.mark.parametrize("slope", [0.0, 0.25])
def test_a_scale_that_keeps_the_order_is_left_to_the_exponent(core, scale, slope):
    mod = core.ScoreMod(softmax_scale=scale, alibi_slope=slope)
    assert mod.scaled(3.0) == pytest.approx(3.0 * scale)
    folds = scale > 0 if slope == 0 else scale > 1e-20
    assert mod.folds_scale() == folds
    assert mod.exponent_scale() == pytest.approx(scale if folds else 1.0)
    assert mod.folded_slope() == pytest.approx(slope / scale if folds else slope)
    assert math.isfinite(mod.folded_slope())


def test_a_softcap_is_about_scaled_scores(core):
    mod = core.ScoreMod(softmax_scale=0.125, softcap=5.0)
    assert not mod.folds_scale()
    assert mod.exponent_scale() == 1.0


@given(softcaps)
def test_softcap_ends(core, softcap):
    """An exponential that overflows, or vanishes, is the limit of tanh and not NaN."""
    mod = core.ScoreMod(softcap=softcap)
    for cap in (mod.cap, mod.cap_by_case, mod.usual_cap):
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
