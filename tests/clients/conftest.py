"""Clients run on the CPU backend and on a GPU; kernels on the host take minutes for a model."""

from __future__ import annotations

import pytest
import torch


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
def device(request) -> str:
    return request.param
