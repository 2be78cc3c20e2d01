"""Softcaps of any size, and sinks up to infinity, on every backend."""

from __future__ import annotations

import math

import pytest
import torch
from cache_cases import CacheCase, expected, make_cache, run_cached
from calls import check_backward, check_forward, dense, differentiable
from cases import BF16, FP16, Case, make_inputs
from compare import assert_accurate, assert_bitwise, assert_lse, assert_within
from packed_cases import LENGTHS, pack
from reference import attention_ref, gradients, standard_attention

from flash_attn import flash_attn_func, flash_attn_varlen_func
from flash_attn.distributed import merge_attention, ring, sums
from flash_attn.distributed.calls import Rows

INF = math.inf

# Each has loops of its own in the kernels of Hopper.
MODS = [
    {},
    {"alibi": "h", "causal": True},
    {"alibi": "bh"},
    {"dropout_p": 0.2},
    {"alibi": "h", "dropout_p": 0.2},
]


@pytest.mark.parametrize("mods", MODS, ids=str)
@pytest.mark.parametrize("softcap", [300.0, 1e5, 1e7])
def test_large_softcaps(softcap, mods, device, needs):
    case = Case(sq=90, sk=130, softcap=softcap, **mods)
    with needs("backward", *case.features):
        check_backward(case, make_inputs(case, device))


@pytest.mark.parametrize("d", [96, 128, 192, 256])
@pytest.mark.parametrize("mods", [{}, {"alibi": "h"}], ids=str)
def test_a_large_softcap_of_every_head_dim(d, mods, device, needs):
    case = Case(b=1, sq=90, sk=130, d=d, softcap=3e4, dtype=FP16, **mods)
    with needs("backward", *case.features):
        check_backward(case, make_inputs(case, device))


@pytest.mark.parametrize("softcap", [1e3, 1e4, 1e6])
@pytest.mark.parametrize("alibi", [None, "h"])
def test_a_large_softcap_of_large_scores(softcap, alibi, device, needs):
    """Of thousands: some are far below the cap, and others near it or above."""
    case = Case(sq=60, sk=130, softcap=softcap, alibi=alibi, kind="large")
    with needs(*case.features):
        check_forward(case, make_inputs(case, device))


@pytest.mark.parametrize("mods", [{}, {"alibi": "h"}, {"dropout_p": 0.2}], ids=str)
@pytest.mark.parametrize("softcap", [1e7, 1e20, 3e38])
def test_a_softcap_that_does_nothing(softcap, mods, device, needs):
    """What there is without one, to rounding."""
    capped, plain = (Case(sq=90, sk=130, softcap=c, **mods) for c in (softcap, 0.0))
    x = make_inputs(plain, device)
    with needs("backward", *capped.features):
        found = [
            gradients(lambda q, k, v, case=case: dense(case, x, q, k, v), differentiable(x), x.dout)
            for case in (capped, plain)
        ]
        (out, lse, grads), (plain_out, plain_lse, plain_grads) = found
        assert_within("lse", lse, plain_lse, 1e-4)
        assert_within("out", out.float(), plain_out.float(), 2**-7)
        for name, grad in grads.items():
            expected_grad = plain_grads[name].float()
            bar = 2**-7 * float(expected_grad.abs().max())
            assert_within(f"d{name}", grad.float(), expected_grad, bar)


@pytest.mark.parametrize("softcap", [1e-10, 1e-30, 1e-300])
@pytest.mark.parametrize("mods", [{}, {"alibi": "h"}], ids=str)
def test_a_softcap_that_leaves_no_score(softcap, mods, device, needs):
    case = Case(sq=60, sk=130, softcap=softcap, **mods)
    with needs(*case.features):
        check_forward(case, make_inputs(case, device))


@pytest.mark.parametrize("softcap", [1e5, 1e7])
@pytest.mark.parametrize("case", [{}, {"sq": 3}, {"page_size": 16}, {"alibi": "h"}], ids=str)
def test_a_large_softcap_of_generation(softcap, case, device, needs):
    case = CacheCase("softcap", softcap=softcap, **case)
    x = make_cache(case, device)
    with needs(*case.features):
        out, lse = run_cached(case, x)
        ref, std = (expected(case, x, f) for f in (attention_ref, standard_attention))
        assert_accurate("out", out, ref.out, std.out)
        assert_lse("lse", lse, ref.lse)


# Four heads' sinks: one takes all weight, one is usual, one is none, and the last one's logit times
# log2(e) would overflow.
SINKS = (INF, 0.5, -INF, 3e38)
USUAL = (0.0, 0.5, -INF, 0.0)
BOTH = slice(1, 3)  # heads with the same result under either


def check_sinks(call, *tensors: torch.Tensor) -> None:
    """call(*tensors, s_aux) -> out (..., s, h, dv), lse (..., h, s)."""
    device = tensors[0].device
    largest = torch.tensor(SINKS, device=device)
    out, lse = call(*tensors, s_aux=largest)[:2]
    usual_out, usual_lse = call(*tensors, s_aux=torch.tensor(USUAL, device=device))[:2]
    assert not out[..., 0, :].any()
    assert not out[..., 3, :].any()
    assert (lse[..., 0, :] == INF).all()
    assert (lse[..., 3, :] == largest[3]).all()
    assert_bitwise("out", out[..., BOTH, :], usual_out[..., BOTH, :])
    assert_bitwise("lse", lse[..., BOTH, :], usual_lse[..., BOTH, :])


@pytest.mark.parametrize("mods", [{}, {"softcap": 5.0}, {"alibi": "h"}], ids=str)
@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize(("sq", "sk"), [(90, 130), (130, 60), (3, 700), (70, 0)])
def test_sinks_that_take_all(sq, sk, d, mods, device, needs):
    case = Case(sq=sq, sk=sk, d=d, causal=True, layout="contiguous", **mods)
    x = make_inputs(case, device)
    with needs("sinks", *case.features):
        check_sinks(lambda q, k, v, s_aux: dense(case, x, q, k, v, s_aux), x.q, x.k, x.v)


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("mods", [{}, {"softcap": 5.0}, {"alibi": "h"}, {"dropout_p": 0.2}],
                         ids=str)  # fmt: skip
def test_gradients_of_sinks_that_take_all(mods, dtype, device, needs):
    """None of q, k, v, nor of a sink that is infinite; a finite one still moves its LSE."""
    case = Case(dtype=dtype, sq=90, sk=130, hk=4, **mods)
    x = make_inputs(case, device)
    with needs("backward", "sinks", *case.features):

        def run(sinks):
            leaves = [t.detach().requires_grad_() for t in (x.q, x.k, x.v)]
            s_aux = torch.tensor(sinks, device=x.q.device).requires_grad_()
            out, lse = dense(case, x, *leaves, s_aux)
            return torch.autograd.grad((out, lse), [*leaves, s_aux], (x.dout, x.dlse))

        *grads, ds_aux = run(SINKS)
        *usual, usual_ds_aux = run(USUAL)
        for name, grad, as_usual in zip("qkv", grads, usual, strict=True):
            assert not grad[:, :, 0].any()
            assert not grad[:, :, 3].any()
            assert grad[:, :, BOTH].any()
            if device != "cuda":  # atomic sums of dQ come in any order
                assert_bitwise(f"d{name}", grad[:, :, BOTH], as_usual[:, :, BOTH])
        assert ds_aux[0] == 0
        assert_bitwise("ds_aux", ds_aux[BOTH], usual_ds_aux[BOTH])
        assert_within("ds_aux", ds_aux[3], x.dlse[:, 3].sum(), 1e-4)


@pytest.mark.parametrize("sink", [1e4, 1e6, 1e9])
def test_the_gradient_of_a_large_sink(sink, device, needs):
    """Its share is 1, although LSE has no digits behind the point."""
    x = make_inputs(Case(), device)
    with needs("backward", "sinks"):
        s_aux = torch.full((4,), sink, device=x.q.device).requires_grad_()
        _, lse = flash_attn_func(x.q, x.k, x.v, s_aux=s_aux, return_lse=True)
        (ds_aux,) = torch.autograd.grad(lse, s_aux, x.dlse)
        assert_within("ds_aux", ds_aux, x.dlse.sum((0, 2)), 1e-4)


@pytest.mark.parametrize("lengths", ["keys_longer", "zeros"])
def test_sinks_that_take_all_of_packed_sequences(lengths, device, needs):
    x = pack(Case(), LENGTHS[lengths], device, spare=0)
    rows = slice(0, x.cu_q[-1])

    def call(q, k, v, s_aux):
        out, lse = flash_attn_varlen_func(
            q, k, v, **x.lengths, causal=True, s_aux=s_aux, return_lse=True
        )
        return out[rows], lse[:, rows]

    with needs("sinks"):
        check_sinks(call, x.q, x.k, x.v)


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize(
    "case", [{}, {"sq": 5}, {"page_size": 16}, {"cache_size": 900, "cache_seqlens": (900, 1, 512)}],
    ids=str,
)  # fmt: skip
def test_sinks_that_take_all_of_generation(case, num_splits, device, needs):
    case = CacheCase("sinks", **case)
    x = make_cache(case, device)
    x.extra.pop("s_aux", None)
    with needs("sinks", *case.features):
        check_sinks(lambda q, s_aux: run_cached(case, x, s_aux=s_aux, num_splits=num_splits), x.q)


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_sinks_that_take_all_of_few_rows(batch_invariant, device, needs):
    """Of which parts of the keys are merged: the sink belongs to the first."""
    x = make_inputs(Case(b=1, sq=16, sk=3000, hk=1), device)

    def call(q, k, v, s_aux):
        return flash_attn_func(
            q, k, v, s_aux=s_aux, batch_invariant=batch_invariant, return_lse=True
        )

    with needs("sinks", *(["batch_invariant"] if batch_invariant else [])):
        check_sinks(call, x.q, x.k, x.v)


@pytest.mark.parametrize("first", [True, False])
def test_a_part_whose_sink_takes_all(first, device, needs):
    """Parts of the keys, one of them with the sinks, become the whole."""
    x = make_inputs(Case(), device)
    parts = slice(0, 60), slice(60, None)

    def call(q, k, v, s_aux):
        sinks = (s_aux, None) if first else (None, s_aux)
        (out, lse), other = (
            flash_attn_func(q, k[:, at], v[:, at], s_aux=sink, return_lse=True)
            for at, sink in zip(parts, sinks, strict=True)
        )
        merge_attention(out, lse, *other)
        return out, lse

    with needs("sinks"):
        check_sinks(call, x.q, x.k, x.v)


def test_sinks_that_take_all_of_a_ring(device, needs):
    """Which adds the sinks when all parts are merged, and sums their gradient itself."""
    x = make_inputs(Case(), device)

    def call(q, k, v, s_aux):
        total = sums.Attention(q, v, torch.float32, torch.float32)
        total.add(range(q.shape[1]), *flash_attn_func(q, k, v, return_lse=True))
        total.add_sinks(s_aux)
        return total.result()

    with needs("sinks"):
        check_sinks(call, x.q, x.k, x.v)
        gradients_of_sinks = []
        for sinks in (SINKS, USUAL):
            s_aux = torch.tensor(sinks, device=x.q.device)
            out, lse = call(x.q, x.k, x.v, s_aux)
            rows = Rows(x.dout, x.q, out, lse, x.dlse)
            gradients_of_sinks.append(ring.sink_gradient(s_aux, rows))
        found, usual = gradients_of_sinks
        assert found[0] == 0
        assert_bitwise("ds_aux", found[BOTH], usual[BOTH])
        assert_within("ds_aux", found[3], x.dlse[:, 3].sum(), 1e-4)
