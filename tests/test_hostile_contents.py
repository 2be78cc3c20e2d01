"""Index tensors and lengths that say anything, through whole operations on the GPU's kernels
compiled for the host: what the host computes from them divides by nothing, and every call ends."""

from __future__ import annotations

import random

import pytest
import torch
from any_contents import Calls
from cases import BF16


@pytest.mark.parametrize("call", Calls.ALL, ids=lambda call: call.__name__)
def test_every_call_ends(device, call, request):
    if request.node.callspec.params["device"] in ("cpu", "cuda"):
        pytest.skip("a CPU looks at contents; for a GPU see test_any_contents_gpu.py")
    for seed in range(20):
        torch.manual_seed(seed)
        call(Calls(random.Random(seed), BF16, 64, 64, device))
