"""How many CTAs of a kernel, or clusters of them, a GPU runs at a time (csrc/plan/resident.h)."""

from __future__ import annotations

import pytest

KIB = 1024
H200 = (132, 227 * KIB)
A100 = (108, 163 * KIB)
RTX_4090 = (128, 99 * KIB)


@pytest.mark.parametrize(
    ("cta", "gpu", "resident"),
    [
        ((12, 200 * KIB, 1), H200, 132),
        ((12, 200 * KIB, 2), H200, 66),
        ((12, 200 * KIB, 4), H200, 30),  # the parts of the GPU have no multiple of four SMs
        ((8, 60 * KIB, 1), A100, 108),  # registers allow one, shared memory two
        ((4, 60 * KIB, 1), A100, 216),
        ((4, 100 * KIB, 1), A100, 108),
        ((4, 49 * KIB, 1), RTX_4090, 256),  # an SM has 100 KiB, of which each CTA takes 50
        ((4, 49 * KIB + 1, 1), RTX_4090, 128),
    ],
)
def test_backward(core, cta, gpu, resident):
    assert core.resident_backward(cta, gpu) == resident


def test_forward(core):
    """A CTA of Hopper's has an SM for itself, however small it is."""
    cta = (12, 40 * KIB, 1)
    assert core.resident_forward(True, cta, H200) == 132
    assert core.resident_forward(False, cta, H200) == 5 * 132
    assert core.resident_forward(True, (12, 200 * KIB, 2), H200) == 66


@pytest.mark.parametrize(("smem", "ctas"), [(20, 3), (60, 3), (80, 2), (120, 1), (300, 1)])
def test_decode(core, smem, ctas):
    """At most three an SM, which its registers allow."""
    assert core.resident_decode((4, smem * KIB, 1), H200) == ctas * 132
