"""The example's promise: the loss curve over several processes is that of one."""

from __future__ import annotations

import sys

import pytest
import torch

from examples import long_context
from examples.gpt.model import GPTConfig
from tests.distributed.processes import group

CPU = torch.device("cpu")
SEQLEN = 250


def losses(rank: int, method: str, ranks: int) -> list[float]:
    config = GPTConfig(dim=32, layers=1, heads=4, heads_kv=2, hidden=64, max_seqlen=SEQLEN)
    ranks_of = group(ranks) if ranks > 1 else None
    shard = long_context.Shard(method, SEQLEN, rank, ranks, CPU, ranks_of)
    return long_context.train(config, shard, 4, 2e-2, CPU, torch.float32)


@pytest.mark.parametrize("method", long_context.METHODS)
def test_loss_curve_is_that_of_one_process(processes, method):
    one = losses(0, method, 1)
    assert one[-1] < one[0] - 0.5
    for curve in processes.run(losses, method, 2, ranks=2):
        assert curve == pytest.approx(one, rel=1e-5)


def test_it_runs_alone(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["long_context", "--seqlen", "128", "--steps", "2"])
    long_context.main()
    assert "over 1 processes" in capsys.readouterr().out
