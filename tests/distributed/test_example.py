"""The example's promise: the loss curve over several processes is that of one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from examples import long_context
from examples.gpt.model import GPTConfig
from flash_attn import flash_attn_func
from flash_attn.distributed import unshard_sequence
from flash_attn.layers.rotary import apply_rotary_emb
from tests.distributed.processes import group
from tests.test_docs import BLOCK

CPU = torch.device("cpu")
SEQLEN = 250
PAGE = Path(__file__).parents[2] / "docs" / "distributed.md"


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


def page(rank: int) -> dict[str, torch.Tensor]:
    """What docs/distributed.md computes, block by block, and the whole sequence that it is of."""
    names: dict = {}
    initialised, dist.init_process_group = dist.init_process_group, lambda backend: None
    outs = []
    try:
        for code, _ in BLOCK.findall(PAGE.read_text()):
            exec(compile(code, str(PAGE), "exec"), names)
            outs.append(unshard_sequence(names["out"].detach(), names["layout"]))
    finally:
        dist.init_process_group = initialised
    q, k, v = names["project"](names["embed"](names["ids"])).unflatten(-1, (3, 4, 64)).unbind(2)
    angles = names["angles"].cos(), names["angles"].sin()
    turned = [apply_rotary_emb(x, *angles) for x in (q, k)]
    wanted = [flash_attn_func(*pair, v, causal=True) for pair in (turned, (q, k))]
    return {"outs": torch.stack(outs).numpy(), "wanted": torch.stack(wanted).detach().numpy()}


def test_the_page_computes_what_one_process_does(processes):
    for found in processes.run(page):
        assert found["outs"].shape == (2, 1, 1024, 4, 64)
        assert found["outs"] == pytest.approx(found["wanted"], abs=1e-5)


def test_it_runs_alone(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["long_context", "--seqlen", "128", "--steps", "2"])
    long_context.main()
    assert "over 1 processes" in capsys.readouterr().out
