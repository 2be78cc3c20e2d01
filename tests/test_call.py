"""The description of a call: what ``calls`` spells out for an operation comes back the same."""

from __future__ import annotations

import pytest
import torch

from flash_attn.api import checks
from flash_attn.call import (
    Backward,
    Cache,
    CacheStep,
    Descales,
    Forward,
    Gradients,
    Keys,
    Lengths,
    Options,
    Scoring,
    named,
)
from flash_attn.dispatch import calls, ops, run

# Every field has a value of its own, so that no two can be confused.
SCORING = Scoring(
    dropout_p=0.0, softmax_scale=0.5, causal=True, window_size_left=3, window_size_right=4,
    softcap=5.0, alibi_slopes="alibi_slopes", s_aux="s_aux",
)  # fmt: skip
LENGTHS = Lengths("cu_seqlens_q", "cu_seqlens_k", 6, 7)
DESCALES = Descales("k_descale", "v_descale", 2.0, 3.0)
TENSORS = Gradients(*Gradients._fields)


def described(monkeypatch, asked, description, operation):
    """``description`` of the arguments that ``asked`` gives to the operation."""
    found = []

    def call(given, *args, **kwargs):
        assert given is operation
        found.append((args, kwargs))
        return "out", "lse"

    monkeypatch.setattr(run, "writing", call)
    monkeypatch.setattr(run, "forward", lambda given, _, args, kw: call(given, *args, **kw))
    asked()
    return description.of(named(operation.default._schema)(*found[0]))


@pytest.mark.parametrize(
    "call",
    [
        Forward("q", "k", "v", SCORING),
        Forward("q", "k", "v", SCORING, None, Keys(), True, "rng_state", True, True),
        Forward("q", "k", "v", SCORING, LENGTHS),
        Forward(
            "q",
            "k",
            "v",
            SCORING,
            LENGTHS,
            Keys(*Keys._fields),
            True,
            "r",
            True,
            True,
            True,
            True,
            8,
            DESCALES,
        ),
        Forward("q", "k", "v", SCORING, LENGTHS, descales=DESCALES._replace(k_descale=None)),
    ],
)
def test_a_forward_comes_back(call, monkeypatch):
    operation = ops.forward if call.lengths is None else ops.varlen_forward
    asked = lambda: calls.forward(call)  # noqa: E731
    assert described(monkeypatch, asked, Forward, operation) == call


@pytest.mark.parametrize(
    "call",
    [
        Backward(TENSORS, SCORING, None, Keys(), True, "rng_state"),
        Backward(TENSORS, SCORING, LENGTHS, Keys(seqused_k="seqused_k"), True, "rng_state"),
        Backward(TENSORS._replace(dlse=None, ds_aux=None), SCORING, LENGTHS),
    ],
)
def test_a_backward_comes_back(call, monkeypatch):
    operation = ops.backward if call.lengths is None else ops.varlen_backward
    asked = lambda: calls.backward(call)  # noqa: E731
    assert described(monkeypatch, asked, Backward, operation) == call


@pytest.mark.parametrize("descales", [Descales(), DESCALES, Descales("k", None, 1.0, 4.0)])
def test_a_step_with_a_cache_comes_back(descales, monkeypatch):
    step = CacheStep("q", Cache(*Cache._fields), SCORING, True, 9, descales)
    monkeypatch.setattr(calls.checks_fp8, "descales", lambda *given: descales)
    monkeypatch.setattr(calls.checks_kvcache, "kvcache", lambda q, cache, look: cache)
    monkeypatch.setattr(calls, "_as_kernels_read", lambda cache, q: cache)
    monkeypatch.setattr(calls, "_has_to_pad", lambda q, v: False)
    monkeypatch.setattr(checks, "scoring", lambda q, batch, options, look: SCORING)
    q = torch.empty(0)
    asked = lambda: calls.kvcache(q, step.cache, Options(), True, 9)  # noqa: E731
    back = described(monkeypatch, asked, CacheStep, ops.with_kvcache)
    assert back._replace(q="q") == step
