"""Kernels stay inside their tensors whatever the index tensors hold.

Nothing is written around an output, and no output becomes NaN, which everything around an input is.
Results are right as far as the contents are.
"""

from __future__ import annotations

import random
from functools import partial

import pytest
import torch
from any_contents import INT_MAX, Calls, any_int, any_mask, int32, numbers, offsets
from calls import check_gradients
from cases import BF16, poisoned
from compare import assert_bitwise, assert_lse
from reference import attention_ref, standard_attention, varlen_ref
from torch import Tensor

from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache
from tests.kernels import library  # the one that every suite serves with: it registers once

from . import calls
from .rows import TABLE, id_of
from .test_backward_kernels import Attention
from .test_hopper_forward import check_packed

ROWS = [
    v for v in TABLE
    if v.dtype == "bf16" and v.scores == "plain" and (v.direction, v.cached_bits) != ("fwd", 8)
]  # fmt: skip
FORWARD = [v for v in ROWS if v.direction == "fwd" and v.head_dim == 64]
# And two computing warpgroups.
FORWARD += [v for v in ROWS if (v.direction, v.arch, v.head_dim_v) == ("fwd", "sm90", 128)][:1]
BACKWARD = [v for v in ROWS if v.direction == "bwd" and v.head_dim == 64]
# Each tile drawn, or all KV blocks of a sequence by one CTA.
KV_PERSISTENT = [v for v in BACKWARD if v.arch == "sm90"]
WAYS = [(v, False) for v in BACKWARD] + [(v, True) for v in KV_PERSISTENT]
# Rows whose tiles of small pages are long where a table has room for many keys.
LONG = [v for v in ROWS if v.direction == "fwd" and v.second_block_n > 128]
PAGED = [v for v in ROWS if v.direction == "paged" and v.head_dim == 64]
DECODE = [v for v in ROWS if (v.direction, v.head_dim, v.cached_bits) == ("decode", 64, 16)]
CODES = [v for v in ROWS if (v.head_dim, v.cached_bits) == (64, 8)]
APPEND = [v for v in ROWS if v.direction == "append"]
SEEDS = range(30)
BEFORE = 3.0


def way_id(x) -> str:
    return x.name if hasattr(x, "name") else "kv_persistent" if x else "tiles"


def randn(rng: random.Random, *shape: int) -> Tensor:
    gen = torch.Generator().manual_seed(rng.randrange(2**31))
    return poisoned(torch.randn(shape, generator=gen).to(BF16))


def any_scale(rng: random.Random, batch: int, cache: Tensor) -> Tensor | float:
    """Of codes: a number, or one of each sequence or row and head, with NaN around."""
    *of_rows, heads, _ = cache.shape
    shape = rng.choice([(), (batch, heads), (*of_rows, heads)])
    gen = torch.Generator().manual_seed(rng.randrange(2**31))
    return poisoned(torch.rand(shape, generator=gen) + 0.1, around=1) if shape else 0.5


def check(*outputs: Tensor) -> None:
    for x in outputs:
        assert not x.isnan().any()


# ---- packed batches -----------------------------------------------------------------------------


@pytest.mark.parametrize("row", FORWARD, ids=id_of)
@pytest.mark.parametrize("heads", [2, 16])  # which Hopper's kernels pack
@pytest.mark.parametrize("longest", [20, 210])
def test_sequences_from_the_middle_of_a_packed_batch(kernels, row, heads, longest):
    """The rows before and after them become zeros."""
    rng = random.Random(longest)
    lengths = [20, longest, 3, 0, 17, 11, longest - 9, 0, 5, 150]
    cu = int32([0, *lengths]).cumsum(0, dtype=torch.int32)
    total = int(cu[-1])
    q, k, v = randn(rng, total, heads, 64), randn(rng, total, 2, 64), randn(rng, total, 2, 64)
    some = cu[2:9]
    call = partial(calls.varlen, kernels, row.name, causal=True, max_seqlen_q=longest)
    result = call(q, k, v, some, some)
    for x in (q, k, v):  # of which nothing else is read
        x[: some[0]] = x[some[-1] :] = float("nan")
    again = call(q, k, v, some, some)
    check_packed(result, q, k, v, some, some, causal=True)
    assert_bitwise("out", again[0], result[0])


@pytest.mark.parametrize(("row", "kv_persistent"), WAYS, ids=way_id)
@pytest.mark.parametrize("longest", [60, 200])  # keys: of one block, and of more
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("split_heads", [2, 1])  # of the two that share keys
def test_gradients_from_the_middle_of_a_packed_batch(
    kernels, row, kv_persistent, longest, deterministic, split_heads
):
    rng = random.Random(longest)
    lengths = [130, longest, 3, 0, 17, longest - 9, 0, 5, 150]
    cu = int32([0, *lengths]).cumsum(0, dtype=torch.int32)[1:8]
    starts, total = cu.tolist(), sum(lengths)
    q, dout = randn(rng, total, 2, 64), randn(rng, total, 2, 64)
    k, v = randn(rng, total, 1, 64), randn(rng, total, 1, 64)

    def run(dout, out, lse, dlse):
        dirty = [x.clone() for x in (dout, q, k, v, out)]
        for x in dirty:
            x[: starts[0]] = x[starts[-1] :] = float("nan")
        softmax_d, *gradients = calls.backward(
            kernels, row.name, *dirty, lse, calls.varlen_lengths(q, k, cu, cu), causal=True,
            deterministic=deterministic, split_heads=split_heads, kv_persistent=kv_persistent,
        )  # fmt: skip
        assert not softmax_d[:, : starts[0]].any()
        assert not softmax_d[:, starts[-1] :].any()
        return tuple(gradients)

    def reference(attention):
        return lambda q, k, v: varlen_ref(attention, q, k, v, starts, starts, causal=True)

    check_gradients(
        lambda **leaves: Attention.apply(reference(attention_ref), run, *leaves.values()),
        reference(attention_ref),
        reference(standard_attention),
        {"q": q, "k": k, "v": v},
        dout,
    )


def packed(rng: random.Random, heads: int) -> tuple[list[Tensor], dict]:
    """q, k and v, cu_seqlens and what is said of them, right or not."""
    batch, total_q, total_k = rng.randint(1, 6), rng.randint(1, 300), rng.randint(1, 300)
    q = randn(rng, total_q, heads, 64)
    k, v = randn(rng, total_k, 2, 64), randn(rng, total_k, 2, 64)
    said = {name: rng.choice([0, 40, 300]) for name in ("max_seqlen_q", "max_seqlen_k")}
    return [q, k, v, offsets(rng, total_q, batch), offsets(rng, total_k, batch)], said


@pytest.mark.parametrize("row", FORWARD, ids=id_of)
@pytest.mark.parametrize("seed", SEEDS)
def test_forward(kernels, row, seed):
    rng = random.Random(seed)
    inputs, options = packed(rng, rng.choice([2, 16]))
    batch, total_k = len(inputs[3]) - 1, len(inputs[1])
    for name in ("seqused_k", "leftpad_k"):
        if rng.random() < 0.5:
            options[name] = numbers(rng, total_k, batch)
    check(*calls.varlen(kernels, row.name, *inputs, before=BEFORE, **options, **any_mask(rng)))


@pytest.mark.parametrize("row", FORWARD, ids=id_of)
@pytest.mark.parametrize("batch", [33, 80, 1200])
@pytest.mark.parametrize("seed", range(4))
def test_forward_of_many_sequences(kernels, row, batch, seed):
    """Among which a warp searches in several rounds."""
    rng = random.Random(seed)
    q, k, v = (randn(rng, 400, 1, 64) for _ in "qkv")
    cu = [offsets(rng, 400, batch) for _ in "qk"]
    said = dict(max_seqlen_q=300, max_seqlen_k=300)
    check(*calls.varlen(kernels, row.name, q, k, v, *cu, before=BEFORE, causal=True, **said))


@pytest.mark.parametrize("row", PAGED, ids=id_of)
@pytest.mark.parametrize("seed", SEEDS)
def test_forward_of_pages(kernels, row, seed):
    """cu_seqlens_k says lengths alone, and may say longer ones than a row of the table has."""
    rng = random.Random(seed)
    (q, *_, cu_q, cu_k), options = packed(rng, 2)
    batch, size, pages, listed = len(cu_q) - 1, rng.choice([1, 3, 16]), 12, rng.randint(0, 9)
    options |= {"block_table": numbers(rng, pages - 1, batch, listed)}
    if rng.random() < 0.5:
        options["leftpad_k"] = numbers(rng, listed * size, batch)
    if rng.random() < 0.5:
        cu_k, options["seqused_k"] = None, numbers(rng, listed * size, batch)
    caches = [randn(rng, pages, size, 2, 64) for _ in "kv"]
    output = calls.varlen(
        kernels, row.name, q, *caches, cu_q, cu_k, before=BEFORE, **options, **any_mask(rng)
    )
    check(*output)


@pytest.mark.parametrize("row", LONG, ids=id_of)
@pytest.mark.parametrize("size", [8, 16, 24, 48])
@pytest.mark.parametrize("is_packed", [False, True])
def test_long_tiles_of_pages(kernels, row, size, is_packed):
    """Of tables with room for many keys, and as what another kernel makes of them."""
    rng = random.Random(size)
    batch, pages, listed = 3, 12, 4000 // size
    table = numbers(rng, pages - 1, batch, listed)
    used = int32([rng.choice([listed * size, INT_MAX]), *numbers(rng, 600, batch - 1).tolist()])
    q = randn(rng, *([90] if is_packed else [batch, 30]), 2, 128)
    # Nothing but their rows; pages are eights of rows apart.
    memory = torch.full((2, pages + 2, size + 8, 4, 144), float("nan"), dtype=BF16)
    caches = memory[:, 1:-1, :size, 1:3, 8:-8].copy_(randn(rng, 2, pages, size, 2, 128))
    options = {"block_table": table, "before": BEFORE, "causal": rng.random() < 0.5}
    call = partial(calls.cached, cache_seqlens=used, num_splits=None)
    if is_packed:
        cu_q = int32([0, 50, 50, 90])
        call = partial(calls.varlen, cu_seqlens_q=cu_q, cu_seqlens_k=None, seqused_k=used)
    out, lse = call(calls.OnTile(kernels, "second"), row.name, q, *caches, **options)
    expected, expected_lse = call(kernels, "paged_sm80_bf16_d128_plain", q, *caches, **options)
    torch.testing.assert_close(out, expected, atol=1e-2, rtol=1.6e-2)
    assert_lse("lse", lse, expected_lse)


@pytest.mark.parametrize(("row", "kv_persistent"), WAYS, ids=way_id)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("deterministic", [False, True])
def test_backward(kernels, row, kv_persistent, seed, deterministic):
    """What it leaves to be added up may be anything; it ends, and stays inside."""
    rng = random.Random(seed)
    (q, k, v, cu_q, cu_k), options = packed(rng, 4)
    used = numbers(rng, len(k), len(cu_q) - 1) if rng.random() < 0.5 else None
    lengths = calls.varlen_lengths(q, k, cu_q, cu_k, used, **options)
    calls.backward(
        kernels, row.name, q, q, k, v, q, torch.randn(4, len(q)), lengths,
        deterministic=deterministic, split_heads=rng.choice([1, 2]), kv_persistent=kv_persistent,
        **any_mask(rng),
    )  # fmt: skip


@pytest.mark.parametrize("row", BACKWARD, ids=id_of)
def test_more_keys_than_were_said(kernels, row):
    """dQ of sequences whose keys are not in one block, as was said, is NaN; all else is right."""
    rng = random.Random(0)
    lengths = [row.block_n, row.block_n + 1, 50]
    cu = int32([0, *lengths]).cumsum(0, dtype=torch.int32)
    q, k, v = (randn(rng, sum(lengths), 1, 64) for _ in "qkv")
    lse = torch.full((1, len(q)), 3.0)
    run = partial(calls.backward, kernels, row.name, q, q, k, v, q, lse)
    right = run(calls.varlen_lengths(q, k, cu, cu))
    wrong = run(calls.varlen_lengths(q, k, cu, cu, max_seqlen_k=row.block_n))
    long = slice(cu[1], cu[2])
    assert wrong[1][long].isnan().all()
    wrong[1][long] = right[1][long]
    for name, a, b in zip(("softmax_d", "dq", "dk", "dv"), wrong, right, strict=True):
        assert_bitwise(name, a, b)


@pytest.mark.parametrize("sm", [80, 90])
@pytest.mark.parametrize("window", [(50, 30), (90, -1), (-1, 90)], ids=str)
def test_a_window_wider_than_was_said_of_sequences(monkeypatch, sm, window):
    """It counts all the same, backward and forward."""
    rng = random.Random(0)
    cu = int32([0, 200, 300])
    q, k, v, dout = (randn(rng, 300, 2, 64) for _ in range(4))
    results = []
    with library.serving(monkeypatch, sm):
        for longest in (200, 70, 20):
            # More keys than were said leave no dQ.
            inputs = [q.detach(), *(x.detach().requires_grad_() for x in (k, v))]
            out = flash_attn_varlen_func(*inputs, cu, cu, longest, longest, window_size=window)
            results.append([out.detach(), *torch.autograd.grad(out, inputs[1:], dout)])
    for right, wrong, decoded in zip(*results, strict=True):
        assert_bitwise("with max_seqlen too small", wrong, right)
        # Up to 64 rows may be decoded, whose bits are others.
        torch.testing.assert_close(decoded, right, rtol=2**-6, atol=2**-7)


# ---- caches -------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", [*DECODE, *CODES, *PAGED, *FORWARD], ids=id_of)
@pytest.mark.parametrize("seed", SEEDS)
def test_cache(kernels, row, seed):
    rng = random.Random(seed)
    batch, seqlen_q, room = rng.randint(1, 6), rng.choice([1, 3, 40]), rng.choice([1, 16, 300])
    may_have_pages = row.direction == "decode" or row.arch == "sm90"
    is_paged = row.direction == "paged" or (may_have_pages and rng.random() < 0.5)
    if is_paged and row.arch == "sm90":
        room = rng.choice([8, 16, 24, 256])  # whose boxes fit, without left padding
    entries = rng.randint(1, 7)
    most, options = room, {}
    if is_paged:
        listed = rng.randint(0, 7)
        most = listed * room
        options["block_table"] = numbers(rng, entries - 1, batch, listed)
    elif rng.random() < 0.5:
        options["cache_batch_idx"] = numbers(rng, entries - 1, batch)
    else:
        entries = batch
    for name in ("cache_seqlens", "cache_leftpad"):
        is_served = name == "cache_seqlens" or row.arch == "sm80" or not is_paged
        if is_served and rng.random() < 0.7:
            options[name] = numbers(rng, most, batch)
    if row.direction == "decode":
        options["num_splits"] = rng.choice([0, 1, 3])
    else:
        options["num_splits"] = None
    q, *caches = (
        randn(rng, batch, seqlen_q, 4, 64),
        *(randn(rng, entries, room, 2, 64) for _ in "kv"),
    )
    if row.cached_bits == 8:
        caches = [poisoned(x.to(torch.float8_e4m3fn), around=16) for x in caches]
        scales = [any_scale(rng, batch, x) for x in caches]
        options["codes"] = calls.code_descales(*scales)
    output = calls.cached(
        kernels,
        row.name,
        q,
        *caches,
        before=BEFORE,
        new=rng.choice([0, 2]),
        **options,
        **any_mask(rng),
    )
    check(*output)


@pytest.mark.parametrize("seed", SEEDS)
def test_latent_cache(kernels, monkeypatch, seed):
    """Rows of the latent part and of the rotated one lie in tensors of their own."""
    rng = random.Random(seed)
    batch, entries, room = rng.randint(1, 4), rng.randint(1, 7), rng.choice([1, 16, 100])
    options = {"cache_seqlens": numbers(rng, 3 * room, batch)}
    if rng.random() < 0.6:
        options["block_table"] = numbers(rng, entries - 1, batch, 3)
    else:
        options["cache_batch_idx"] = numbers(rng, entries - 1, batch)
    if rng.random() < 0.5:
        options["cache_leftpad"] = numbers(rng, room, batch)
    q, qv = (randn(rng, batch, rng.choice([1, 3]), 4, d) for d in (64, 512))
    qv = qv[:, :1].expand(-1, q.shape[1], -1, -1)
    caches = [randn(rng, entries, room, 2, d) for d in (64, 512)]
    with library.serving(monkeypatch, rng.choice([80, 90])):
        out, lse = flash_attn_with_kvcache(
            q, *caches, qv=qv, return_lse=True, num_splits=rng.choice([0, 1, 3]), **options
        )
    check(out, lse)


@pytest.mark.parametrize("row", APPEND, ids=id_of)
@pytest.mark.parametrize("seed", SEEDS)
def test_append(kernels, row, seed):
    rng = random.Random(seed)
    batch, seqlen_q, new, room = rng.randint(1, 5), rng.randint(1, 4), rng.randint(1, 4), 16
    entries, most, options = 7, room, {}
    if rng.random() < 0.5:
        listed = rng.randint(0, 5)
        most = listed * room
        options["block_table"] = numbers(rng, entries - 1, batch, listed)
    else:
        options["cache_batch_idx"] = numbers(rng, entries - 1, batch)
    if rng.random() < 0.7:
        positions = rng.choice([1, most + 8])
        options |= {f"rotary_{name}": randn(rng, positions, 16) for name in ("cos", "sin")}
        options["local"] = rng.random() < 0.7
        options["interleaved"] = rng.random() < 0.5
    q, k, v = (randn(rng, batch, n, 2, 64) for n in (seqlen_q, new, new))
    caches = [poisoned(torch.full((entries, room, 2, 64), BEFORE, dtype=BF16)) for _ in "kv"]
    turned = calls.append(
        kernels, row.name, q, *caches, k, v, cache_seqlens=numbers(rng, most, batch), **options
    )
    check(turned, *caches)
    for cache in caches:
        assert cache.fill_(float("nan"))._base.isnan().all()


@pytest.mark.parametrize("row", APPEND, ids=id_of)
def test_positions_beyond_an_int(kernels, row):
    """Several queries after the largest length turn by the last position that there is."""
    rng = random.Random(0)
    q, k, v = (randn(rng, 1, n, 2, 64) for n in (5, 1, 1))
    caches = [randn(rng, 1, 16, 2, 64) for _ in "kv"]
    cos, sin = randn(rng, 9, 32), randn(rng, 9, 32)
    run = partial(calls.append, kernels, row.name, q, *caches, k, v, rotary_cos=cos, rotary_sin=sin)
    beyond = run(cache_seqlens=int32([INT_MAX - 2]), local=True)
    last = run(cache_seqlens=int32([8]), local=False)
    assert_bitwise("q", beyond, last)


# ---- from tensors to kernels --------------------------------------------------------------------


@pytest.mark.parametrize("sm", [80, 90])
@pytest.mark.parametrize("call", Calls.ALL, ids=lambda call: call.__name__)
@pytest.mark.parametrize("seed", range(8))
def test_whole_calls(monkeypatch, sm, call, seed):
    torch.manual_seed(seed)
    with library.serving(monkeypatch, sm):
        call(Calls(random.Random(seed), BF16, 64, 64, "cpu"))


def test_any_int_is_often_right():
    rng = random.Random(0)
    right = [0 <= any_int(rng, 10) <= 10 for _ in range(1000)]
    assert 400 < sum(right) < 900
