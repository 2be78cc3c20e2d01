"""The GPU's backward kernels, run on the host, and the small kernels before and after them."""

from __future__ import annotations

from functools import lru_cache, partial

import pytest
import torch
from calls import ExpectedGradients, check_gradients, differentiable, written_out
from cases import OFFSET, SEED, Case, Inputs, make_inputs, poisoned, rng_state
from compare import assert_bitwise
from reference import attention_ref, random_slopes, standard_attention, varlen_ref
from reference_dropout import keep_mask

from . import calls
from .rows import DTYPES, TABLE, id_of

ROWS = [v for v in TABLE if v.direction == "bwd"]
# The two rows of a tile differ in the element type alone, so most tests run on one of them.
TILES = [v for v in ROWS if v.dtype == "bf16"]
PLAIN = [v for v in TILES if v.scores == "plain"]
FULL = [v for v in TILES if v.scores == "full"]
# d 64 has other numbers in either type: probabilities in units, dropped by their halves.
WITH_MODS = [
    v for v in ROWS
    if (v.arch, v.scores) == ("sm90", "full") and (v.dtype == "bf16" or v.head_dim == 64)
]  # fmt: skip


def one_of_each_kind(rows: list) -> list:
    """P and dS in registers or exchanged, one buffer or two for the rows."""
    kinds = {(v.warps == v.key_warps, v.stages): v for v in reversed(rows)}
    return list(kinds.values())


class Attention(torch.autograd.Function):
    """The reference's forward, in the dtype of the inputs, and a kernel's backward.

    forward: (q, k, v, s_aux) -> out, lse. backward: (dout, out, lse, dlse) -> dq, dk, dv, ds_aux.
    """

    @staticmethod
    def forward(ctx, forward, backward, *inputs):
        out, lse = forward(*inputs)
        out, lse = poisoned(out.to(inputs[0].dtype)), lse.float()
        ctx.save_for_backward(out, lse)
        ctx.backward_kernel = backward
        return out, lse

    @staticmethod
    def backward(ctx, dout, dlse):
        dlse = None if dlse is None or not dlse.any() else dlse.contiguous()
        return None, None, *ctx.backward_kernel(dout, *ctx.saved_tensors, dlse)


@lru_cache(maxsize=8)
def expected(case: Case, dlse: bool) -> tuple[Inputs, ExpectedGradients]:
    """The inputs, and what their gradients should be; many kernels compute the same."""
    x = make_inputs(case)
    if case.layout == "poisoned":
        x.v = poisoned(x.v, around=16)  # k and v have strides of their own
    reference, standard = (written_out(case, x, f) for f in (attention_ref, standard_attention))
    given = differentiable(x), x.dout, x.dlse if dlse else None
    return x, ExpectedGradients(reference, standard, *given, case.dropout_p)


def check(kernels, row, case: Case, dlse: bool = False, **how) -> None:
    x, results = expected(case, dlse)
    options = case.mask_kwargs() | {"softcap": case.softcap, "softmax_scale": case.scale}
    options |= {"alibi_slopes": x.alibi_slopes, "s_aux": x.s_aux, "dropout_p": case.dropout_p}

    def run(dout, out, lse, dlse):
        _, *gradients = calls.backward(
            kernels, row.name, dout, x.q, x.k, x.v, out, lse, calls.dense_lengths(x.q, x.k),
            dlse=dlse, rng_state=rng_state("cpu"), **options, **how,
        )  # fmt: skip
        return tuple(gradients)

    def forward(*_):
        return results.of_reference[:2]

    results.check(lambda **leaves: Attention.apply(forward, run, *leaves.values()))


def sized(row, **shape) -> Case:
    heads = dict(b=1, h=2, hk=1, d=row.head_dim)
    dv = None if row.head_dim_v == row.head_dim else row.head_dim_v
    return Case(dtype=DTYPES[row.dtype], **heads | {"dv": dv} | shape)


@pytest.mark.parametrize("row", PLAIN, ids=id_of)
@pytest.mark.parametrize(
    "shape",
    [
        dict(sq=1, sk=1, h=6, hk=2),
        dict(sq=129, sk=257),
        dict(sq=257, sk=129, causal=True),  # the first rows see nothing
        dict(sq=113, sk=203, causal=True, b=2, h=3, hk=3),
        dict(sq=150, sk=300, window=(37, 5)),  # no query sees the first keys
        dict(sq=300, sk=150, window=(0, 17)),
        dict(sq=200, sk=333, window=(60, -1), causal=True, layout="transposed"),
        dict(sq=5, sk=0),
        dict(sq=0, sk=70),
    ],
    ids=str,
)
def test_masks_and_lengths(kernels, row, shape):
    check(kernels, row, sized(row, **shape))


@pytest.mark.parametrize("row", ROWS, ids=id_of)
def test_every_row(kernels, row):
    """The rows of a full tile, or of the other dtype, go the same ways as those above."""
    check(kernels, row, sized(row, sq=150, sk=210, window=(90, 40)))


@pytest.mark.parametrize("row", TILES, ids=id_of)
def test_smaller_head_dims_are_zero_filled(kernels, row):
    dims = dict(d=row.head_dim - 24, dv=row.head_dim_v - 8)
    check(kernels, row, sized(row, b=2, h=3, hk=3, sq=70, sk=90, causal=True, **dims))


@pytest.mark.parametrize("row", [v for v in PLAIN if v.head_dim > 256], ids=id_of)
@pytest.mark.parametrize("dims", [(512, 64), (96, 288), (264, 512)], ids=str)
def test_half_of_the_columns_may_be_absent(kernels, row, dims):
    d, dv = dims
    case = sized(row, d=d, dv=dv, sq=70, sk=200, causal=True)
    ways = [{}, dict(split_heads=1)]
    if row.arch == "sm90":
        ways += [dict(ordered_dq=True), dict(kv_persistent=True), dict(row_splits=(2, 2))]
    for way in ways:
        check(kernels, row, case, **way)


@pytest.mark.parametrize("row", ROWS[:2] + ROWS[-2:], ids=id_of)
@pytest.mark.parametrize("kind", ["low_rank", "outliers", "large", "constant"])
def test_adversarial_values(kernels, row, kind):
    check(kernels, row, sized(row, h=1, sq=113, sk=150, kind=kind))


# Full tiles do it with all mods, below.
@pytest.mark.parametrize("row", PLAIN, ids=id_of)
@pytest.mark.parametrize(
    ("split_heads", "shape"),
    [
        (1, dict(h=4, hk=2, sq=150, sk=300, causal=True)),
        (2, dict(h=5, b=2, sq=130, sk=210, window=(90, 40))),  # the last part has one head
        (1, dict(h=3, sq=90, sk=50, layout="transposed")),  # one block has all keys
        (2, dict(h=3, sq=0, sk=70)),
    ],
    ids=str,
)
def test_groups_in_splits(kernels, row, split_heads, shape):
    check(kernels, row, sized(row, **shape), split_heads=split_heads)


def check_mods(kernels, row, dlse: bool = False, how: dict | None = None, **mods) -> None:
    check(kernels, row, sized(row, **dict(b=2, sq=70, sk=140) | mods), dlse, **how or {})


@pytest.mark.parametrize("row", one_of_each_kind(FULL), ids=id_of)
@pytest.mark.parametrize(
    "mods",
    [
        dict(softcap=3.0),
        dict(alibi="bh", causal=True, sk=190),
        dict(sinks=True, sq=190, causal=True),  # rows with nothing but the sink
        dict(dropout_p=0.3),
        dict(scale=-0.2, b=1),
        dict(scale=0.0, causal=True, b=1),
    ],
    ids=str,
)
def test_score_mods(kernels, row, mods):
    check_mods(kernels, row, **mods)


@pytest.mark.parametrize("row", WITH_MODS, ids=id_of)
@pytest.mark.parametrize(
    "mods",
    [
        dict(softcap=40.0),  # scores are well below: tanh has two powers
        dict(softcap=1e3),
        dict(softcap=9.0),  # or five
        dict(softcap=2.0, causal=True),  # or none
        dict(softcap=1e-3),
        dict(softcap=9.0, scale=-0.1),
        dict(softcap=9.0, kind="growing", sq=290, sk=290, causal=True),  # each in turn
        dict(softcap=9.0, kind="growing", sq=290, window=(50, 3)),
        dict(softcap=40.0, dlse=True),
        dict(softcap=40.0, sinks=True, sq=190, causal=True),  # rows with nothing but the sink
        dict(alibi="h"),  # keys on both sides of the diagonal
        dict(alibi="h", sq=290, sk=290, causal=True),  # left of it alone, and at it
        dict(dropout_p=0.3, sq=290, causal=True),
        dict(dropout_p=0.5, dlse=True, window=(50, 3)),
        dict(dropout_p=0.6),  # of more than half there is no loop of its own
        dict(dropout_p=0.3, sinks=True, sq=190, causal=True),
        dict(softcap=9.0, dropout_p=0.3),
        dict(alibi="h", dropout_p=0.3, causal=True),
        dict(softcap=9.0, alibi="h"),
    ],
    ids=str,
)
def test_one_or_two_mods(kernels, row, mods):
    """Where one alone has a loop of its own, scores that allow it have a shorter way."""
    check_mods(kernels, row, **dict(b=1, sq=150, sk=210) | mods)


@pytest.mark.parametrize("row", WITH_MODS, ids=id_of)
@pytest.mark.parametrize("mod", [dict(softcap=9.0), dict(alibi="h")], ids=str)
def test_one_mod_in_turns(kernels, row, mod):
    shape = dict(b=1, sq=150, sk=300, kind="growing", causal=True)
    check_mods(kernels, row, how=dict(deterministic=True), **shape | mod)


@pytest.mark.parametrize("row", [v for v in FULL if v.dtype == "fp16"], ids=id_of)
@pytest.mark.parametrize("mod", [dict(softcap=9.0), dict(alibi="h")], ids=str)
def test_one_mod_in_fp16_and_groups_in_splits(kernels, row, mod):
    shape = dict(b=1, sq=90, sk=150, causal=True)
    check_mods(kernels, row, how=dict(split_heads=1), **shape | mod)


# The bar is standard attention in the row's dtype, of which fp16 does not have such a cap.
@pytest.mark.parametrize("row", [v for v in WITH_MODS if v.dtype == "bf16"], ids=id_of)
@pytest.mark.parametrize("softcap", [1e6, 1e8, 1e12, 1e18, 1e20, 1e30])
def test_a_cap_out_of_reach_changes_nothing(kernels, row, softcap):
    check_mods(kernels, row, b=1, sq=150, sk=210, softcap=softcap)


@pytest.mark.parametrize("row", FULL, ids=id_of)
@pytest.mark.parametrize("split_heads", [2, 1])  # of the two that share keys
def test_all_mods_together(kernels, row, split_heads):
    mods = dict(softcap=20.0, alibi="h", sinks=True, dropout_p=0.17, window=(50, 3))
    check_mods(kernels, row, dlse=True, how=dict(split_heads=split_heads), **mods)


@pytest.mark.parametrize("row", one_of_each_kind(TILES), ids=id_of)
def test_gradient_of_lse(kernels, row):
    check(kernels, row, sized(row, sq=90, sk=70, causal=True), dlse=True)


# Rows, and how many of the two heads of a group a GQA split has.
SHARED = [
    pytest.param(row, split_heads, id=f"{split_heads}-{row.name}")
    for row in TILES
    for split_heads in ((2, 1) if row.scores == "plain" else (1,))
]


def exact(row, seed: int = 0, **shape) -> tuple:
    """A call and its results apart from any reference: arguments of `calls.backward`."""
    x = make_inputs(sized(row, **shape, seed=seed))
    b, sq, h, _ = x.q.shape
    lse = torch.full((b, h, sq), 3.0)
    return x.dout, x.q, x.k, x.v, x.dout, lse, calls.dense_lengths(x.q, x.k)


@pytest.mark.parametrize(("row", "split_heads"), SHARED)
def test_deterministic(kernels, row, split_heads):
    """Blocks take turns: the order of the launch is the only one that works, or any if they draw
    their tiles."""
    call = exact(row, sq=150, sk=300, causal=True)
    run = partial(calls.backward, kernels, row.name, *call, causal=True, split_heads=split_heads)
    ordered = run(deterministic=True)
    if row.cluster == 1:  # here, blocks run in order anyway; those of clusters wait for each other
        assert_bitwise("dq", ordered[1], run()[1])
    if row.arch == "sm90":
        assert_bitwise("dq", run(deterministic=True, last_block_first=True)[1], ordered[1])
        return
    with pytest.raises(RuntimeError, match="wait for what it polls"):
        run(deterministic=True, last_block_first=True)


@pytest.mark.parametrize("row", one_of_each_kind(TILES), ids=id_of)
@pytest.mark.parametrize("split_heads", [2, 1])  # of the two that share keys
def test_blocks_in_any_order(kernels, row, split_heads):
    call = exact(row, sq=150, sk=300)
    how = dict(window_size=(140, 60), split_heads=split_heads)
    run = partial(calls.backward, kernels, row.name, *call, **how)
    results = run(), run(last_block_first=True)
    for name, a, b in zip(("softmax_d", "dq", "dk", "dv"), *results, strict=True):
        if name == "dq":  # its terms were added in another order
            torch.testing.assert_close(a, b)
        else:
            assert_bitwise(name, a, b)


@pytest.mark.parametrize("row", one_of_each_kind(TILES)[:1], ids=id_of)
@pytest.mark.parametrize("wanted", [("dq",), ("dk",), ("dv",), ("dk", "dv"), ()])
@pytest.mark.parametrize("split_heads", [2, 1])  # of the two that share keys
def test_gradients_that_are_wanted(kernels, row, wanted, split_heads):
    call = exact(row, sq=70, sk=90)
    run = partial(calls.backward, kernels, row.name, *call, split_heads=split_heads)
    everything = dict(zip(("dq", "dk", "dv"), run()[1:], strict=True))
    _, *some = run(wanted=wanted)
    for name, gradient in zip(wanted, some, strict=True):
        assert_bitwise(name, gradient, everything[name])


def check_varlen(kernels, row, **how) -> None:
    """Zero lengths anywhere, keys in use, rows and keys after the last sequence."""
    gen = torch.Generator().manual_seed(1)
    lengths_q, lengths_k = [0, 150, 3, 0, 60], [10, 70, 200, 5, 0]
    used = [10, 66, 133, 0, 0]
    cu_q, cu_k = (
        torch.tensor([0, *n], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        for n in (lengths_q, lengths_k)
    )
    spare_q, spare_k, heads, dtype = 140, 150, 2, DTYPES[row.dtype]

    def random(total: int, heads: int, head_dim: int) -> torch.Tensor:
        return torch.randn(total, heads, head_dim, generator=gen).to(dtype)

    total_q, total_k = sum(lengths_q) + spare_q, sum(lengths_k) + spare_k
    q, dout = random(total_q, heads, row.head_dim), random(total_q, heads, row.head_dim_v)
    k, v = random(total_k, 1, row.head_dim), random(total_k, 1, row.head_dim_v)
    full = {}
    if row.scores == "full":
        full = {"alibi_slopes": random_slopes((5, heads), gen), "s_aux": torch.randn(heads)}

    def reference(attention):
        def call(q, k, v, s_aux=None):
            return varlen_ref(
                attention, q, k, v, cu_q.tolist(), cu_k.tolist(), seqused_k=used, causal=True,
                **full | ({} if s_aux is None else {"s_aux": s_aux}),
            )  # fmt: skip

        return call

    def run(dout, out, lse, dlse):
        """As the reference, but with NaN wherever no kernel may look."""
        dirty = [x.clone() for x in (dout, q, k, v, out)]
        for x, cu in zip(dirty, (cu_q, cu_q, cu_k, cu_k, cu_q), strict=True):
            x[cu[-1] :] = float("nan")
        for start, n, end in zip(cu_k.tolist(), used, cu_k.tolist()[1:], strict=False):
            for x in dirty[2:4]:
                x[start + n : end] = float("nan")
        seqused_k = torch.tensor(used, dtype=torch.int32)
        lengths = calls.varlen_lengths(q, k, cu_q, cu_k, seqused_k)
        softmax_d, *gradients = calls.backward(
            kernels, row.name, *dirty, lse, lengths, causal=True, **full, **how
        )
        assert not softmax_d[:, cu_q[-1] :].any()
        return tuple(gradients)

    inputs = {"q": q, "k": k, "v": v} | {n: x for n, x in full.items() if n == "s_aux"}
    check_gradients(
        lambda **leaves: Attention.apply(reference(attention_ref), run, *leaves.values()),
        reference(attention_ref),
        reference(standard_attention),
        inputs,
        dout,
    )


@pytest.mark.parametrize(("row", "split_heads"), SHARED)
def test_varlen(kernels, row, split_heads):
    check_varlen(kernels, row, split_heads=split_heads)


@pytest.mark.parametrize("row", ROWS[:2], ids=id_of)
def test_softmax_d(kernels, row):
    """rowsum(dO * O) - dLSE, as ring attention reads it."""
    dout, *call = exact(row, b=2, h=3, hk=3, sq=70, sk=40)
    dlse = torch.randn(2, 3, 70)
    softmax_d, *_ = calls.backward(kernels, row.name, dout, *call, dlse=dlse)
    expected = (dout.double() * dout.double()).sum(-1).transpose(1, 2) - dlse
    torch.testing.assert_close(softmax_d.double(), expected, atol=1e-4, rtol=1e-5)


def kept_by(kernels, row, b: int, heads: int, sq: int, sk: int, p: float) -> torch.Tensor:
    """(b, h, sq, sk): q = 0 and dO, n rows at a time, the identity, so that dV tells."""
    n = min(row.head_dim_v, 96)
    _, q, k, v, _, lse, lengths = exact(row, b=b, sq=sq, sk=sk, h=heads, hk=heads, dv=n)
    kept = []
    for begin in range(0, sq, n):
        rows = min(n, sq - begin)
        dout = torch.zeros(b, sq, heads, n, dtype=q.dtype)
        dout[:, begin : begin + rows] = torch.eye(n, dtype=q.dtype)[:rows, None]
        _, _, _, dv = calls.backward(
            kernels, row.name, dout, q.zero_(), k, v, dout, lse, lengths,
            dropout_p=p, rng_state=rng_state("cpu"),
        )  # fmt: skip
        kept.append(dv.permute(0, 2, 3, 1)[:, :, :rows] != 0)
    return torch.cat(kept, dim=2)


@pytest.mark.parametrize("row", FULL, ids=id_of)
def test_dropout_bits_are_the_contracts(kernels, row):
    n = min(row.head_dim_v, 96)
    kept = kept_by(kernels, row, 1, 3, n, 77, 0.4)
    assert torch.equal(kept, keep_mask(SEED, OFFSET, 1, 3, n, 77, 0.4))


@pytest.mark.parametrize("row", [v for v in WITH_MODS if v.head_dim == 64], ids=id_of)
@pytest.mark.parametrize("p", [1e-4, 0.1, 0.5, 0.50002, 0.999, 65535 / 65536])
def test_dropout_bits_of_any_threshold(kernels, row, p):
    """Two at a time up to a half; in several row blocks, of several sequences."""
    kept = kept_by(kernels, row, 2, 2, 150, 140, p)
    assert torch.equal(kept, keep_mask(SEED, OFFSET, 2, 2, 150, 140, p))


@pytest.mark.parametrize("row", [v for v in WITH_MODS if v.head_dim == 64], ids=id_of)
@pytest.mark.parametrize("mods", [{}, dict(softcap=40.0), dict(dropout_p=0.1)], ids=str)
def test_probabilities_of_one(kernels, row, mods):
    """One key: P is 1 and, in its units, as large as it gets; dV is dO, or that kept."""
    check_mods(kernels, row, **dict(b=1, sq=1, sk=1, scale=-0.1) | mods)


@pytest.mark.parametrize("row", [v for v in TILES if v.arch == "sm80"], ids=id_of)
def test_shared_memory_banks(kernels, row):
    """No two lanes of an access want different words of one bank. (Hopper's copies and products
    read in the order of their swizzles.)"""
    kernels.bank_counts()
    calls.backward(kernels, row.name, *exact(row, h=1, sq=130, sk=260))
    counts = kernels.bank_counts()
    assert {"cp.async", "ldmatrix", "ldmatrix.trans"} <= counts.keys()
    assert all(conflicts == 0 for _, conflicts in counts.values()), counts
