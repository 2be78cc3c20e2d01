"""The benchmark of the gated delta rule on small problems, on the CPU."""

from __future__ import annotations

import sys
import types

import pytest
import torch

from benchmarks import delta
from benchmarks.rows import Options

CPU = torch.device("cpu")


def test_the_delta_rule_beside_flash_linear_attention(monkeypatch):
    taken = []

    def mix(q, k, v, g, beta, initial_state=None, output_final_state=False):
        taken.append((tuple(q.shape), tuple(g.shape), tuple(beta.shape)))
        return v, initial_state

    module = types.ModuleType("fla.ops.gated_delta_rule")
    module.chunk_gated_delta_rule = mix
    for name in ("fla", "fla.ops"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for name, value in (("HEADS", 1), ("HEADS_V", 2), ("PROMPTS", ((2, 16),)), ("BATCHES", (3,))):
        monkeypatch.setattr(delta, name, value)
    monkeypatch.setattr(delta, "TUNING", 3)
    (row,) = delta.delta(Options(CPU, dims={8}))
    assert row.problem == "delta d8 b2 s16 h1/2"
    assert row.rates["ours"] == pytest.approx(32 / row.milliseconds["ours"] / 1e3)
    assert taken[0] == ((2, 16, 1, 8), (2, 16, 2), (2, 16, 2))
    (row,) = delta.delta_step(Options(CPU, dims={8}))
    assert row.rates["copy"] == pytest.approx(8 * 3 * 2 * 64 / row.milliseconds["copy"] / 1e6)
    assert "fused_recurrent_gated_delta_rule" in row.missing["fla"]
