"""The online softmax of one thread's rows, against softmax over the whole row in float64."""

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


@pytest.fixture(scope="module", params=["OnlineSoftmax", "LazySoftmax"])
def softmax_type(core, request):
    """The one whose maximum is the true one, and the one that lets it stay behind by 2^8."""
    return getattr(core, request.param)


def attend(softmax_type, blocks, softmax_scale, sink, value=lambda key: key + 1.0):
    """(out, lse) per row, as a kernel computes them: rescale, accumulate, divide at the end."""
    softmax = softmax_type(softmax_scale * LOG2E)
    out = [0.0] * ROWS
    for number, scores in enumerate(blocks):
        p, rescale = softmax.step(scores)
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


def check(softmax_type, blocks, softmax_scale=1.0, sink=NOTHING):
    computed = attend(softmax_type, blocks, softmax_scale, sink)
    for (out, lse), (out_ref, lse_ref) in zip(computed, reference(blocks, softmax_scale, sink)):
        assert out == pytest.approx(out_ref, rel=1e-3, abs=1e-6)
        assert lse == pytest.approx(lse_ref, rel=1e-6, abs=1e-4)


@given(blocks, st.sampled_from([1.0, 0.125, 0.1]), sinks)
def test_equals_softmax(softmax_type, blocks, softmax_scale, sink):
    check(softmax_type, blocks, softmax_scale, sink)


@given(blocks, st.sampled_from([-3000.0, -500.0, 500.0, 3000.0]), sinks)
def test_large_logits(softmax_type, blocks, shift, sink):
    """Softmax does not depend on a shift, and no power of two of one may appear on the way."""
    check(
        softmax_type, [[[s + shift for s in row] for row in block] for block in blocks], 1.0, sink
    )


@pytest.mark.parametrize("first", [-3000.0, 0.0, 3000.0])
@pytest.mark.parametrize("second", [-3000.0, 0.0, 3000.0])
def test_the_maximum_jumps(softmax_type, first, second):
    check(softmax_type, [[[first] * COLS, [second] * COLS], [[second] * COLS, [first] * COLS]])


@pytest.mark.parametrize("masked", range(3))
def test_a_masked_block_changes_nothing(softmax_type, masked):
    """Whether it comes first, in between or last; the window's edge makes such blocks."""
    ssoftmax_types = [[[-700.0, 1.0, 2.0, 3.0], [-900.0, -901.0, -902.0, -903.0]]] * 2
    ssoftmax_types.insert(masked, [[NOTHING] * COLS, [NOTHING] * COLS])
    check(softmax_type, ssoftmax_types)


def test_rows_are_independent(softmax_type):
    masked, plain = [NOTHING] * COLS, [1.0, 2.0, 3.0, 4.0]
    (out, lse), (out_plain, _) = attend(softmax_type, [[masked, plain]], 1.0, NOTHING)
    assert (out, lse) == (0.0, NOTHING)
    assert out_plain > 1.0


def test_no_keys(softmax_type):
    """Nothing to attend to: out 0 and LSE -inf, or the sink alone."""
    assert attend(softmax_type, [], 1.0, NOTHING) == [(0.0, NOTHING)] * ROWS
    for out, lse in attend(softmax_type, [], 1.0, sink=1.5):
        assert out == 0.0
        assert lse == pytest.approx(1.5)


@pytest.mark.parametrize("sink", [NOTHING, 1.0])
def test_nan_reaches_both_results(softmax_type, sink):
    """A maximum does not see NaN: a row of nothing else must not pass for a row without keys."""
    for ssoftmax_types in ([math.nan] * COLS, [0.0, math.nan, 1.0, 2.0]):
        out, lse = attend(softmax_type, [[ssoftmax_types, [0.0] * COLS]], 1.0, sink)[0]
        assert math.isnan(out)
        assert math.isnan(lse)


@given(st.lists(st.floats(-20, 20, width=32), min_size=1, max_size=8))
def test_a_lazy_maximum_moves_only_when_it_must(core, tops):
    softmax, held = core.LazySoftmax(LOG2E), NOTHING
    for top in tops:
        p, rescale = softmax.step([[top, top - 1.0, NOTHING, top - 3.0]] * ROWS)
        if (top - held) * LOG2E > 8 + 1e-4:
            assert p[0][0] == 1.0
            held = top
        elif (top - held) * LOG2E < 8 - 1e-4:
            assert rescale == [1.0] * ROWS
            assert p[0][0] == pytest.approx(2 ** ((top - held) * LOG2E), rel=1e-4)
        else:
            return
