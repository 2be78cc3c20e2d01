"""The online softmax of one thread's rows, against softmax over the whole row in float64."""

import ctypes
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

ROWS, COLS = 2, 4  # what the bindings instantiate
LOG2E = 1 / math.log(2)
NOTHING = -math.inf

numbers = st.floats(-30, 30, width=32)
blocks = st.lists(
    st.lists(
        st.lists(st.one_of(numbers, st.just(NOTHING)), min_size=COLS, max_size=COLS),
        min_size=ROWS,
        max_size=ROWS,
    ),
    max_size=5,
)
sinks = st.one_of(st.just(NOTHING), st.floats(-20, 20, width=32))


def attend(core, blocks, softmax_scale, sink, value=lambda key: key + 1.0, offsets=None):
    """(out, lse) per row, as a kernel computes them: rescale, accumulate, divide at the end.

    offsets: of each block and row, which its scores lack.
    """
    softmax = core.OnlineSoftmax(softmax_scale * LOG2E)
    out = [0.0] * ROWS
    for number, scores in enumerate(blocks):
        if offsets is None:
            p, rescale = softmax.step(scores)
        else:
            p, rescale = softmax.step_with_offsets(scores, offsets[number])
        for r in range(ROWS):
            added = sum(p[r][c] * value(number * COLS + c) for c in range(COLS))
            out[r] = out[r] * rescale[r] + added
    closed = [softmax.finish(r, sink) for r in range(ROWS)]
    return [(o * out_scale, lse) for o, (out_scale, lse) in zip(out, closed)]


def reference(blocks, softmax_scale, sink, value=lambda key: key + 1.0):
    results = []
    for r in range(ROWS):
        scores = [s * softmax_scale for block in blocks for s in block[r]]
        top = max([sink, *scores])
        if top == NOTHING:
            results.append((0.0, NOTHING))
            continue
        weights = [math.exp(s - top) for s in scores]
        denominator = sum(weights) + math.exp(sink - top)
        out = sum(w * value(key) for key, w in enumerate(weights)) / denominator
        results.append((out, top + math.log(denominator)))
    return results


def check(core, blocks, softmax_scale=1.0, sink=NOTHING):
    computed = attend(core, blocks, softmax_scale, sink)
    for (out, lse), (out_ref, lse_ref) in zip(computed, reference(blocks, softmax_scale, sink)):
        assert out == pytest.approx(out_ref, rel=1e-3, abs=1e-6)
        assert lse == pytest.approx(lse_ref, rel=1e-6, abs=1e-4)


@given(blocks, st.sampled_from([1.0, 0.125, 0.1]), sinks)
def test_equals_softmax(core, blocks, softmax_scale, sink):
    check(core, blocks, softmax_scale, sink)


# So far apart that an exponential which forgets them overflows.
whole_numbers = st.integers(-4000, 4000).map(float)


@given(blocks, st.lists(st.tuples(whole_numbers, whole_numbers), min_size=5, max_size=5), sinks)
def test_scores_that_lack_an_offset(core, blocks, offsets, sink):
    """As if the offsets had been added, though maxima are compared without."""
    whole = [
        [[x + offset for x in row] for row, offset in zip(block, of_rows)]
        for block, of_rows in zip(blocks, offsets)
    ]
    results = attend(core, blocks, 0.125, sink, offsets=offsets)
    for (out, lse), (expected, expected_lse) in zip(results, reference(whole, 0.125, sink)):
        assert out == pytest.approx(expected, rel=1e-3, abs=1e-4)
        assert lse == pytest.approx(expected_lse, rel=1e-6, abs=1e-4)


@given(blocks, st.sampled_from([-3000.0, -500.0, 500.0, 3000.0]), sinks)
def test_large_logits(core, blocks, shift, sink):
    """Softmax does not depend on a shift, and no power of two of one may appear on the way."""
    check(core, [[[s + shift for s in row] for row in block] for block in blocks], 1.0, sink)


@pytest.mark.parametrize("first", [-3000.0, 0.0, 3000.0])
@pytest.mark.parametrize("second", [-3000.0, 0.0, 3000.0])
def test_the_maximum_jumps(core, first, second):
    check(core, [[[first] * COLS, [second] * COLS], [[second] * COLS, [first] * COLS]])


@pytest.mark.parametrize("masked", range(3))
def test_a_masked_block_changes_nothing(core, masked):
    """Whether it comes first, in between or last; the window's edge makes such blocks."""
    scores = [[[-700.0, 1.0, 2.0, 3.0], [-900.0, -901.0, -902.0, -903.0]]] * 2
    scores.insert(masked, [[NOTHING] * COLS, [NOTHING] * COLS])
    check(core, scores)


def test_rows_are_independent(core):
    masked, plain = [NOTHING] * COLS, [1.0, 2.0, 3.0, 4.0]
    (out, lse), (out_plain, _) = attend(core, [[masked, plain]], 1.0, NOTHING)
    assert (out, lse) == (0.0, NOTHING)
    assert out_plain > 1.0


def test_no_keys(core):
    """Nothing to attend to: out 0 and LSE -inf, or the sink alone."""
    assert attend(core, [], 1.0, NOTHING) == [(0.0, NOTHING)] * ROWS
    for out, lse in attend(core, [], 1.0, sink=1.5):
        assert out == 0.0
        assert lse == pytest.approx(1.5)


@pytest.mark.parametrize("sink", [1e5, 1e8, 2e38, 3e38, math.inf])
@pytest.mark.parametrize("score", [NOTHING, 0.0, -100.0])
def test_a_sink_far_above_the_scores(core, sink, score):
    """It takes all weight, and LSE is the sink to the bit: its gradient is about the difference."""
    exact = ctypes.c_float(sink).value
    for out, lse in attend(core, [[[score] * COLS] * ROWS], 1.0, sink):
        assert out == 0.0
        assert lse == exact


def test_a_sink_far_below_the_scores(core):
    plain = attend(core, [[[1.0, 2.0, 3.0, 4.0]] * ROWS], 1.0, NOTHING)
    assert attend(core, [[[1.0, 2.0, 3.0, 4.0]] * ROWS], 1.0, -3e38) == plain


@pytest.mark.parametrize("sink", [NOTHING, 1.0])
def test_nan_reaches_both_results(core, sink):
    """A maximum does not see NaN: a row of nothing else must not pass for a row without keys."""
    for scores in ([math.nan] * COLS, [0.0, math.nan, 1.0, 2.0]):
        out, lse = attend(core, [[scores, [0.0] * COLS]], 1.0, sink)[0]
        assert math.isnan(out)
        assert math.isnan(lse)


def test_the_maximum_moves_only_when_it_has_to(core):
    """Exponents of up to 8 are as good as those of up to 0, and spare the output a rescaling."""
    softmax = core.OnlineSoftmax(1.0)
    factors, powers = [], []
    for score in (3.0, 10.5, 11.5, 11.0):
        p, factor = softmax.step([[score] * COLS, [3.0] * COLS])
        powers.append(p[0][0])
        factors.append(list(factor))
    assert factors == [[0, 0], [1, 1], [pytest.approx(2**-8.5), 1], [1, 1]]
    assert powers == pytest.approx([1, 2**7.5, 1, 2**-0.5])


@given(blocks, st.floats(0.01, 4))
def test_a_maximum_never_moves_unasked(core, blocks, softmax_scale):
    """may_move is asked before each block; the step then rescales only if it said yes."""
    softmax = core.OnlineSoftmax(softmax_scale * LOG2E)
    for scores in blocks:
        asked = softmax.may_move(scores)
        _, rescale = softmax.step(scores)
        assert asked or min(rescale) > 2**-8.001  # the limit itself is rounded


def test_small_scores_need_no_maximum(core):
    """What makes the question worth asking: it says no, also for negative scores and -inf."""
    softmax = core.OnlineSoftmax(LOG2E)
    softmax.step([[1.0] * COLS] * ROWS)
    assert not softmax.may_move([[-100.0, NOTHING, 0.0, 6.5]] * ROWS)
    assert softmax.may_move([[-100.0, NOTHING, 0.0, 6.6]] * ROWS)
    assert softmax.may_move([[math.nan, 0.0, 0.0, 0.0]] * ROWS)
    softmax = core.OnlineSoftmax(LOG2E)
    softmax.step([[-20.0] * COLS] * ROWS)
    # Between the limit and 0, where the order of bits is the wrong way round.
    assert softmax.may_move([[-14.0] * COLS] * ROWS)
