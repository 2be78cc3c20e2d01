"""The plan of decoding: whatever is asked, it can be run; and it is a sensible one."""

import random

import pytest

from tests.unit.test_piece_schedule import check_cover

MOST_ROWS = 64
# (machine, thread blocks that a multiprocessor holds at head dims up to 128)
HOPPER = [("H200", 3), ("H100", 3)]
OTHERS = [
    (dict(sm=80, sm_count=108, reads=1.8e6), 2),  # A100
    (dict(sm=89, sm_count=142, reads=0.8e6), 1),  # L40S
    (dict(sm=89, sm_count=128, reads=0.9e6), 1),  # RTX 4090
    (dict(sm=120, sm_count=170, reads=1.6e6), 1),  # RTX 5090
    (dict(sm=121, sm_count=48, reads=0.25e6), 1),  # GB10
    (dict(sm=87, sm_count=8, reads=0.06e6), 1),  # Orin Nano
    (dict(sm=87, sm_count=1, reads=0.06e6), 1),
]
UNIT = {64: 128, 128: 64, 256: 32}


def unit(head_dim):
    return next(keys for dims, keys in UNIT.items() if head_dim <= dims)


def sm_count(machine):
    return 132 if isinstance(machine, str) else machine["sm_count"]


def call(batch, seqlen_k, heads_q, heads_kv, head_dim, **others):
    return dict(
        batch=batch, seqlen_k=seqlen_k, heads_q=heads_q, heads_kv=heads_kv, head_dim=head_dim
    ) | others  # fmt: skip


def drawn(r):
    heads_kv = r.choice([1, 2, 3, 8, 25])
    p = call(
        r.choice([1, 1, 2, 7, 33, 64, 1000]), r.choice([0, 1, 77, 1000, 8192, 1_000_000]),
        heads_kv * r.choice([1, 1, 4, 7, 64, 71]), heads_kv, r.choice([8, 64, 80, 128, 192, 256]),
        seqlen_q=r.choice([0, 1, 1, 1, 3, 16, 65, 1000]), left=r.choice([-1, -1, 0, 128, 5000]),
        batch_invariant=r.random() < 0.2, page_size=r.choice([0, 0, 1, 16, 256]),
        num_splits=r.choice([0, 0, 0, 1, 5]), used_k=r.random() < 0.8, odd_rows=r.random() < 0.1,
        dropout=r.random() < 0.1,
    )  # fmt: skip
    if r.random() < 0.4:
        p |= dict(packed=True, total_q=int(p["batch"] * p["seqlen_q"] * r.uniform(0.1, 1)))
    return p


def check_is_possible(core, p, machine, plan):
    group = p["heads_q"] // p["heads_kv"]
    longest = min(p["seqlen_q"], p["total_q"]) if "packed" in p else p["seqlen_q"]
    if plan["few_q"] == 0:
        return
    assert not p["dropout"]
    mixed = plan["few_q"] != core.ALL_QUERIES
    if mixed:
        assert p["packed"]
        assert p["page_size"]
        assert longest * group > MOST_ROWS
        assert plan["few_q"] * group <= MOST_ROWS
    else:
        assert 0 < longest * group <= MOST_ROWS
    assert 0 < plan["us"] < 1e9
    clusters = plan["cluster_log2"]
    assert 0 <= clusters <= 4
    assert plan["max_pieces"] >= 1
    if p["batch_invariant"]:
        assert p["page_size"]
    if p["batch_invariant"] or p["num_splits"] == 1:
        assert (plan["max_pieces"], clusters) == (1, 0)
    if clusters:
        assert machine in ("H200", "H100")
        assert p["head_dim"] <= 128
        assert not mixed
        assert (plan["max_pieces"], p["num_splits"]) == (1, 0)
    if plan["max_pieces"] > 1:
        units = -(-p["seqlen_k"] // unit(p["head_dim"]))
        assert plan["max_pieces"] <= max(-(-units // plan["min_units"]), 1)
        assert min(plan["slices"], plan["extra"]) > 0
        if p["num_splits"] > 1:
            assert plan["max_pieces"] <= p["num_splits"]
        else:  # the workspace is bounded by the GPU, not by the call
            assert plan["slices"] * p["heads_kv"] <= 4 * 3 * sm_count(machine)


@pytest.mark.parametrize(("machine", "blocks"), HOPPER + OTHERS, ids=lambda x: str(x))
def test_every_plan_can_be_run(core, machine, blocks):
    r = random.Random(3)
    for _ in range(2000):
        p = drawn(r)
        forward_us = r.choice([1.0, 20.0, 1e9])
        plan = core.plan_decode(p, machine, blocks, forward_us)
        check_is_possible(core, p, machine, plan)


@pytest.mark.parametrize(("machine", "blocks"), HOPPER + OTHERS[:1])
def test_each_key_is_in_one_piece(core, machine, blocks):
    """Whatever lengths the device finds."""
    r = random.Random(4)
    cut = 0
    for _ in range(300):
        heads_kv = r.choice([1, 2, 8])
        p = call(
            r.choice([1, 2, 9, 40]), r.choice([500, 8192, 131072]), 4 * heads_kv, heads_kv, 128
        )
        plan = core.plan_decode(p, machine, blocks)
        most = -(-p["seqlen_k"] // unit(128))
        lengths = [r.choice([0, 1, most // 9, most, r.randint(0, most)]) for _ in range(p["batch"])]
        schedule = core.PieceSchedule(
            batch=p["batch"], tiles=heads_kv, min_units=plan["min_units"], slices=plan["slices"],
            max_pieces=plan["max_pieces"], extra=plan["extra"],
        )  # fmt: skip
        check_cover(schedule, lengths, heads_kv, plan["max_pieces"])
        cut += plan["max_pieces"] > 1
    assert cut > 30


@pytest.mark.parametrize("machine", ["H200", "H100"])
@pytest.mark.parametrize("rows", [1, 16, 64])
def test_no_other_sequence_changes_a_batch_invariant_one(core, machine, rows):
    plans = []
    for batch in (1, 2, 100):
        p = call(batch, 8192, rows, 1, 128, packed=True, page_size=16, batch_invariant=True)
        for forward_us in (1.0, 1e9):
            plan = core.plan_decode(p, machine, forward_us=forward_us)
            plans.append((plan["few_q"], plan["max_pieces"], plan["cluster_log2"]))
    assert set(plans) == {(core.ALL_QUERIES, 1, 0)}


@pytest.mark.parametrize("machine", ["H200", "H100"])
def test_clusters_share_the_tiles_of_small_calls(core, machine):
    """No lengths to look up, and nothing to merge through memory, of few rows as well."""
    for p in (
        call(1, 2048, 32, 8, 128), call(2, 512, 32, 8, 64), call(4, 8192, 7, 1, 128),
        call(1, 16384, 64, 4, 128), call(2, 131072, 16, 8, 128, left=127),
    ):  # fmt: skip
        assert core.plan_decode(p, machine)["cluster_log2"] > 0, p


@pytest.mark.parametrize("machine", ["H200", "H100"])
def test_few_long_sequences_are_cut_into_one_piece_a_multiprocessor_at_least(core, machine):
    for p in (call(1, 131072, 32, 8, 128), call(4, 131072, 9, 3, 64), call(16, 131072, 64, 8, 128)):
        plan = core.plan_decode(p, machine)
        assert plan["cluster_log2"] == 0
        assert plan["max_pieces"] > 1
        assert plan["slices"] * p["heads_kv"] > 120


def test_more_clusters_than_find_room_are_not_chosen(core):
    """62 clusters of 4 run at a time on an H200, so 64 take two waves."""
    for batch, heads_kv in ((8, 8), (4, 16), (2, 32)):
        plan = core.plan_decode(call(batch, 2048, 4 * heads_kv, heads_kv, 128), "H200")
        assert plan["cluster_log2"] < 2, (batch, heads_kv)


def test_a_mixed_batch_has_pieces_where_it_has_no_clusters(core):
    p = call(140, 65536, 32, 8, 128, packed=True, page_size=16, seqlen_q=512, total_q=139 + 512)
    assert core.plan_decode(p, "H200")["max_pieces"] > 1


@pytest.mark.parametrize("machine", ["H200", "H100"])
def test_many_short_sequences_stay_whole(core, machine):
    """The search for pieces would take as long as their keys."""
    for p in (call(256, 512, 32, 8, 128), call(1000, 512, 8, 1, 128), call(96, 512, 40, 10, 64)):
        assert core.plan_decode(p, machine)["max_pieces"] == 1, p


@pytest.mark.parametrize("machine", ["H200", "H100"])
def test_many_sequences_of_a_large_capacity_are_cut(core, machine):
    """One of them may be nearly all of the batch."""
    for p in (call(96, 16384, 8, 8, 128), call(48, 32768, 16, 16, 64), call(32, 131072, 8, 1, 128)):
        plan = core.plan_decode(p, machine)
        assert plan["max_pieces"] > 1, p
        assert plan["slices"] > p["batch"], p


def test_the_faster_kernel_has_it(core):
    p = call(4, 8192, 32, 8, 128, seqlen_q=4)
    alone = core.plan_decode(p, "H200")
    assert alone["few_q"] == core.ALL_QUERIES
    assert core.plan_decode(p, "H200", forward_us=0.9 * alone["us"])["few_q"] == 0
    assert core.plan_decode(p, "H200", forward_us=1.1 * alone["us"])["few_q"] == core.ALL_QUERIES


@pytest.mark.parametrize(
    "must", [dict(odd_rows=True), dict(page_size=1), dict(page_size=64, num_splits=3)]
)
def test_what_the_forward_would_copy_or_not_cut_is_decoded(core, must):
    p = call(4, 8192, 32, 8, 128) | must
    assert core.plan_decode(p, "H200", forward_us=0.1)["few_q"] == core.ALL_QUERIES


def test_of_a_mixed_batch_the_short_sequences_are_decoded(core):
    p = call(64, 8192, 32, 8, 128, packed=True, page_size=16, seqlen_q=512, total_q=63 + 512)
    plan = core.plan_decode(p, "H200")
    assert (plan["few_q"], plan["cluster_log2"]) == (16, 0)
    assert core.plan_decode(p | dict(page_size=0), "H200")["few_q"] == 0


def test_the_longest_sequence_of_a_cache_is_expected_to_fill_it(core):
    one, two, many = (call(batch, 1000, 1, 1, 64) for batch in (1, 2, 1000))
    assert {keys for keys, _ in core.fills(one)} == {1000}
    assert [keys for keys, _ in core.fills(two)] == [1000, 750, 545]
    assert [keys for keys, _ in core.fills(many)] == pytest.approx([1000, 500, 90], rel=0.02)
    assert sum(weight for _, weight in core.fills(many)) == 1
    # A window hides the difference.
    assert [keys for keys, _ in core.fills(many | dict(left=9))] == pytest.approx(
        [10] * 3, rel=0.01
    )
    assert core.fills(many | dict(used_k=False)) == [(1000, 1)]
