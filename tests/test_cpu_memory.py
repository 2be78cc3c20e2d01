"""Memory grows with the sequence length: nothing on the CPU is ever as large as the scores."""

from __future__ import annotations

import pytest
import torch
from calls import scored
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from flash_attn import cpu
from flash_attn.call import Backward, Forward, Gradients

SEQLEN, HEADS = 2048, 2
SCORES = HEADS * SEQLEN * SEQLEN


class Largest(TorchDispatchMode):
    """The elements of the largest storage that any torch operation returned."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        results = function(*args, **(kwargs or {}))
        for x in tree_leaves(results):
            if isinstance(x, Tensor):
                self.elements = max(self.elements, x.untyped_storage().nbytes() // x.itemsize)
        return results


FEATURES = {
    "plain": {},
    "window": {"window_size_left": 100},
    "softcap": {"softcap": 5.0},
    "alibi": {"alibi_slopes": torch.ones(HEADS)},
    "dropout": {"dropout_p": 0.1},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("feature", FEATURES)
@torch.no_grad()
def test_nothing_is_as_large_as_the_scores(feature, dtype):
    q, k, v = torch.randn(3, 1, SEQLEN, HEADS, 16, dtype=dtype)
    scoring = scored(softmax_scale=0.1, causal=True, window_size_right=0, **FEATURES[feature])
    state = torch.tensor([1, 2]) if scoring.dropout_p else None
    gradients = [torch.empty_like(x) for x in (q, k, v)]
    with Largest() as largest:
        out, lse, *_ = cpu.forward(Forward(q, k, v, scoring, rng_state=state))
        tensors = Gradients(out, q, k, v, out, lse, *gradients)
        cpu.backward(Backward(tensors, scoring, rng_state=state))
    assert q.numel() <= largest.elements < SCORES / 8


def test_the_scores_would_be_noticed():
    q = torch.randn(1, HEADS, SEQLEN, 16)
    with Largest() as largest:
        (q @ q.mT).softmax(-1) @ q
    assert largest.elements == SCORES
