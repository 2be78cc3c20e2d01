"""Linear attention runs on each of these backends."""

from __future__ import annotations

import pytest
import torch

from tests.linear.cases import Backend

BACKENDS = {
    "cpu": Backend("cpu"),
    "cuda": Backend("cuda", has_own_bits=False, kernels=True),
}


@pytest.fixture(
    params=[
        "cpu",
        pytest.param(
            "cuda",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
            ],
        ),
    ]
)
def backend(request) -> Backend:
    return BACKENDS[request.param]
