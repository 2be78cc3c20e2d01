"""Linear attention runs on each of these backends."""

from __future__ import annotations

import pytest

from tests.devices import GPU
from tests.linear.cases import Backend

BACKENDS = {
    "cpu": Backend("cpu"),
    "cuda": Backend("cuda", has_own_bits=False, kernels=True),
}


@pytest.fixture(params=["cpu", GPU])
def backend(request) -> Backend:
    return BACKENDS[request.param]
