"""The table of promised semantics, a test per row, named after it.

Most rows use q = 0 and one-hot values: every visible key then weighs the same, and the output *is*
the row of probabilities, so the expectation is a line of plain Python and not the reference.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from cases import BF16, FP16, FP32, FP64, Case, make_inputs, poisoned
from compare import assert_accurate, assert_bitwise, assert_lse, assert_within
from packed_cases import LENGTHS, pack
from reference import attention_ref, standard_attention

from flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache

NAN, INF = float("nan"), float("inf")


def uniform(seqlen_q: int, seqlen_k: int, device, dim: int = 64):
    """q, k, v (1, s, 1, dim): zero logits, and value j is the unit vector j."""
    assert seqlen_k <= dim
    q = torch.zeros(1, seqlen_q, 1, dim, dtype=BF16, device=device)
    k = torch.ones(1, seqlen_k, 1, dim, dtype=BF16, device=device)
    v = torch.eye(dim, dtype=BF16, device=device)[None, :seqlen_k, None]
    return q, k, v


def check_visible(out, lse, seqlen_q: int, seqlen_k: int, visible) -> None:
    """out (1, sq, 1, dim) gives equal weight to exactly the keys with visible(i, j)."""
    for i in range(seqlen_q):
        seen = [j for j in range(seqlen_k) if visible(i, j)]
        row = out[0, i, 0].float().cpu()
        assert row.nonzero().flatten().tolist() == seen, f"row {i}"
        if seen:
            torch.testing.assert_close(row[seen], torch.full((len(seen),), 1 / len(seen)).bfloat16()
                                       .float(), atol=0, rtol=2**-7)  # fmt: skip
            expected = torch.tensor(float(len(seen))).log()
            torch.testing.assert_close(lse[0, 0, i].cpu(), expected, atol=1e-3, rtol=0)
        else:
            assert lse[0, 0, i] == -INF


@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k"), [(5, 5), (5, 9), (9, 5), (1, 7), (7, 1), (70, 40), (2, 2), (2, 64)]
)
def test_causal_is_aligned_to_the_bottom_right_corner(seqlen_q, seqlen_k, device):
    out, lse = flash_attn_func(*uniform(seqlen_q, seqlen_k, device), causal=True, return_lse=True)
    check_visible(out, lse, seqlen_q, seqlen_k, lambda i, j: j <= i + seqlen_k - seqlen_q)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [(0, 0), (2, 1), (-1, 3), (3, -1), (0, 40), (1000, 1000)])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(6, 6), (5, 12), (12, 5), (70, 40), (2, 64)])
def test_window(seqlen_q, seqlen_k, window, causal, device):
    out, lse = flash_attn_func(
        *uniform(seqlen_q, seqlen_k, device), causal=causal, window_size=window, return_lse=True
    )
    left = INF if window[0] < 0 else window[0]
    right = 0 if causal else INF if window[1] < 0 else window[1]

    def visible(i, j):
        middle = i + seqlen_k - seqlen_q
        return middle - left <= j <= middle + right

    check_visible(out, lse, seqlen_q, seqlen_k, visible)


def gradients_are_zero_for(q, k, v, rows: slice, needs, **kwargs) -> None:
    """Whatever reaches `rows` of the output, no gradient becomes NaN, and those of q are 0."""
    with needs("backward"):
        for through_lse in (False, True):
            leaves = [t.detach().clone().requires_grad_() for t in (q, k, v)]
            out, lse = flash_attn_func(*leaves, **kwargs, return_lse=True)
            loss = out.float().sum()
            if through_lse:
                loss = loss + torch.nan_to_num(lse, neginf=0.0).sum()
            loss.backward()
            for leaf in leaves:
                assert torch.isfinite(leaf.grad).all()
            assert not leaves[0].grad[:, rows].any()


@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_fully_masked_row(softcap, device, needs):
    case = Case(sq=90, sk=30, causal=True, softcap=softcap)  # rows 0 to 59 see nothing
    x = make_inputs(case, device)
    run = {"causal": True, "softcap": softcap}
    with needs(*case.features):
        out, lse = flash_attn_func(x.q, x.k, x.v, **run, return_lse=True)
        assert not out[:, :60].any()
        assert (lse[:, :, :60] == -INF).all()
        assert torch.isfinite(lse[:, :, 60:]).all()
        gradients_are_zero_for(x.q, x.k, x.v, slice(0, 60), needs, **run)


def test_window_that_masks_everything(device, needs):
    """The window lies left of the first key for every query."""
    x = make_inputs(Case(sq=64, sk=3, window=(-1, 0)), device)
    out, lse = flash_attn_func(x.q[:, :50], x.k, x.v, window_size=(-1, 0), return_lse=True)
    assert not out[:, :47].any()
    assert (lse[:, :, :47] == -INF).all()
    gradients_are_zero_for(x.q, x.k, x.v, slice(0, 60), needs, window_size=(-1, 0))


@pytest.mark.parametrize("causal", [False, True])
def test_no_keys(causal, device, needs):
    x = make_inputs(Case(sk=0, layout="contiguous"), device)
    out, lse = flash_attn_func(x.q, x.k, x.v, causal=causal, return_lse=True)
    assert not out.any()
    assert (lse == -INF).all()
    gradients_are_zero_for(x.q, x.k, x.v, slice(None), needs, causal=causal)


@pytest.mark.parametrize("shape", [{"b": 0}, {"sq": 0}, {"b": 0, "sq": 0, "sk": 0}], ids=str)
def test_no_batch_or_no_queries(shape, device, needs):
    case = Case(layout="contiguous", **shape)
    x = make_inputs(case, device)
    out, lse = flash_attn_func(x.q, x.k, x.v, return_lse=True)
    assert out.shape == (case.b, case.sq, case.h, case.d)
    assert lse.shape == (case.b, case.h, case.sq)
    gradients_are_zero_for(x.q, x.k, x.v, slice(None), needs)


def test_zero_length_sequences_anywhere(device, needs):
    """Keys of a sequence without queries get gradient 0, queries without keys output 0."""
    x = pack(Case(), ([0, 20, 0, 7, 0], [0, 20, 9, 0, 0]), device)
    leaves = [t.detach().requires_grad_() for t in (x.q, x.k, x.v)]
    out, lse = flash_attn_varlen_func(*leaves, **x.lengths, return_lse=True)
    assert torch.isfinite(out[:20]).all()
    assert out[:20].any()
    assert not out[20:27].any()
    assert (lse[:, 20:27] == -INF).all()
    with needs("backward"):
        out[:27].float().sum().backward()
        q, k, v = (leaf.grad for leaf in leaves)
        assert not q[20:].any()
        assert not k[20:].any()
        assert not v[20:].any()
        assert v[:20].any()


@pytest.mark.parametrize("poison", [NAN, INF])
def test_rows_past_the_last_sequence(poison, device, needs):
    x = pack(Case(causal=True), LENGTHS["mixed"], device, spare=70)
    total = x.cu_q[-1]
    for t in (x.q, x.k, x.v, x.dout):
        t[total:] = poison
    leaves = [t.detach().requires_grad_() for t in (x.q, x.k, x.v)]
    out = flash_attn_varlen_func(*leaves, **x.lengths, causal=True)
    assert torch.isfinite(out).all()
    assert not out[total:].any()
    with needs("backward"):
        out.backward(x.dout)
        for leaf in leaves:
            assert torch.isfinite(leaf.grad).all()
            assert not leaf.grad[total:].any()
            assert leaf.grad[:total].any()


@pytest.mark.parametrize("poison", [NAN, INF])
@pytest.mark.parametrize("causal", [False, True])
def test_cache_past_cache_seqlens(causal, poison, device, needs):
    q = torch.randn(2, 3, 4, 64, device=device).to(FP16)
    k = torch.randn(2, 90, 2, 64, device=device).to(FP16)
    v = torch.randn(2, 90, 2, 64, device=device).to(FP16)
    lengths = torch.tensor([90, 41], dtype=torch.int32, device=device)
    with needs("kvcache"):
        clean = flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, causal=causal)
        k[1, 41:] = v[1, 41:] = poison
        dirty = flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, causal=causal)
        assert_bitwise("out", dirty, clean)


def test_softcap_comes_after_the_scale_and_before_masks(device, needs):
    """One query, two visible keys with known logits."""
    q = torch.zeros(1, 1, 1, 8, device=device).to(BF16)
    k = torch.zeros(1, 2, 1, 8, device=device).to(BF16)
    v = torch.zeros(1, 2, 1, 8, device=device).to(BF16)
    q[..., 0], k[:, 0, :, 0], v[:, 0, :, 0] = 4.0, 2.0, 1.0
    with needs("softcap"):
        out, lse = flash_attn_func(q, k, v, softmax_scale=0.5, softcap=3.0, return_lse=True)
        logit = 3.0 * torch.tanh(torch.tensor(4.0 * 2.0 * 0.5 / 3.0)).item()
        total = torch.tensor(logit).exp().item() + 1
        assert_within("out", out[0, 0, 0, :1].cpu(), torch.tensor([1 - 1 / total]), 4e-3)
        assert_within("lse", lse[0, 0].cpu(), torch.tensor([total]).log(), 1e-3)
        # A masked key stays masked: softcap must not turn -inf into -3.
        out = flash_attn_func(q, k, v, softcap=3.0, window_size=(0, 0))
        assert not out.any()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(5, 9), (9, 5), (7, 7)])
def test_alibi(seqlen_q, seqlen_k, causal, device, needs):
    slope = 0.25
    q, k, v = uniform(seqlen_q, seqlen_k, device)
    with needs("alibi"):
        out = flash_attn_func(
            q, k, v, causal=causal, alibi_slopes=torch.tensor([slope], device=device)
        )
        for i in range(seqlen_q):
            middle = i + seqlen_k - seqlen_q
            seen = range(min(middle + 1, seqlen_k) if causal else seqlen_k)
            weights = torch.tensor([-slope * abs(middle - j) for j in seen]).exp()
            expected = torch.zeros(64)
            if len(weights):
                expected[: len(weights)] = weights / weights.sum()
            assert_within(f"row {i}", out[0, i, 0].float().cpu(), expected, 4e-3)


def test_kept_entries_scale_by_one_over_one_minus_p(device, needs):
    q, k, v = uniform(64, 64, device)
    with needs("dropout", "attn_probs"):
        out, _, probs = flash_attn_func(q, k, v, dropout_p=0.5, return_attn_probs=True)
        kept = ~torch.signbit(probs[0, 0])
        assert 0.3 < kept.float().mean() < 0.7
        expected = kept.float() / 64 / 0.5
        assert_within("out", out[0, :, 0].float(), expected, 2e-4)


DETERMINISTIC = [
    Case(sq=150, sk=200, h=6, hk=2, d=d, causal=causal, window=window, dropout_p=p)
    for d in (32, 64, 96, 128, 192, 256)
    for causal, window, p in [(True, (-1, -1), 0.0), (False, (40, 20), 0.2)]
]


def check_repeats(x, attend) -> None:
    """Three times the same gradients of ``attend(q, k, v)``, bit for bit."""
    runs = []
    for _ in range(3):
        torch.manual_seed(1)
        leaves = [t.detach().requires_grad_() for t in (x.q, x.k, x.v)]
        runs.append(torch.autograd.grad(attend(*leaves), leaves, x.dout))
    for again in runs[1:]:
        for name, now, first in zip(("dq", "dk", "dv"), again, runs[0], strict=True):
            assert_bitwise(name, now, first)


@pytest.mark.parametrize("case", DETERMINISTIC, ids=str)
def test_deterministic_backward(case, device, needs):
    if device == "cpu":  # thread blocks take turns there: a group of heads meets all that many do
        case = replace(case, b=1, h=2, hk=1)
    x = make_inputs(case, device)
    options = case.mask_kwargs() | {"dropout_p": case.dropout_p, "deterministic": True}
    with needs("backward", *case.features):
        check_repeats(x, partial(flash_attn_func, **options))


@pytest.mark.parametrize("lengths", ["mixed", "keys_longer", "zeros"])
def test_deterministic_varlen_backward(lengths, device, needs):
    x = pack(Case(h=6, hk=2), LENGTHS[lengths], device)
    options = x.lengths | {"causal": True, "deterministic": True}
    with needs("backward"):
        check_repeats(x, partial(flash_attn_varlen_func, **options))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("seqlen_q", [1, 70])
@pytest.mark.parametrize(("seqlen_k", "heads_k"), [(700, 2), (1100, 1)])
def test_batch_invariance(seqlen_q, seqlen_k, heads_k, causal, device, needs):
    """Also where the keys of a sequence alone would be cut."""
    case = Case(b=5, sq=seqlen_q, sk=seqlen_k, h=6, hk=heads_k, causal=causal)
    x = make_inputs(case, device)
    run = {"causal": causal, "batch_invariant": True, "return_lse": True}
    with needs("batch_invariant"):
        out, lse = flash_attn_func(x.q, x.k, x.v, **run)
        # On the host, where it takes long, two: of equal lengths, those between are as the last.
        for b in range(case.b) if device == "cuda" else (0, case.b - 1):
            part = slice(b, b + 1)
            alone, lse_alone = flash_attn_func(x.q[part], x.k[part], x.v[part], **run)
            assert_bitwise(f"out[{b}]", alone, out[part])
            assert_bitwise(f"lse[{b}]", lse_alone, lse[part])


def test_batch_invariance_of_packed_sequences(device, needs):
    x = pack(Case(), LENGTHS["keys_longer"], device)
    run = {"causal": True, "batch_invariant": True}
    with needs("batch_invariant"):
        out = flash_attn_varlen_func(x.q, x.k, x.v, **x.lengths, **run)
        for b in range(len(x.cu_q) - 1):
            rows, keys = slice(*x.cu_q[b : b + 2]), slice(*x.cu_k[b : b + 2])
            seqlen_q, seqlen_k = rows.stop - rows.start, keys.stop - keys.start
            cu_q = torch.tensor([0, seqlen_q], dtype=torch.int32, device=device)
            cu_k = torch.tensor([0, seqlen_k], dtype=torch.int32, device=device)
            alone = flash_attn_varlen_func(
                x.q[rows], x.k[keys], x.v[keys], cu_q, cu_k, seqlen_q, seqlen_k, **run
            )
            assert_bitwise(f"sequence {b}", alone, out[rows])


def test_batch_invariance_of_sequences_in_pages(device, needs):
    """Alone, beside others of few queries, and beside long ones."""
    x = pack(Case(), ([1, 40, 3, 0, 16, 129], [100, 50, 33, 41, 700, 200]), device, spare=0)
    pages = -(-x.cu_k[-1] // 8) + 6
    k, v = (x.k.new_zeros(pages, 8, *x.k.shape[1:]) for _ in "kv")
    table = torch.zeros(6, 88, dtype=torch.int32, device=device)
    used = 0
    for b in range(6):
        keys = slice(*x.cu_k[b : b + 2])
        count = -(-(keys.stop - keys.start) // 8)
        table[b, :count] = torch.arange(used, used + count)
        for held, packed in ((k, x.k), (v, x.v)):
            rows = held[used : used + count].flatten(0, 1)[: keys.stop - keys.start]
            rows.copy_(packed[keys])
        used += count

    def run(sequences: list[int]) -> list[torch.Tensor]:
        rows = [slice(*x.cu_q[b : b + 2]) for b in sequences]
        counts = [r.stop - r.start for r in rows]
        keys = [x.cu_k[b + 1] - x.cu_k[b] for b in sequences]
        cu_q, cu_k = (
            torch.tensor([0, *n], dtype=torch.int32, device=device).cumsum(0, dtype=torch.int32)
            for n in (counts, keys)
        )
        out = flash_attn_varlen_func(
            torch.cat([x.q[r] for r in rows]), k, v, cu_q, cu_k, max(counts), max(keys),
            causal=True, block_table=table[sequences], batch_invariant=True,
        )  # fmt: skip
        return list(out.split(counts))

    with needs("batch_invariant", "paged"):
        together = run(list(range(6)))
        for sequences in ([0], [1], [4], [5], [0, 2], [2, 4], [0, 2, 3, 4], [0, 1, 2]):
            for b, out in zip(sequences, run(sequences), strict=True):
                assert_bitwise(f"sequence {b} of {sequences}", out, together[b])


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_positions(interleaved, device, needs):
    """A rotation by 180 degrees per position: whatever sits at an odd position changes sign.

    Two cached keys of zeros, then new keys of ones and twos at positions 2 and 3; the queries of
    ones sit there too if causal, else both at position 2.
    """
    d = 8
    position = torch.arange(10, device=device)
    cos = (1 - 2 * (position % 2))[:, None].repeat(1, d // 2).to(BF16)
    sin = torch.zeros_like(cos)
    q = torch.ones(1, 2, 1, d, dtype=BF16, device=device)
    new = q * torch.tensor([1.0, 2.0], dtype=BF16, device=device)[:, None, None]
    with needs("kvcache"):
        for causal, logits in [
            (True, [[0.0, 0.0, 8.0], [0.0, 0.0, -8.0, 16.0]]),
            (False, [[0.0, 0.0, 8.0, -16.0]] * 2),
        ]:
            k_cache = torch.zeros(1, 6, 1, d, dtype=BF16, device=device)
            v_cache = torch.zeros_like(k_cache)
            _, lse = flash_attn_with_kvcache(
                q,
                k_cache,
                v_cache,
                new,
                new,
                cos,
                sin,
                cache_seqlens=2,
                causal=causal,
                softmax_scale=1.0,
                rotary_interleaved=interleaved,
                return_softmax_lse=True,
            )
            assert (k_cache[0, 2] == 1).all()
            assert (k_cache[0, 3] == -2).all()
            assert_bitwise("v is not rotated", v_cache[:, 2:4], new)
            expected = torch.stack([torch.tensor(row).logsumexp(0) for row in logits])
            assert_within("lse", lse[0, 0].cpu(), expected, 1e-3)


@pytest.mark.parametrize("page_size", [0, 4])
def test_append_with_padding_of_a_captured_graph(page_size, device, needs):
    """cache_seqlens = -1 and pages of -1 neither read nor write."""
    rows = page_size or 16
    k_cache = torch.full((4, rows, 1, 64), 3.0, dtype=BF16, device=device)
    v_cache = torch.full_like(k_cache, 5.0)
    q = torch.randn(2, 1, 1, 64, device=device).to(BF16)
    new = torch.randn(2, 1, 1, 64, device=device).to(BF16)
    lengths = torch.tensor([-1, 2], dtype=torch.int32, device=device)
    table = torch.tensor([[-1, -1], [2, -1]], dtype=torch.int32, device=device)
    with needs("kvcache"):
        out, lse = flash_attn_with_kvcache(
            q, *((k_cache, v_cache) if page_size else (k_cache[1:3], v_cache[1:3])), new, new,
            cache_seqlens=lengths, block_table=table if page_size else None,
            return_softmax_lse=True,
        )  # fmt: skip
        assert not out[0].any()
        assert (lse[0] == -INF).all()
        assert torch.isfinite(out[1]).all()
        changed_k, changed_v = k_cache != 3.0, v_cache != 5.0
        assert (changed_k.nonzero()[:, :2].unique(dim=0) == torch.tensor([2, 2]).to(device)).all()
        assert (changed_v.nonzero()[:, :2].unique(dim=0) == torch.tensor([2, 2]).to(device)).all()


def test_shapes_and_dtypes_of_lse(device, needs):
    for dtype in (BF16, FP16, FP32, FP64):
        case = Case(dtype=dtype, sq=20, sk=30)
        x = make_inputs(case, device)
        with needs(*case.features):
            _, lse = flash_attn_func(x.q, x.k, x.v, return_lse=True)
            assert lse.shape == (case.b, case.h, case.sq)
            assert lse.dtype == (FP64 if dtype == FP64 else FP32)
            assert lse.is_contiguous()
    x = pack(Case(), LENGTHS["mixed"], device, spare=0)
    _, lse = flash_attn_varlen_func(x.q, x.k, x.v, **x.lengths, return_lse=True)
    assert lse.shape == (4, x.cu_q[-1])
    assert lse.dtype == FP32
    assert lse.is_contiguous()


def test_accumulation_is_float32(device):
    """2048 equal weights: a half-precision sum of them would stop growing at 256 x the step."""
    seqlen = 2048
    q = torch.zeros(1, 1, 1, 64, dtype=BF16, device=device)
    k = torch.ones(1, seqlen, 1, 64, dtype=BF16, device=device)
    v = torch.ones(1, seqlen, 1, 64, dtype=BF16, device=device)
    out, lse = flash_attn_func(q, k, v, return_lse=True)
    assert_within("out", out.float(), torch.ones_like(out.float()), 0.0)
    assert_lse("lse", lse, torch.full_like(lse, float(torch.tensor(2048.0).log())))


@pytest.mark.many_blocks
@pytest.mark.parametrize("last", [{"b": 1500, "h": 2, "hk": 1}, {"b": 1, "h": 3000, "hk": 1000}])
def test_many_batches_or_heads(last, device):
    case = Case(sq=3, sk=5, d=16, causal=True, layout="contiguous", **last)
    x = make_inputs(case, device)
    out = flash_attn_func(x.q, x.k, x.v, causal=True)
    ref, _, _ = attention_ref(x.q, x.k, x.v, causal=True)
    std, _, _ = standard_attention(x.q, x.k, x.v, causal=True)
    assert_accurate("out", out, ref, std)


@pytest.mark.many_blocks
def test_many_packed_sequences(device):
    x = pack(Case(h=2, hk=1, d=16), ([1, 3] * 400, [2, 0] * 400), device)
    out = flash_attn_varlen_func(x.q, x.k, x.v, **x.lengths)
    for b in (0, 1, 398, 399, 798, 799):
        rows, keys = slice(*x.cu_q[b : b + 2]), slice(*x.cu_k[b : b + 2])
        args = x.q[None, rows], x.k[None, keys], x.v[None, keys]
        ref, std = attention_ref(*args)[0], standard_attention(*args)[0]
        assert_accurate(f"sequence {b}", out[None, rows], ref, std)


def test_strides_of_every_leading_dimension(device):
    """Batch, sequence and head strides in any order, negative space between rows, NaN around."""
    storage = poisoned(torch.randn(4, 50, 3, 64, device=device).to(BF16))  # as (h, s, b, d)
    q = storage.permute(2, 1, 0, 3)
    k, v = poisoned(q[:, ::2]), poisoned(q[:, 1::2])
    out = flash_attn_func(q, k[:, ::2], v[:, ::2])
    ref, _, _ = attention_ref(q, k[:, ::2], v[:, ::2])
    std, _, _ = standard_attention(q, k[:, ::2], v[:, ::2])
    assert_accurate("out", out, ref, std)
