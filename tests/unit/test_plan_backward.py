"""The plan of a backward: whatever is asked, the choice is possible; and it is a sensible one."""

import math
import random

import pytest

# What csrc/variants.py has for Hopper: (block_m, tiles that an H200 runs at a time).
HOPPER = {
    64: (128, 132), 96: (64, 132), 128: (64, 132), 192: (64, 66), 256: (64, 66), 512: (64, 30),
}  # fmt: skip
# GPUs that were not measured: what their properties say.
OTHERS = {
    "A100": dict(sm_count=108, l2_bytes=40 << 20, memory=1.6e6, resident=108),
    "L40S": dict(sm_count=142, l2_bytes=96 << 20, memory=0.7e6, resident=142),
    "RTX 4090": dict(sm_count=128, l2_bytes=72 << 20, memory=0.8e6, resident=128),
    "RTX 5090": dict(sm_count=170, l2_bytes=96 << 20, memory=1.4e6, resident=170),
    "GB10": dict(sm_count=48, l2_bytes=24 << 20, memory=0.22e6, resident=48),
    "Orin Nano": dict(sm_count=8, l2_bytes=2 << 20, memory=0.06e6, resident=8),
    "one place": dict(sm_count=1, l2_bytes=1 << 20, memory=0.06e6, resident=1),
}


def kernel(head_dim: int = 128, plain: bool = True, sm: int = 90) -> dict:
    block_m, resident = HOPPER[head_dim]
    return dict(
        block_m=block_m, block_n=128, head_dim=head_dim, head_dim_v=head_dim, resident=resident,
        sm=sm, plain=plain,
    )  # fmt: skip


def dense(
    batch: int, seqlen: int, heads_q: int, heads_kv: int, causal: bool = True, **more
) -> dict:
    return dict(
        batch=batch, seqlen_q=seqlen, seqlen_k=seqlen, heads_q=heads_q, heads_kv=heads_kv,
        right=0 if causal else -1, **more,
    )  # fmt: skip


def packed(mean: int, longest: int, heads: int, total: int = 16384, **more) -> dict:
    lengths = dict(batch=total // mean, seqlen_q=longest, seqlen_k=longest)
    totals = dict(total_q=total, total_k=total, heads_q=heads, heads_kv=heads, packed=True)
    return lengths | totals | more


def drawn(dice: random.Random) -> dict:
    heads_kv = dice.choice([1, 2, 3, 8, 25])
    call = dict(
        batch=dice.choice([1, 1, 2, 7, 64, 1000]),
        seqlen_q=dice.choice([0, 1, 3, 64, 129, 1000, 8192, 100_000]),
        seqlen_k=dice.choice([0, 1, 77, 1000, 8192, 100_000]),
        heads_q=heads_kv * dice.choice([1, 1, 4, 5, 7, 8, 48, 71]),
        heads_kv=heads_kv,
        left=dice.choice([-1, -1, 0, 128, 5000, 2**30]),
        right=dice.choice([-1, 0, 0, 3]),
        deterministic=dice.random() < 0.3,
        wants_dq=dice.random() < 0.8,
    )
    if dice.random() < 0.4:
        call["packed"] = True
        for total, longest in (("total_q", "seqlen_q"), ("total_k", "seqlen_k")):
            call[total] = int(call["batch"] * call[longest] * dice.uniform(0.1, 1))
    return call


def check(call: dict, choice: tuple) -> None:
    """That kernels can run it, within memory."""
    schedule, heads, row_splits, together = choice
    group = call["heads_q"] // call["heads_kv"]
    parts = math.ceil(group / heads)
    tiles = math.ceil(call["seqlen_k"] / call["block_n"])
    total_k = call.get("total_k", call["batch"] * call["seqlen_k"])
    total_q = call.get("total_q", call["batch"] * call["seqlen_q"])
    most = max(4 * total_q * call["heads_q"] * call["head_dim"], 128 << 20)
    columns = 2 * call["head_dim"]
    assert 1 <= heads <= group
    assert 1 <= together <= max(call["heads_kv"] * parts * call["batch"], 1)
    assert parts == 1 or 4 * total_k * call["heads_kv"] * parts * columns <= most
    if schedule != "tiles":
        assert (call["sm"], call["plain"]) == (90, True)
    if schedule == "kv_persistent":
        longest = min(call["seqlen_q"], total_q)
        running = min(call["resident"], call["batch"] * call["heads_kv"] * parts)
        assert 4 * longest * heads * call["head_dim"] * running <= most
    if schedule == "ordered_dq":
        assert heads == 1
        assert not call.get("packed")
        assert tiles > 1
        assert call["wants_dq"]
    if row_splits > 1:
        assert (call["sm"], call["plain"]) == (90, True)
        assert call["head_dim"] != 96
        assert heads == group
        assert not call.get("packed")
        assert not call["deterministic"]
        slots = call["batch"] * call["heads_kv"] * tiles * row_splits
        assert 4 * slots * call["block_n"] * columns <= most
        assert row_splits <= math.ceil(call["seqlen_q"] / call["block_m"])


@pytest.mark.parametrize("gpu", ["H100", "H200", *OTHERS])
def test_whatever_is_asked_is_possible(core, gpu):
    dice = random.Random(5)
    for _ in range(300):
        family = 80 if gpu in OTHERS else dice.choice([80, 90])
        row = kernel(dice.choice(list(HOPPER)), dice.random() < 0.7, family)
        call = drawn(dice) | row | OTHERS.get(gpu, {})
        choice, us = core.plan_backward(call, gpu)
        check(call, choice)
        assert 0 < us < math.inf
        choices = core.backward_choices(call, gpu)
        assert len({c for c, _ in choices}) == len(choices)
        if call["wants_dq"]:
            assert choice in [c for c, _ in choices]
            assert us <= 1.011 * min(time for _, time in choices)


def test_ctas_of_a_multiprocessor_share_its_tensor_cores(core):
    """Steps that are counted from their products take longer where more tiles run at a time."""
    gpu = OTHERS["A100"]
    call = dense(4, 4096, 16, 16) | kernel(64, sm=80) | gpu
    one, two = (
        min(us for _, us in core.backward_choices(call | {"resident": n * gpu["resident"]}, "H200"))
        for n in (1, 2)
    )
    assert two == pytest.approx(one, rel=0.1)


@pytest.mark.parametrize("gpu", ["H100", "H200"])
def test_keys_have_the_same_bits_without_dq(core, gpu):
    """What a tile goes through does not depend on whether dQ is wanted."""
    dice = random.Random(6)
    for _ in range(200):
        call = drawn(dice) | kernel(dice.choice(list(HOPPER)))
        with_dq, without = (
            core.plan_backward(call | {"wants_dq": w}, gpu)[0] for w in (True, False)
        )
        assert with_dq[1:3] == without[1:3]
        assert without[0] == "tiles"


@pytest.mark.parametrize(
    ("gpu", "most"), [("H100", 5), ("H200", 5)]
)  # of 7 and 8 heads all at a time are more than L2 holds
@pytest.mark.parametrize(
    "shape", [(2, 8192, 64, 8), (1, 8192, 64, 8), (4, 4096, 64, 8), (1, 16384, 64, 8)], ids=str
)
def test_large_groups_are_cut(core, gpu, most, shape):
    """A 70B model's backward at 8 heads a tile: 0.65 of the best rate on an H100."""
    (schedule, heads, _, together), *_ = core.plan_backward(dense(*shape) | kernel(), gpu)
    assert schedule == "tiles"
    assert 2 <= heads <= most
    assert together <= 16


@pytest.mark.parametrize("head_dim", [d for d in HOPPER if d <= 256])
def test_short_sequences_need_no_pass_behind(core, head_dim):
    heads = 2048 // head_dim
    for call in (dense(32, 512, heads, heads), dense(16, 1024, heads, heads)):
        assert core.plan_backward(call | kernel(head_dim), "H200")[0][0] != "tiles"


@pytest.mark.parametrize("head_dim", [64, 128])
def test_short_packed_sequences_stay_in_a_thread_block(core, head_dim):
    call = packed(256, 512, 2048 // head_dim, right=0) | kernel(head_dim)
    assert core.plan_backward(call, "H200")[0][0] == "kv_persistent"


def test_long_sequences_take_tiles(core):
    for head_dim in (64, 96, 128):
        heads = 2048 // head_dim
        call = dense(1, 16384, heads, heads) | kernel(head_dim)
        assert core.plan_backward(call, "H200")[0][:3] == ("tiles", 1, 1)


def test_few_tiles_are_cut_along_the_rows(core):
    """One sequence, four heads: the longest tile takes as long as two of the average."""
    call = dense(1, 4096, 4, 4) | kernel()
    assert core.plan_backward(call, "H200")[0][2] > 1
    assert core.plan_backward(call | {"deterministic": True}, "H200")[0][2] == 1


def test_time_grows_with_what_there_is_to_do(core):
    def us(**changed) -> float:
        call = dict(batch=2, seqlen_q=4096, seqlen_k=4096, heads_q=16, heads_kv=16, right=0)
        return core.plan_backward(call | kernel() | changed, "H200")[1]

    assert 1.8 < us(batch=4) / us() < 2.1
    assert 1.5 < us(right=-1) / us() < 2.1
    assert 3 < us(seqlen_q=8192, seqlen_k=8192) / us() < 4.2
    assert us(left=511) < 0.5 * us()
    assert us(memory=1e6) > us()
    assert us(deterministic=True) >= us()


@pytest.mark.parametrize(
    ("head_dim", "cluster", "seqlen", "causal", "heads"),
    [
        (64, 1, 512, False, 40),  # of 128: the delta warp computes 0.17 row blocks in a step
        (96, 1, 512, True, 32),  # 0.3
        (192, 2, 512, False, 8),  # 0.4 in pairs: no more than run together
        (192, 2, 1024, True, 8),
        (192, 2, 256, True, 51),
        (128, 1, 8192, True, 8),
    ],
)
def test_heads_whose_d_is_computed_first(core, head_dim, cluster, seqlen, causal, heads):
    call = kernel(head_dim) | dense(4, seqlen, 32, 32, causal) | dict(cluster=cluster)
    assert core.heads_computed_before(call, 8) == heads


def test_the_main_kernel_computes_d_where_all_rows_see_keys(core):
    assert core.computes_delta(kernel(192) | dense(2, 512, 8, 8))
    assert not core.computes_delta(kernel(256) | dense(2, 512, 8, 8))
    more_rows = dense(2, 512, 8, 8) | dict(seqlen_k=511)
    assert not core.computes_delta(kernel(128) | more_rows)
    assert core.computes_delta(kernel(128) | more_rows | dict(right=-1))
    assert core.computes_delta(kernel(128) | dense(2, 511, 8, 8) | dict(seqlen_k=512))
