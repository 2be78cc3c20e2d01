"""``attention_chunk`` and ``rotary_seqlens`` under FA3's names, against masks written out."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from itertools import accumulate

import pytest
import torch
from cache_cases import CacheCase, expected, make_cache
from calls import check_gradients
from cases import BF16, FP16, poisoned
from compare import assert_accurate, assert_bitwise, assert_lse, assert_within
from reference import attention_ref, standard_attention
from reference_cache import rotate
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.library import opcheck

import flash_attn_interface as fa3

HEADS, HEADS_K, D = 4, 2, 32
OPS = torch.ops.flash_attn_3


REFERENCES = attention_ref, standard_attention


def both(function) -> list:
    """A function of an attention, of each reference."""
    return [partial(function, f) for f in REFERENCES]


def tensors(device: str, *shapes: tuple[int, ...], dtype=BF16) -> list[Tensor]:
    return [poisoned(torch.randn(shape).to(dtype).to(device)) for shape in shapes]


def ints(device: str, values) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def ends(device: str, lengths) -> Tensor:
    return ints(device, [0, *accumulate(lengths)])


# --- Dense ----------------------------------------------------------------------------------------

OPTIONS = [
    {"causal": True},
    {},
    {"window_size": (5, 3)},
    {"window_size": (-1, 2), "softcap": 3.0},
    {"causal": True, "window_size": (9, 0), "softmax_scale": 0.3},
]
DENSE = [(33, 50, 16), (50, 33, 16), (40, 40, 1), (20, 24, 100), (1, 37, 8), (48, 48, 16)]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(("rows", "keys", "chunk"), DENSE)
def test_dense(rows, keys, chunk, options, device):
    shapes = (2, rows, HEADS, D), (2, keys, HEADS_K, D), (2, keys, HEADS_K, D), (2, rows, HEADS, D)
    q, k, v, dout = tensors(device, *shapes)
    inputs = {"q": q, "k": k, "v": v}
    if options.get("causal"):
        inputs["s_aux"] = torch.randn(HEADS, device=device)

    def ours(q, k, v, s_aux=None):
        return fa3.flash_attn_func(
            q, k, v, attention_chunk=chunk, s_aux=s_aux, return_attn_probs=True, **options
        )

    def written_out(attention, q, k, v, s_aux=None):
        return attention(q, k, v, s_aux=s_aux, chunk=chunk, **options)[:2]

    dlse = torch.randn(2, HEADS, rows, device=device)
    check_gradients(ours, *both(written_out), inputs, dout, dlse)


def test_qkvpacked(device):
    qkv, dout = tensors(device, (2, 45, 3, HEADS, D), (2, 45, HEADS, D))

    def ours(qkv):
        return fa3.flash_attn_qkvpacked_func(
            qkv, causal=True, attention_chunk=16, return_attn_probs=True
        )

    def written_out(attention, qkv):
        return attention(*qkv.unbind(2), chunk=16, causal=True)[:2]

    check_gradients(ours, *both(written_out), {"qkv": qkv}, dout)


def test_head_dims_are_padded(device):
    q, k, v = tensors(device, *[(2, 20, 2, 20)] * 3)
    out = fa3.flash_attn_func(q, k, v, causal=True, attention_chunk=8)
    ref, std = (f(q, k, v, chunk=8, causal=True)[0] for f in REFERENCES)
    assert_accurate("out", out, ref, std)


@pytest.mark.parametrize("causal", [False, True])
def test_a_chunk_of_all_keys_is_none(causal, device):
    """However long; and the call is the dense one."""
    q, k, v = tensors(device, *[(2, 20, 2, D)] * 3)
    plain = fa3.flash_attn_func(q, k, v, causal=causal)
    for chunk in (None, 0, 20, 2**40):
        assert_bitwise("out", fa3.flash_attn_func(
            q, k, v, causal=causal, attention_chunk=chunk), plain)  # fmt: skip


@pytest.mark.parametrize(
    ("chunk", "error"), [(-1, ValueError), (2.0, TypeError), (True, TypeError), ("8", TypeError)]
)
def test_what_is_no_chunk(chunk, error):
    x = torch.randn(1, 4, 2, 8)
    cu = ends("cpu", [4])
    with pytest.raises(error, match="attention_chunk: got"):
        fa3.flash_attn_func(x, x, x, attention_chunk=chunk)
    with pytest.raises(error, match="attention_chunk: got"):
        fa3.flash_attn_varlen_func(x[0], x[0], x[0], cu, cu, 4, 4, attention_chunk=chunk)
    with pytest.raises(error, match="attention_chunk: got"):
        fa3.flash_attn_with_kvcache(x, x, x, attention_chunk=chunk)
    with pytest.raises(error, match="attention_chunk: got"):
        fa3._flash_attn_backward(x, x, x, x, x, x, attention_chunk=chunk)


# --- Packed ---------------------------------------------------------------------------------------


def drawn(seed: int):
    """Sequences, some empty, with slots that may be longer than what is used of them."""
    draw = random.Random(seed)
    batch = draw.randint(1, 5)
    slots_q = [draw.choice([0, 1, draw.randint(2, 40)]) for _ in range(batch)]
    slots_k = [draw.choice([0, 1, draw.randint(2, 60)]) for _ in range(batch)]
    if draw.random() < 0.3:
        slots_k = slots_q
    used_q = [draw.randint(0, n) for n in slots_q] if draw.random() < 0.5 else None
    used_k = [draw.randint(0, n) for n in slots_k] if draw.random() < 0.5 else None
    options = dict(draw.choice(OPTIONS))
    slopes = torch.rand(draw.choice([(HEADS,), (batch, HEADS)])) if draw.random() < 0.3 else None
    chunk = draw.choice([1, 2, 7, 16, 100])
    return slots_q, slots_k, used_q, used_k, options, slopes, chunk


def each(attention, slots_q, slots_k, used_q, used_k, slopes, q, k, v, **options):
    """One sequence at a time; 0 and -inf in rows that are not in use."""
    out, lse = [], []
    for b, (rows, n) in enumerate(zip(q.split(slots_q), used_q or slots_q)):
        m = (used_k or slots_k)[b]
        keys, values = (x.split(slots_k)[b][None, :m] for x in (k, v))
        own = slopes if slopes is None or slopes.dim() == 1 else slopes[b]
        part, part_lse, _ = attention(rows[None, :n], keys, values, alibi_slopes=own, **options)
        rest = rows.shape[0] - n
        out += [part[0], part.new_zeros(rest, *part.shape[2:])]
        lse += [part_lse[0], part_lse.new_full((q.shape[1], rest), -torch.inf)]
    return torch.cat(out), torch.cat(lse, -1)


@pytest.mark.parametrize("seed", range(24))
def test_packed(seed, device):
    slots_q, slots_k, used_q, used_k, options, slopes, chunk = drawn(seed)
    shapes = [(sum(slots_q), HEADS, D), *[(sum(slots_k), HEADS_K, D)] * 2]
    q, k, v, dout = tensors(device, *shapes, shapes[0], dtype=FP16 if seed % 2 else BF16)
    slopes = None if slopes is None else slopes.to(device)
    used = {"seqused_q": used_q, "seqused_k": used_k}
    given = {name: ints(device, n) for name, n in used.items() if n is not None}
    cu_q = ends(device, slots_q)
    cu_k = cu_q if slots_k is slots_q else ends(device, slots_k)
    if used_k is not None:
        for x in (k, v):
            for slot, n in zip(x.split(slots_k), used_k):
                slot[n:] = float("nan")

    def ours(q, k, v):
        return fa3.flash_attn_varlen_func(
            q, k, v, cu_q, cu_k, max(slots_q), max(slots_k), attention_chunk=chunk,
            alibi_slopes=slopes, return_attn_probs=True, **given, **options,
        )  # fmt: skip

    out, lse = ours(q, k, v)
    in_use = [torch.arange(s) < n for s, n in zip(slots_q, used_q or slots_q)]
    in_use = torch.cat(in_use).to(device)
    assert not out[~in_use].any()
    assert torch.isneginf(lse[:, ~in_use]).all()
    if not q.numel():
        return

    def rows(function):
        def call(*args, **leaves):
            out, lse = function(*args, **leaves)
            return out[in_use], lse[:, in_use].contiguous()

        return call

    lengths = slots_q, slots_k, used_q, used_k, slopes
    written_out = [rows(partial(each, f, *lengths, chunk=chunk, **options)) for f in REFERENCES]
    if in_use.any() and k.numel():
        inputs = {"q": q, "k": k, "v": v}
        check_gradients(rows(ours), *written_out, inputs, dout[in_use])


def test_a_slice_of_a_batch_is_no_forgotten_zero(recwarn):
    x = torch.randn(12, 2, 8)
    cu = ends("cpu", [4, 8])[1:]
    out = fa3.flash_attn_varlen_func(x, x, x, cu, cu, 8, 8, causal=True, attention_chunk=3)
    assert not recwarn.list
    assert not out[:4].any()


def test_contents_are_noticed_as_the_caller_gave_them():
    x = torch.randn(6, 2, 8)
    cu = ends("cpu", [2, 4])
    with pytest.raises(ValueError, match="max_seqlen_k: got 3; the longest"):
        fa3.flash_attn_varlen_func(x, x, x, cu, cu, 4, 3, attention_chunk=2)
    with pytest.raises(ValueError, match="seqused_k: got 3 keys for sequence 0"):
        fa3.flash_attn_varlen_func(
            x, x, x, cu, cu, 4, 4, seqused_k=ints("cpu", [3, 4]), attention_chunk=2
        )


# --- The operators --------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", ["dense", "packed", "used"])
@pytest.mark.parametrize("causal", [False, True])
def test_backward_alone(shape, causal, device):
    """Of the function and of the operator: overwritten buffers, as autograd has them."""
    rows = (2, 20) if shape == "dense" else (40,)
    q, k, v = tensors(device, (*rows, HEADS, D), *[(*rows, HEADS_K, D)] * 2)
    cu = None if shape == "dense" else ends(device, [13, 27])
    used = ints(device, [9, 27]) if shape == "used" else None
    named = {"attention_chunk": 8, "softmax_scale": 0.2}
    out, lse, *_ = OPS.fwd(
        q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, seqused_q=used, seqused_k=used,
        max_seqlen_q=27, max_seqlen_k=27, is_causal=causal, **named,
    )  # fmt: skip
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    again, _, *_ = fa3._flash_attn_forward(
        *leaves, cu_seqlens_q=cu, cu_seqlens_k=cu, seqused_q=used, seqused_k=used,
        max_seqlen_q=27, max_seqlen_k=27, causal=causal, **named,
    )  # fmt: skip
    assert_bitwise("out", again.contiguous(), out.contiguous())
    dout = torch.randn_like(out)
    theirs = torch.autograd.grad(again, leaves, dout)
    for operation, mask in ((fa3._flash_attn_backward, "is_causal"), (OPS.bwd, "is_causal")):
        gradients = [torch.full_like(x, 7.0) for x in (q, k, v)]
        lengths = (cu, cu, used, used, 27, 27)
        args = (*lengths, *gradients) if operation is not OPS.bwd else (*gradients, *lengths)
        softmax_d = operation(dout, q, k, v, out, lse, *args, **{mask: causal}, **named)
        softmax_d = softmax_d if isinstance(softmax_d, Tensor) else softmax_d[0]
        assert softmax_d.shape == lse.shape
        for name, ours, grad in zip("qkv", gradients, theirs):
            assert_within(f"d{name}", ours, grad, 1e-2)


def test_opcheck(device):
    q, k, v = (torch.randn(2, 10, h, D, device=device).bfloat16() for h in (4, 2, 2))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    opcheck(OPS.fwd.default, tuple(leaves), {"is_causal": True, "attention_chunk": 4})
    out, lse, *_ = OPS.fwd(q, k, v, attention_chunk=4)
    gradients = [torch.empty_like(x) for x in (q, k, v)]
    opcheck(OPS.bwd.default, (out, q, k, v, out, lse, *gradients), {"attention_chunk": 4})
    table = torch.rand(10, 8, device=device)
    opcheck(
        OPS.fwd.default, (q[:, :1], k, v),
        {"k_new": k[:, :1].clone(), "v_new": v[:, :1].clone(), "seqused_k": ints(device, [3, 9]),
         "rotary_cos": table, "rotary_sin": table, "seqlens_rotary": ints(device, [1, 2]),
         "attention_chunk": 4},
    )  # fmt: skip


def test_without_data():
    with FakeTensorMode():
        q = torch.empty(2, 9, 4, D, dtype=BF16)
        cu, lengths = torch.empty(3, dtype=torch.int32), torch.empty(2, dtype=torch.int32)
        for rows in (q, q[:, :1]):
            assert OPS.fwd(rows, q, q, attention_chunk=4)[0].shape == rows.shape
            cached = OPS.fwd(rows, q, q, seqused_k=lengths, attention_chunk=4)
            assert cached[0].shape == rows.shape
        rows = q.flatten(0, 1)
        more = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "seqused_k": lengths}
        assert OPS.fwd(rows, rows, rows, **more, attention_chunk=4)[1].shape == (4, 18)


@pytest.mark.parametrize("name", ["dense", "varlen", "cache", "step"])
def test_compiled(name, device):
    cu = ends(device, [4, 16])
    call = {
        "dense": lambda q, k, v: fa3.flash_attn_func(q, k, v, causal=True, attention_chunk=4),
        "varlen": lambda q, k, v: fa3.flash_attn_varlen_func(
            q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), cu, cu, 16, 16,
            ints(device, [2, 16]), causal=True, attention_chunk=4,
        ),
        "cache": lambda q, k, v: fa3.flash_attn_with_kvcache(
            q, k, v, cache_seqlens=cu[1:] // 2, causal=True, attention_chunk=4
        ),
        "step": lambda q, k, v: fa3.flash_attn_with_kvcache(
            q[:, :1], k, v, cache_seqlens=cu[1:] // 2, causal=True, attention_chunk=4
        ),
    }[name]  # fmt: skip
    grad = name in ("dense", "varlen")
    q, k, v = (torch.randn(2, 10, h, D, device=device).bfloat16() for h in (4, 2, 2))
    leaves = [x.requires_grad_(grad) for x in (q, k, v)]
    results = []
    for function in (call, torch.compile(call, backend="aot_eager", fullgraph=True)):
        out = function(*leaves)
        results.append([out, *torch.autograd.grad(out.sum(), leaves)] if grad else [out])
    torch._dynamo.reset()
    for ours, theirs in zip(*results):
        assert_within("result", ours, theirs, 1e-2)


# --- Caches ---------------------------------------------------------------------------------------


def cached(case: CacheCase, x, **more):
    extra = {n: t for n, t in x.extra.items() if n != "block_table"}
    extra |= {"page_table": x.extra.get("block_table")}
    return fa3.flash_attn_with_kvcache(
        x.q, x.k_cache, x.v_cache, x.k, x.v, causal=case.causal, window_size=case.window,
        cache_seqlens=ints(x.q.device, case.cache_seqlens), softcap=case.softcap,
        rotary_interleaved=case.interleaved, return_softmax_lse=True, **extra | more,
    )  # fmt: skip


CACHES = [
    CacheCase("step"),
    CacheCase("step_append", new=1, rotary_dim=32, interleaved=False, sinks=True),
    CacheCase("step_pages", new=1, page_size=16, cache_seqlens=(37, -1, 0)),
    CacheCase("step_leftpad", leftpad=(30, 5, 0), batch_idx=True, alibi="bh"),
    CacheCase("step_not_causal", causal=False, window=(3, -1)),
    CacheCase("rows", sq=5),
    CacheCase("rows_append", sq=5, new=5, rotary_dim=32, cache_seqlens=(37, -1, 3)),
    CacheCase("rows_pages", sq=20, new=20, page_size=16, rotary_dim=64, interleaved=False),
    CacheCase("rows_odd_pages", sq=20, new=20, page_size=5, alibi="bh", sinks=True),
    CacheCase("rows_leftpad_pages", sq=4, page_size=16, leftpad=(30, 5, 0)),
    CacheCase("rows_leftpad", sq=4, new=4, leftpad=(30, 5, 0), batch_idx=True),
    CacheCase("rows_not_causal", sq=9, causal=False),
    CacheCase("rows_window", sq=9, new=2, causal=False, window=(7, 3), page_size=16),
    CacheCase("rows_longer_than_keys", sq=9, causal=False, cache_seqlens=(0, 4, 8)),
]


@pytest.mark.parametrize("chunk", [1, 6, 16, 48, 1000])
@pytest.mark.parametrize("case", CACHES, ids=lambda case: case.name)
def test_cache(case, chunk, device):
    x = make_cache(case, device)
    before = x.clone()
    ref, std = (expected(case, before, partial(f, chunk=chunk)) for f in REFERENCES)
    out, lse = cached(case, x, attention_chunk=chunk)
    assert_accurate("out", out, ref.out, std.out)
    assert_lse("lse", lse, ref.lse)
    for name in ("k_cache", "v_cache"):
        ours, old, new = (getattr(of, name) for of in (x, before, ref))
        assert_bitwise(f"{name}, old rows", ours[~ref.touched], old[~ref.touched])
        torch.testing.assert_close(ours[ref.touched], new[ref.touched])


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("length", [37, torch.tensor(37), None])
def test_one_length_for_all(rows, length, device):
    q, k, v = tensors(device, (2, rows, HEADS, D), *[(2, 40, HEADS_K, D)] * 2)
    out = fa3.flash_attn_with_kvcache(
        q, k, v, cache_seqlens=length, causal=True, attention_chunk=6
    )  # fmt: skip
    keys = [x[:, : 40 if length is None else 37] for x in (k, v)]
    ref, std = (f(q, *keys, chunk=6, causal=True)[0] for f in REFERENCES)
    assert_accurate("out", out, ref, std)


@pytest.mark.parametrize("case", [CACHES[0], CACHES[7], CACHES[8]], ids=lambda case: case.name)
@pytest.mark.parametrize("chunk", [3, 16])
def test_packed_rows_of_a_cache(case, chunk, device):
    """As serving engines call it, with the rows of dense calls."""
    x = make_cache(case, device)
    dense = cached(case, x.clone(), attention_chunk=chunk)
    rows = ends(device, [case.sq] * case.b)
    packed = replace(x, q=x.q.flatten(0, 1))
    more = {"cu_seqlens_q": rows, "max_seqlen_q": case.sq, "attention_chunk": chunk}
    if case.new:
        packed = replace(packed, k=x.k.flatten(0, 1), v=x.v.flatten(0, 1))
        more["cu_seqlens_k_new"] = rows
    out, lse = cached(case, packed, **more)
    assert_within("out", out.unflatten(0, x.q.shape[:2]), dense[0], 1e-2)
    assert_within("lse", lse.unflatten(1, x.q.shape[:2]).transpose(0, 1), dense[1], 1e-3)


def test_pages_by_the_varlen_function(device):
    k, v = tensors(device, *[(6, 16, HEADS_K, D)] * 2)
    table, lengths = ints(device, [[3, 0, -1], [2, -1, -1], [1, 5, 4]]), [20, 7, 48]
    (q,) = tensors(device, (21, HEADS, D))
    out = fa3.flash_attn_varlen_func(
        q, k, v, ends(device, [4, 7, 10]), None, 10, 48, seqused_k=ints(device, lengths),
        page_table=table, causal=True, attention_chunk=8,
    )  # fmt: skip
    for rows, pages, n in zip((q[:4], q[4:11], q[11:]), table, lengths):
        keys = [x[pages.clamp(min=0).long()].flatten(0, 1)[None, :n] for x in (k, v)]
        ref, std = (f(rows[None], *keys, chunk=8, causal=True)[0] for f in REFERENCES)
        mine, out = out[: len(rows)], out[len(rows) :]
        assert_accurate("out", mine[None], ref, std)


# --- rotary_seqlens -------------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("chunk", [0, 16])
def test_rotary_positions_of_their_own(packed, interleaved, causal, chunk, device):
    """The call is that of rows which were turned before it."""
    case = CacheCase("rows", sq=3, new=3, causal=causal, cache_seqlens=(37, -1, 3))
    table = CacheCase("rotary", rotary_dim=32)
    x, angles = make_cache(case, device), make_cache(table, device).extra
    starts = [5, -1, 90]

    def turned(rows: Tensor, each: bool) -> Tensor:
        step = torch.arange(3, device=device) * each
        tables = (angles["rotary_cos"], angles["rotary_sin"])
        one = (rotate(row, *tables, step + max(s, 0), interleaved) for row, s in zip(rows, starts))
        return poisoned(torch.stack(list(one)).to(rows.dtype))

    by_hand = replace(x.clone(), q=turned(x.q, causal), k=turned(x.k, True))
    reference = cached(case, by_hand, attention_chunk=chunk)
    more = {**angles, "rotary_seqlens": ints(device, starts), "attention_chunk": chunk}
    rows = x
    if packed:
        rows = replace(x, q=x.q.flatten(0, 1), k=x.k.flatten(0, 1), v=x.v.flatten(0, 1))
        more["cu_seqlens_q"] = more["cu_seqlens_k_new"] = ends(device, [3, 3, 3])
    out, lse = cached(replace(case, interleaved=interleaved), rows, **more)
    if packed:
        out, lse = out.unflatten(0, (3, 3)), lse.unflatten(1, (3, 3)).transpose(0, 1)
    assert_within("out", out, reference[0], 2e-2)
    assert_within("lse", lse, reference[1], 2e-2)
    torch.testing.assert_close(x.k_cache, by_hand.k_cache, equal_nan=True, rtol=2e-2, atol=1e-2)


BAD_POSITIONS = {
    "rotary_seqlens: got one without": {"rotary_cos": None, "rotary_sin": None},
    r"rotary_seqlens: got shape \(2,\)": {"rotary_seqlens": ints("cpu", [1, 2])},
    "rotary_seqlens: got dtype": {"rotary_seqlens": torch.ones(3)},
    r"rotary_seqlens: got \[-2, 0, 0\]": {"rotary_seqlens": ints("cpu", [-2, 0, 0])},
    "cos: got 700 positions": {"rotary_seqlens": ints("cpu", [0, 0, 700])},
    "rotary_sin: got None": {"rotary_sin": None},
    "rotary_cos: got a table without k": {"k": None, "v": None},
}


@pytest.mark.parametrize("said", BAD_POSITIONS)
@pytest.mark.parametrize("packed", [False, True])
def test_bad_rotary_positions(said, packed):
    case = CacheCase("rotary", new=1, rotary_dim=32)
    x = make_cache(case, "cpu")
    before = x.clone()
    more = dict(BAD_POSITIONS[said])
    x = replace(x, **{name: more.pop(name) for name in ("k", "v") if name in more})
    if packed and x.k is not None:
        x = replace(x, q=x.q.flatten(0, 1), k=x.k.flatten(0, 1), v=x.v.flatten(0, 1))
        more["cu_seqlens_q"] = more["cu_seqlens_k_new"] = ends("cpu", [1, 1, 1])
    with pytest.raises(ValueError, match=said):
        cached(case, x, **{"rotary_seqlens": ints("cpu", [0, 1, 2]), **more})
    assert_bitwise("k_cache", x.k_cache, before.k_cache)
