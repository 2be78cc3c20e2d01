"""The public functions under FA3's names: results, log-sum-exp and gradients against float64."""

from __future__ import annotations

from functools import partial
from itertools import accumulate

import pytest
import torch
from calls import check_gradients
from cases import BF16, FP16, poisoned
from compare import assert_accurate, assert_bitwise, assert_lse
from reference import attention_ref, standard_attention
from torch import Tensor

import flash_attn
import flash_attn_interface as fa3

HEADS, HEADS_K = 4, 2
SLOTS_Q, USED_Q = [9, 40, 1, 20, 3], [9, 17, 0, 20, 1]
SLOTS_K, USED_K = [70, 40, 5, 33, 8], [65, 40, 5, 2, 0]


def tensors(device: str, *shapes: tuple[int, ...], dtype=BF16) -> list[Tensor]:
    return [poisoned(torch.randn(shape).to(dtype).to(device)) for shape in shapes]


def ints(device: str, values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def ends(device: str, lengths: list[int]) -> Tensor:
    return ints(device, [0, *accumulate(lengths)])


# --- Dense ----------------------------------------------------------------------------------------

OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window_size": (12, 3)},
    "scale_and_cap": {"softmax_scale": 0.3, "softcap": 4.0, "causal": True},
}


def dense(function, q, k, v, s_aux=None, **options):
    if s_aux is not None:
        options["s_aux"] = s_aux
    return function(q, k, v, **options)[:2]


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("sinks", [None, "s_aux", "learnable_sink", "sinks"])
def test_dense(name, sinks, device):
    if sinks not in (None, "s_aux") and name != "causal":
        pytest.skip("a name of the same argument: once is enough")
    q, k, v, dout = tensors(
        device, (2, 33, HEADS, 32), (2, 50, HEADS_K, 32), (2, 50, HEADS_K, 32), (2, 33, HEADS, 32)
    )
    inputs = {"q": q, "k": k, "v": v}
    if sinks is not None:
        inputs["s_aux"] = torch.randn(HEADS, device=device)

    def ours(q, k, v, s_aux=None):
        more = {} if sinks is None else {sinks: s_aux}
        return fa3.flash_attn_func(q, k, v, **OPTIONS[name], **more, return_attn_probs=True)

    dlse = torch.randn(2, HEADS, 33, device=device)
    reference = [partial(dense, f, **OPTIONS[name]) for f in (attention_ref, standard_attention)]
    check_gradients(ours, *reference, inputs, dout, dlse)


def test_returns_the_output_alone(device):
    q, k, v = tensors(device, *[(1, 5, 2, 32)] * 3)
    out = fa3.flash_attn_func(q, k, v)
    assert isinstance(out, Tensor)
    both = fa3.flash_attn_func(q, k, v, return_attn_probs=True)
    assert len(both) == 2
    assert_bitwise("out", out, both[0])


def test_into_a_strided_buffer(device):
    q, k, v = tensors(device, *[(2, 5, 2, 32)] * 3)
    expected = fa3.flash_attn_func(q, k, v)
    buffer = torch.full((2, 2, 5, 32), 7.0, dtype=BF16, device=device).transpose(1, 2)
    out = fa3.flash_attn_func(q, k, v, out=buffer)
    assert out is buffer
    assert_bitwise("out", buffer, expected)
    with pytest.raises(ValueError, match=r"out: got torch.bfloat16 of shape \(2, 2, 5, 32\)"):
        fa3.flash_attn_func(q, k, v, out=buffer.transpose(1, 2))


def test_dropout_and_alibi_are_ours(device):
    q, k, v = tensors(device, *[(2, 40, HEADS, 32)] * 3)
    slopes = torch.rand(2, HEADS, device=device)
    torch.manual_seed(5)
    expected = flash_attn.flash_attn_func(q, k, v, dropout_p=0.5, alibi_slopes=slopes)
    torch.manual_seed(5)
    out = fa3.flash_attn_func(q, k, v, dropout_p=0.5, alibi_slopes=slopes)
    assert_bitwise("out", out, expected)


@pytest.mark.parametrize("grouped", [False, True])
def test_qkvpacked(grouped, device):
    """(b, s, 3, h, d), or heads of q, k and v in a row."""
    heads_k = HEADS_K if grouped else HEADS
    shape = (2, 20, HEADS + 2 * heads_k, 32) if grouped else (2, 20, 3, HEADS, 32)
    qkv, dout = tensors(device, shape, (2, 20, HEADS, 32))

    def split(function, qkv, **options):
        parts = qkv.split([HEADS, heads_k, heads_k], 2) if grouped else qkv.unbind(2)
        return function(*parts, causal=True, **options)[:2]

    def ours(qkv):
        heads = {"num_heads_q": HEADS} if grouped else {}
        return fa3.flash_attn_qkvpacked_func(qkv, causal=True, return_attn_probs=True, **heads)

    check_gradients(
        ours, partial(split, attention_ref), partial(split, standard_attention), {"qkv": qkv}, dout
    )


@pytest.mark.parametrize(("heads", "said"), [(8, "with num_heads_q=8"), (3, "num_heads_q=3")])
def test_qkvpacked_of_heads_that_do_not_fit(heads, said):
    with pytest.raises(ValueError, match=said):
        fa3.flash_attn_qkvpacked_func(torch.randn(1, 4, 8, 16), num_heads_q=heads)


# --- Packed: rows that are not in use -------------------------------------------------------------


def written_out(attention, q, k, v, used_q, used_k, slopes=None, s_aux=None, **options):
    """One sequence at a time; 0 and -inf in the rows that are not in use."""
    out, lse = [], []
    for b, (rows, keys) in enumerate(
        zip(q.split(SLOTS_Q), zip(k.split(SLOTS_K), v.split(SLOTS_K)))
    ):
        n, m = used_q[b], used_k[b]
        more = {} if slopes is None else {"alibi_slopes": slopes[b]}
        part, part_lse, _ = attention(
            rows[None, :n], keys[0][None, :m], keys[1][None, :m], s_aux=s_aux, **more, **options
        )
        rest = SLOTS_Q[b] - n
        out += [part[0], part.new_zeros(rest, *part.shape[2:])]
        lse += [part_lse[0], part_lse.new_full((part_lse.shape[1], rest), float("-inf"))]
    return torch.cat(out), torch.cat(lse, -1)


VARLEN = {
    "all": {},
    "used_k": {"used_k": True},
    "used_q": {"used_q": True},
    "both": {"used_q": True, "used_k": True, "causal": True},
    "both_window_sinks": {"used_q": True, "used_k": True, "window_size": (9, 2), "sinks": True},
    "alibi": {"used_q": True, "alibi": True, "dtype": FP16},
}


@pytest.mark.parametrize("name", VARLEN)
@pytest.mark.parametrize("longest", ["slot", "used"])
def test_varlen(name, longest, device):
    options = dict(VARLEN[name])
    dtype, sinks = options.pop("dtype", BF16), options.pop("sinks", False)
    used_q, used_k = options.pop("used_q", False), options.pop("used_k", False)
    slopes = torch.rand(5, HEADS, device=device) if options.pop("alibi", False) else None
    q, k, v, dout = tensors(
        device,
        (73, HEADS, 32),
        (156, HEADS_K, 32),
        (156, HEADS_K, 32),
        (73, HEADS, 32),
        dtype=dtype,
    )
    rows, keys = USED_Q if used_q else SLOTS_Q, USED_K if used_k else SLOTS_K
    given = {"seqused_q": used_q, "seqused_k": used_k}
    given = {
        n: ints(device, rows if n == "seqused_q" else keys) if there else None
        for n, there in given.items()
    }
    most = max(rows if longest == "used" else SLOTS_Q), max(SLOTS_K)

    def ours(q, k, v, s_aux=None):
        return fa3.flash_attn_varlen_func(
            q, k, v, ends(device, SLOTS_Q), ends(device, SLOTS_K), *most, **given, **options,
            alibi_slopes=slopes, s_aux=s_aux, return_attn_probs=True,
        )  # fmt: skip

    inputs = {"q": q, "k": k, "v": v}
    if sinks:
        inputs["s_aux"] = torch.randn(HEADS, device=device)
    for x in (k, v):
        for sequence, n in zip(x.split(SLOTS_K), keys):
            sequence[n:] = float("nan")  # not read
    out, lse = ours(**inputs)
    unused = torch.cat([torch.arange(s) >= n for s, n in zip(SLOTS_Q, rows)]).to(device)
    assert not out[unused].any()
    if not sinks:
        assert torch.isneginf(lse[:, unused]).all()

    def used(function):
        """Of rows in use; what the others are is seen above."""

        def call(*args, **leaves):
            out, lse = function(*args, **leaves)
            return out[~unused], lse[:, ~unused].contiguous()

        return call

    def by_hand(attention):
        return used(
            lambda q, k, v, s_aux=None: written_out(
                attention, q, k, v, rows, keys, slopes, s_aux, **options
            )
        )

    dout = dout[~unused]
    dlse = torch.randn(HEADS, int((~unused).sum()), device=device)
    check_gradients(
        used(ours), by_hand(attention_ref), by_hand(standard_attention), inputs, dout, dlse
    )


@pytest.mark.parametrize("by", ["page_table", "block_table"])
@pytest.mark.parametrize("with_lengths", [False, True])
def test_varlen_in_pages(by, with_lengths, device):
    """As serving engines call it: seqused_k says how long, cu_seqlens_k may be None."""
    page, table = 16, ints(device, [[3, 0, -1], [2, -1, -1], [1, 5, 4]])
    k, v = tensors(device, *[(6, page, HEADS_K, 32)] * 2)
    lengths, rows = [20, 7, 48], [3, 7, 1]
    (q,) = tensors(device, (sum(rows), HEADS, 32))
    out, lse, *rest = fa3.flash_attn_varlen_func(
        q, k, v, ends(device, rows), ends(device, lengths) if with_lengths else None, 7, 48,
        seqused_k=ints(device, lengths), seqused_q=ints(device, [2, 7, 1]), causal=True,
        num_splits=0, return_attn_probs=True, **{by: table},
    )  # fmt: skip
    assert rest == []
    at = 0
    for b, (n, m) in enumerate(zip([2, 7, 1], lengths)):
        pages = table[b].clamp(min=0).long()
        keys = [x[pages].flatten(0, 1)[None, :m] for x in (k, v)]
        mine = q[None, at : at + n]
        (ref, ref_lse, _), (std, _, _) = (
            f(mine, *keys, causal=True) for f in (attention_ref, standard_attention)
        )
        assert_accurate("out", out[None, at : at + n], ref, std)
        assert_lse("lse", lse[None, :, at : at + n].contiguous(), ref_lse)
        at += rows[b]
    assert not out[2].any()


def test_rows_in_use_that_do_not_fit_are_noticed():
    x = torch.randn(6, 2, 8)
    cu = ends("cpu", [2, 4])
    for used in ([3, 4], [-1, 4]):
        with pytest.raises(ValueError, match=r"seqused_q: got \[.*\[2, 4\]"):
            fa3.flash_attn_varlen_func(x, x, x, cu, cu, 4, 4, seqused_q=ints("cpu", used))
    with pytest.raises(ValueError, match="seqused_q: got shape"):
        fa3.flash_attn_varlen_func(x, x, x, cu, cu, 4, 4, seqused_q=ints("cpu", [1]))
