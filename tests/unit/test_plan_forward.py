"""The plan of a forward: whatever is asked, the choice is possible; and it is a sensible one."""

import math
import random

import pytest

from csrc.variants import VARIANTS

TILES = ("first", "second", "packed", "split")
MOST_BYTES = 256 << 20
MOST_SPLITS = 32
MOST_CHOICES = 128

# (block_m, block_n, second_block_n) of Hopper's plain rows, by head dims. The first row of these is
# that of numbers; later ones are of codes.
HOPPER = {
    (row.head_dim, row.head_dim_v): (row.block_m, row.block_n, row.second_block_n)
    for row in reversed(VARIANTS)
    if (row.direction, row.arch, row.scores, row.dtype) == ("fwd", "sm90", "plain", "bf16")
}
HOPPER = dict(sorted(HOPPER.items()))
OTHERS = {
    "A100": dict(sm=80, sm_count=108, l2_bytes=40 << 20, memory=1.7e6),
    "L40S": dict(sm=89, sm_count=142, l2_bytes=96 << 20, memory=0.8e6),
    "RTX 4090": dict(sm=89, sm_count=128, l2_bytes=72 << 20, memory=0.9e6),
    "RTX 5090": dict(sm=120, sm_count=170, l2_bytes=96 << 20, memory=1.6e6),
    "GB10": dict(sm=121, sm_count=48, l2_bytes=24 << 20, memory=0.25e6),
    "Orin Nano": dict(sm=87, sm_count=8, l2_bytes=2 << 20, memory=0.06e6),
    "one multiprocessor": dict(sm=87, sm_count=1, l2_bytes=1 << 20, memory=0.06e6),
}


def hopper(head_dim, head_dim_v=None, plain=True):
    dims = next(
        dims for dims in HOPPER if dims[0] >= head_dim and dims[1] >= (head_dim_v or head_dim)
    )
    block_m, block_n, second = HOPPER[dims]
    return dict(
        sm=90, head_dim=dims[0], head_dim_v=dims[1], block_m=block_m, block_n=block_n,
        second_block_n=second if plain else 0, plain=plain,
    )  # fmt: skip


def ampere(head_dim):
    return dict(
        sm=80, head_dim=head_dim, head_dim_v=head_dim, block_m=128 if head_dim <= 128 else 64,
        block_n=64, plain=True, blocks_per_sm=2,
    )  # fmt: skip


def dense(batch, seqlen, heads_q, heads_kv, head_dim, causal, **others):
    return dict(
        batch=batch, seqlen_q=seqlen, seqlen_k=seqlen, heads_q=heads_q, heads_kv=heads_kv,
        head_dim=head_dim, right=0 if causal else -1,
    ) | others  # fmt: skip


def drawn(r):
    heads_kv = r.choice([1, 2, 3, 8, 25])
    p = dict(
        batch=r.choice([1, 1, 2, 7, 64, 1000]),
        seqlen_q=r.choice([1, 3, 64, 129, 1000, 8192, 100_000]),
        seqlen_k=r.choice([0, 1, 77, 1000, 8192, 1_000_000]),
        heads_q=heads_kv * r.choice([1, 1, 4, 7, 64, 71]),
        heads_kv=heads_kv,
        head_dim=r.choice([8, 64, 80, 96, 128, 160, 192, 256, 512]),
        left=r.choice([-1, -1, 0, 128, 5000]),
        right=r.choice([-1, 0, 0, 3]),
        used_k=r.random() < 0.3,
        batch_invariant=r.random() < 0.2,
        page_size=r.choice([0, 0, 1, 16, 256]),
        num_splits=r.choice([0, 0, 1, 5]),
        beside_decode=r.random() < 0.2,
        heads_apart=r.random() < 0.9,
        whole_rows=r.random() < 0.7,
    )
    if r.random() < 0.4:
        p["packed"] = True
        for total, longest in (("total_q", "seqlen_q"), ("total_k", "seqlen_k")):
            p[total] = int(p["batch"] * p[longest] * r.uniform(0.1, 1)) + 1
    return p


def check(core, p, machine, kernel):
    tile, splits, side_by_side, us = core.plan_forward(p, machine, kernel)
    beside = p["beside_decode"]
    choices = core.forward_choices(p, machine, kernel)
    assert len(choices) <= MOST_CHOICES
    assert (tile, splits, side_by_side) in choices
    packed = p.get("packed", False)
    heads = (p["heads_q"] if tile in ("first", "second") else p["heads_kv"]) * splits
    assert 1 <= side_by_side <= heads * (1 if packed else p["batch"])
    assert math.isfinite(us)
    assert us > 0
    rows = p["heads_q"] * p.get("total_q", p["batch"] * p["seqlen_q"])
    if tile == "split":
        assert 2 <= splits <= min(MOST_SPLITS, p["num_splits"] or MOST_SPLITS)
        assert 4 * splits * rows * (p.get("head_dim_v", p["head_dim"]) + 1) <= MOST_BYTES
        assert not p["batch_invariant"]
        assert not beside
    else:
        assert splits == 1
    if tile in ("packed", "split"):
        assert p["heads_apart"]
        assert p["heads_q"] <= 64 * p["heads_kv"]
    if p["batch_invariant"] and packed:
        assert tile == "first"
    if kernel["sm"] != 90 or not kernel["plain"] or kernel["head_dim"] > 256:
        assert tile == "first"
    if p["page_size"] and tile == "second":
        assert kernel["second_block_n"] > 128
        assert p["head_dim"] == kernel["head_dim"]
        assert p["whole_rows"]
        assert p["page_size"] % 8 == 0
    if beside:
        assert side_by_side == 1


@pytest.mark.parametrize("machine", ["H200", "H100", *OTHERS])
def test_every_plan_is_possible(core, machine):
    r = random.Random(machine)
    for _ in range(2000):
        p = drawn(r)
        on_hopper = machine in ("H200", "H100") and r.random() < 0.8
        kernel = (
            hopper(p["head_dim"], plain=r.random() < 0.8) if on_hopper else ampere(p["head_dim"])
        )
        check(core, p, OTHERS.get(machine, machine), kernel)


def test_nothing_to_do(core):
    for empty in (dict(batch=0), dict(total_q=0, packed=True), dict(heads_q=0, heads_kv=0)):
        p = dense(1, 128, 8, 8, 128, causal=True) | empty
        assert core.plan_forward(p, "H200", hopper(128))[:3] == ("first", 1, 1)


# What an H200 took, without what measuring takes.
@pytest.mark.parametrize(
    ("problem", "tile", "side_by_side", "us"),
    [
        (dense(13, 512, 64, 4, 128, causal=False), 0, 16, 188),
        (dense(13, 512, 64, 4, 128, causal=False), 1, 16, 202),
        (dense(13, 512, 64, 4, 128, causal=False), 2, 4, 197),
        (dense(16, 3072, 16, 16, 192, causal=True, head_dim_v=128), 0, 16, 1193),
        (dense(11, 768, 16, 16, 256, causal=True), 1, 36, 115),
        (dense(1, 5888, 12, 2, 128, causal=True), 0, 12, 154),
        (dense(1, 5888, 12, 2, 128, causal=True), 0, 1, 182),
        (dense(3, 1536, 48, 1, 128, causal=True, left=512), 0, 48, 108),
    ],
)
def test_times(core, problem, tile, side_by_side, us):
    kernel = hopper(problem["head_dim"], problem.get("head_dim_v"))
    predicted = core.predicted_us(problem, "H200", kernel, tile=tile, side_by_side=side_by_side)
    assert predicted == pytest.approx(us, rel=0.15)


@pytest.mark.parametrize("machine", ["H200", "H100"])
def test_long_keys_of_few_rows_are_split(core, machine):
    p = dict(
        batch=1, seqlen_q=16, seqlen_k=65536, heads_q=32, heads_kv=8, head_dim=128, right=0,
        used_k=True, page_size=64,
    )  # fmt: skip
    tile, splits, *_ = core.plan_forward(p, machine, hopper(128))
    assert tile == "split"
    assert splits * 8 >= 96


@pytest.mark.parametrize("machine", ["H200", "H100"])
def test_a_full_gpu_is_not_split(core, machine):
    for causal in (False, True):
        p = dense(4, 4096, 32, 8, 128, causal)
        assert core.plan_forward(p, machine, hopper(128))[0] in ("first", "second")


def test_short_sequences_share_row_blocks(core):
    p = dict(
        batch=512, seqlen_q=256, seqlen_k=256, total_q=66753, total_k=66753, packed=True,
        heads_q=9, heads_kv=3, head_dim=64,
    )  # fmt: skip
    assert core.plan_forward(p, "H200", hopper(64))[0] == "packed"


def test_long_tiles_are_for_long_rows(core):
    def plan(seqlen, **mask):
        return core.plan_forward(dense(8, seqlen, 32, 8, 128, False, **mask), "H200", hopper(128))

    assert plan(8192)[0] == "second"
    assert plan(256)[0] == "first"
    assert plan(8192, left=128, right=0)[0] == "first"


def test_groups_are_narrow_where_l2_is_small(core):
    p = dense(112, 768, 32, 32, 192, causal=True, head_dim_v=128)
    kernel = hopper(192, 128)
    narrow, wide = (
        core.predicted_us(p, "H100", kernel, tile=0, side_by_side=width) for width in (8, 132)
    )
    assert wide > 1.2 * narrow
    assert core.plan_forward(p, "H100", kernel)[2] <= 66


@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_batch_invariant_calls_have_one_tile(core, head_dim):
    r = random.Random(head_dim)
    for _ in range(200):
        p = drawn(r) | dict(batch_invariant=True, head_dim=head_dim)
        if p.pop("packed", False):
            del p["total_q"], p["total_k"]
        tiles = {
            core.plan_forward(p | dict(batch=batch), "H200", hopper(head_dim))[0]
            for batch in (1, 2, 7, 100, 2000)
        }
        assert len(tiles) == 1


def test_decode_beside(core):
    p = dict(
        batch=64, seqlen_q=2048, seqlen_k=8192, total_q=2111, total_k=64 * 8192, packed=True,
        used_k=True, heads_q=32, heads_kv=8, head_dim=128, right=0, page_size=64,
        beside_decode=True,
    )  # fmt: skip
    tile, splits, side_by_side, *_ = core.plan_forward(p, "H200", hopper(128))
    assert tile in ("first", "packed")
    assert splits == 1
    assert side_by_side == 1
