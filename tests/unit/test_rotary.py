"""Which elements rotary turns together, in both layouts and with part of the head turned."""

import math

import pytest
import torch

ROTARY_DIMS = [2, 4, 6, 8, 16, 32, 64, 96, 128, 256]


def pairs(interleaved, rotary_dim):
    half = rotary_dim // 2
    return [(2 * p, 2 * p + 1) if interleaved else (p, p + half) for p in range(half)]


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("rotary_dim", ROTARY_DIMS)
def test_terms(core, interleaved, rotary_dim):
    for pair, (first, second) in enumerate(pairs(interleaved, rotary_dim)):
        for dim, partner, sign in [(first, second, -1), (second, first, 1)]:
            term = core.rotary_term(interleaved=interleaved, rotary_dim=rotary_dim, dim=dim)
            assert term == (pair, partner, sign)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("rotary_dim", [2, 6, 16])
@pytest.mark.parametrize("position", [0, 1, 7, 1000])
def test_rotation_of_complex_numbers(core, interleaved, rotary_dim, position):
    """A pair (x, y) is x + iy, multiplied by exp(i * angle)."""
    x = [math.sin(3 * dim + 1) for dim in range(rotary_dim)]
    angles = [position * 10_000 ** (-2 * p / rotary_dim) for p in range(rotary_dim // 2)]

    turned = []
    for dim in range(rotary_dim):
        pair, partner, sign = core.rotary_term(
            interleaved=interleaved, rotary_dim=rotary_dim, dim=dim
        )
        cos, sin = math.cos(angles[pair]), math.sin(angles[pair])
        turned.append(core.rotate(sign=sign, x=x[dim], partner=x[partner], cos=cos, sin=sin))

    for pair, (first, second) in enumerate(pairs(interleaved, rotary_dim)):
        expected = complex(x[first], x[second]) * complex(
            math.cos(angles[pair]), math.sin(angles[pair])
        )
        assert turned[first] == pytest.approx(expected.real, abs=1e-6)
        assert turned[second] == pytest.approx(expected.imag, abs=1e-6)


def test_pairs_turn_as_on_torch(core):
    """Each product is rounded before the sum."""
    first, second, cos, sin = torch.randn(4, 500)
    expected = first * cos - second * sin, first * sin + second * cos
    for i in range(500):
        pair = {"first": first[i], "second": second[i], "cos": cos[i], "sin": sin[i]}
        turned = core.turn_pair(**{name: float(x) for name, x in pair.items()})
        assert turned == tuple(float(x[i]) for x in expected)
