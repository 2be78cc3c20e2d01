"""The model of a ring's time against what was measured, and what it says at the ends."""

from __future__ import annotations

import pytest

from benchmarks import ring_model
from benchmarks.ring_model import Layer, Machine, Time, all_to_all, both, hidden_from, ring

MACHINE = Machine()


@pytest.mark.parametrize("what", ["fwd", "fwd+bwd"])
@pytest.mark.parametrize(
    ("contender", "model"), [("ring, zigzag", ring), ("all-to-all", all_to_all)]
)
def test_model_is_near_what_was_measured(contender, model, what):
    found = [ring_model.measured(seqlen, contender) for seqlen in (32768, 131072)]
    rows = [row for points in found for row in points if row["what"] == what]
    assert [row["ranks"] for row in rows] == 2 * [*ring_model.MEASURED_GPUS]
    for row in rows:
        call = Layer(row["seqlen"]), row["ranks"], MACHINE.inside, MACHINE
        time = both(model, *call) if what == "fwd+bwd" else model(*call, backward=False)
        assert 1e3 * time.total == pytest.approx(row["milliseconds"], rel=0.1), row


def test_one_rank_is_the_kernel_alone():
    time = ring(Layer(32768), 1, MACHINE.inside, MACHINE, backward=False)
    assert time == Time(time.total, 0.0, 0.0)


def test_transfers_hide_from_where_the_model_says():
    layer = Layer(2**20)
    tokens = hidden_from(layer, MACHINE.between, MACHINE)
    for share, exposed in ((1.1, False), (0.9, True)):
        ranks = int(layer.seqlen / (share * tokens))
        time = ring(layer, ranks, MACHINE.between, MACHINE, backward=False)
        assert (time.exposed > 0) == exposed


def test_all_to_all_inside_hosts_carries_a_ring_further():
    layer = Layer(2**20)
    flat = both(ring, layer, 1024, MACHINE.between, MACHINE)
    nested = both(ring_model.ring_of_hosts, layer, 1024, MACHINE)
    assert nested.total < flat.total / 4


def test_table_has_a_line_for_each_point(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["ring_model", "--seqlens", "131072"])
    ring_model.main()
    printed = capsys.readouterr().out
    assert len(printed.splitlines()) == 1 + 8 + 2
    assert "hides its transfers from" in printed
