"""Plans of backwards by the rows of the table; tests/unit/test_plan_backward.py has the choices."""

import pytest

from . import calls
from .rows import TABLE

ROWS = [v for v in TABLE if v.direction == "bwd"]


def plan(kernels, row: str, shape: tuple[int, int, int, int], causal: bool = True, **more) -> dict:
    batch, seqlen, heads_q, heads_kv = shape
    call = calls.problem(
        batch=batch, seqlen_q=seqlen, seqlen_k=seqlen, heads_q=heads_q, heads_kv=heads_kv
    )
    gpu = {name: more.pop(name) for name in ("sm_count", "l2_mib") if name in more}
    return kernels.plan_backward(row, call | {"right": 0 if causal else -1} | more, **gpu)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_every_row_has_the_schedules_that_are_compiled(kernels, row):
    hopper = row.arch == "sm90" and row.scores == "plain"
    wide = row.head_dim > 256
    short = plan(kernels, row.name, (1 if wide else 32, 512, 16, 16), causal=wide)
    assert (short["schedule"] != "tiles") == hopper
    few = plan(kernels, row.name, (1, 2048 if wide else 4096, 1, 1))
    cuts = hopper and row.head_dim == row.head_dim_v != 96
    assert (few["row_splits"] > 1) == cuts
    for schedule in (short, few):
        assert schedule["us"] > 0


def test_groups_of_eight_on_either_gpu(kernels):
    """All eight heads at a time touch more of Q, dO and dQ than L2 holds."""
    for l2_mib in (50, 60):
        chosen = plan(kernels, "bwd_sm90_bf16_d128_plain", (2, 8192, 64, 8), l2_mib=l2_mib)
        assert chosen["schedule"] == "tiles"
        assert 2 <= chosen["heads"] <= 4


def test_dq_that_is_not_wanted_needs_no_sums(kernels):
    row, shape = "bwd_sm90_bf16_d128_plain", (32, 512, 16, 16)
    assert plan(kernels, row, shape)["schedule"] != "tiles"
    assert plan(kernels, row, shape, dq=(0, 0, 0, 0))["schedule"] == "tiles"
