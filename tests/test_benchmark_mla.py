"""The benchmark of latent attention: its contenders, and their calls."""

from __future__ import annotations

import types

import torch

from benchmarks import mla

CPU = torch.device("cpu")


def test_contenders_of_latent_attention(monkeypatch):
    """This library under other names is none; what is, gets the same call."""
    point = mla.Latent(2, 40, 1, 3, page=16)
    assert set(mla.steps(point, CPU)) == {"ours"}
    calls = []
    peer = types.SimpleNamespace(
        get_mla_metadata=lambda used, rows, heads: ("metadata", "splits"),
        flash_mla_with_kvcache=lambda *args, **options: calls.append((args, options)),
        flash_attn_with_kvcache=lambda *args, **options: calls.append((args, options)),
    )
    monkeypatch.setattr(mla, "peer_module", lambda name: peer)
    steps = mla.steps(point, CPU)
    assert steps["ours"]().shape == (2, 1, 3, 512)
    steps["fa3"]()
    steps["flashmla"]()
    (fa3, options), (flashmla, _) = calls
    assert torch.equal(torch.cat([options["qv"], fa3[0]], -1), flashmla[0])
    assert flashmla[4:] == (512, "metadata", "splits")
    assert point.flops == 2 * 2 * 3 * 40 * (512 + 576)
