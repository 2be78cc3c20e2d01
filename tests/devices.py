"""The devices that a suite runs on."""

import pytest
import torch

#: A parameter of fixtures: the GPU, where there is one.
GPU = pytest.param(
    "cuda",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
    ],
)
