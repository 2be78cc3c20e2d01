"""The description of a call: what ``calls`` spells out for an operation comes back the same."""

from __future__ import annotations

import inspect

import pytest
import torch

import flash_attn
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

_HEADS = (2, 8)
#: The public functions that spell out all options, and the last dimensions of their tensors.
SPELLED_OUT = {
    flash_attn.flash_attn_func: [_HEADS] * 3,
    flash_attn.flash_attn_kvpacked_func: [_HEADS, (2, *_HEADS)],
    flash_attn.flash_attn_qkvpacked_func: [(3, *_HEADS)],
    flash_attn.flash_attn_varlen_func: [_HEADS] * 3,
    flash_attn.flash_attn_varlen_kvpacked_func: [_HEADS, (2, *_HEADS)],
    flash_attn.flash_attn_varlen_qkvpacked_func: [(3, *_HEADS)],
}
LENGTH_NAMES = frozenset((*Lengths._fields, "cu_seqlens", "max_seqlen", "block_table"))
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


@pytest.mark.parametrize("function", SPELLED_OUT)
def test_every_option_of_a_public_function_has_its_own_name(function, monkeypatch):
    """They are written by position, which takes a microsecond less than by keyword."""
    found = []

    def attend(q, k, v, options, *others, **named_ones):
        found.append(options)

    monkeypatch.setattr(calls, "attend", attend)
    parameters = inspect.signature(function).parameters
    names = [name for name in parameters if name in Options._fields]
    lengths = [name for name in parameters if name in LENGTH_NAMES]
    leading = (5,) if lengths else (2, 5)
    shapes = [(*leading, *heads) for heads in SPELLED_OUT[function]]
    function(*map(torch.zeros, shapes), **{name: name for name in (*lengths, *names)})
    assert set(names) == set(Options._fields) - {"sm_margin"}
    assert found == [Options(**{name: name for name in names})]
