"""Dropout: a mask that is a pure function of (seed, offset, batch, head, i, j), applied right."""

from __future__ import annotations

import pytest
import torch
from cases import BF16, FP16, FP32, OFFSET, SEED, Case, make_inputs, rng_state
from compare import assert_accurate, assert_bitwise
from packed_cases import LENGTHS, pack
from reference import attention_ref, gradients, standard_attention
from reference_dropout import keep_mask, philox4x32

from flash_attn import flash_attn_func, flash_attn_qkvpacked_func, flash_attn_varlen_func
from flash_attn.dispatch import private

# Random123's published answers for Philox4x32-7 (and -10, which fixes the rounds' order too).
KNOWN_ANSWERS = [
    (7, (0,) * 4, (0,) * 2, "5f6fb709 0d893f64 4f121f81 4f730a48"),
    (7, (0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, "5207ddc2 45165e59 4d8ee751 8c52f662"),
    (
        7,
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        "4dfccaba 190a87f0 c47362ba b6b5242a",
    ),
    (10, (0,) * 4, (0,) * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
]


@pytest.mark.parametrize(("rounds", "counter", "key", "words"), KNOWN_ANSWERS)
def test_our_reference_is_philox(rounds, counter, key, words):
    got = philox4x32(counter, key, rounds)
    assert " ".join(f"{int(word):08x}" for word in got) == words


def forward(case: Case, x, state, return_softmax=True):
    return torch.ops.flash_attn._flash_attn_forward(
        x.q, x.k, x.v, case.dropout_p, case.d**-0.5, case.causal, *case.window, 0.0, None,
        return_softmax, rng_state=state,
    )  # fmt: skip


def kept(probs: torch.Tensor) -> torch.Tensor:
    """S_dmask is negative where dropped; the sign also survives a probability of zero."""
    return ~torch.signbit(probs)


@pytest.mark.parametrize(
    ("seed", "offset"),
    [(0, 0), (SEED, OFFSET), (2**63 - 1, 2**62 + 5), (1, 2**32), (2**32, 1), (7, 2**32 - 1)],
)
@pytest.mark.parametrize("dropout_p", [0.1, 0.5, 0.93])
def test_bits_equal_an_independent_philox(seed, offset, dropout_p, device, needs):
    case = Case(b=2, sq=70, sk=131, h=3, hk=1, d=32, dropout_p=dropout_p, dtype=FP16)
    x = make_inputs(case, device)
    with needs("dropout", "attn_probs"):
        _, _, probs, _ = forward(case, x, rng_state(device, seed, offset))
        mask = keep_mask(seed, offset, case.b, case.h, case.sq, case.sk, dropout_p)
        differ = kept(probs).cpu() != mask
        assert not differ.any(), f"first at (b, h, i, j) = {differ.nonzero()[0].tolist()}"


def test_magnitudes_of_s_dmask_are_probabilities(device, needs):
    case = Case(sq=70, sk=131, causal=True, dropout_p=0.3)
    x = make_inputs(case, device)
    with needs("dropout", "attn_probs"):
        _, _, probs, _ = forward(case, x, rng_state(device))
        _, _, ref = attention_ref(x.q, x.k, x.v, causal=True)
        _, _, std = standard_attention(x.q, x.k, x.v, causal=True)
        assert_accurate("|S_dmask|", probs.abs().to(std.dtype), ref, std)


@pytest.mark.parametrize("dropout_p", [0.02, 0.17, 0.5, 0.9])
def test_rate(dropout_p, device, needs):
    case = Case(b=2, sq=256, sk=256, h=4, hk=4, d=16, dropout_p=dropout_p)
    x = make_inputs(case, device)
    with needs("dropout", "attn_probs"):
        _, _, probs, _ = forward(case, x, rng_state(device))
        rate = 1 - kept(probs).double().mean().item()
        # Five standard deviations of the mean of 2^19 independent draws.
        assert abs(rate - dropout_p) < 5 * (dropout_p * (1 - dropout_p) / 2**19) ** 0.5 + 2**-16


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("dropout_p", [0.1, 0.999, 1 - 2**-16])
def test_scale_is_the_inverse_of_the_share_that_is_kept(dropout_p, dtype, device, needs):
    """Of the share that sixteen bits can keep: 66 of 65,536 for p = 0.999, and not 65.536."""
    seqlen_k = 1024
    q = torch.zeros(1, 128, 4, 32, device=device, dtype=dtype)
    k = torch.ones(1, seqlen_k, 4, 32, device=device, dtype=dtype).requires_grad_()
    with needs("dropout", "attn_probs", "backward", *(["fp32"] if dtype == FP32 else [])):
        out, _, probs = flash_attn_func(q, k, k, dropout_p=dropout_p, return_attn_probs=True)
        count = kept(probs).sum(-1).transpose(1, 2)[..., None].double()
        scale = 65536 / (65536 - round(dropout_p * 65536))
        expected = (count / seqlen_k * scale).to(dtype)
        assert count.sum() > 0
        tolerance = {"rtol": 2**-8, "atol": 0} if dtype == BF16 else {}
        torch.testing.assert_close(out, expected.expand_as(out), **tolerance)
        (dv,) = torch.autograd.grad(out.sum(), k)  # dk is 0: so is q
        torch.testing.assert_close(dv.sum(), out.sum(), rtol=2**-7, atol=0)


@pytest.mark.parametrize("dropout_p", [1 - 2**-17, 1 - 1e-9, 1 - 3e-8])
def test_too_near_to_one_raises(dropout_p, device):
    x = make_inputs(Case(), device)
    with pytest.raises(ValueError, match=r"dropout_p: got 0.999.*; 0 <= dropout_p <= 1 - 2"):
        flash_attn_func(x.q, x.k, x.v, dropout_p=dropout_p)


def test_batches_heads_and_states_differ(device, needs):
    case = Case(b=2, sq=64, sk=64, h=2, hk=2, d=32, dropout_p=0.5)
    x = make_inputs(case, device)
    states = [(1, 0), (2, 0), (1, 1), (1 + 2**32, 0), (1, 2**33)]
    with needs("dropout", "attn_probs"):
        masks = []
        for state in states:
            mask = kept(forward(case, x, rng_state(device, *state))[2])
            masks += [mask[b, h] for b in range(2) for h in range(2)]
        for n, first in enumerate(masks):
            for second in masks[n + 1 :]:
                agreement = (first == second).double().mean().item()
                assert 0.4 < agreement < 0.6


def test_rng_state_reproduces_the_call(device, needs):
    case = Case(dropout_p=0.3, causal=True)
    x = make_inputs(case, device)
    with needs("dropout"):
        out, lse, _, state = forward(case, x, None, False)
        assert state.shape == (2,)
        assert state.dtype == torch.int64
        again, lse_again, _, state_again = forward(case, x, state, False)
        assert_bitwise("out", again, out)
        assert_bitwise("lse", lse_again, lse)
        assert_bitwise("rng_state", state_again, state)
        other, _, _, other_state = forward(case, x, None, False)
        assert not torch.equal(other, out)
        assert not torch.equal(other_state, state)


def test_manual_seed_reproduces_the_public_call(device, needs):
    case = Case(dropout_p=0.3)
    x = make_inputs(case, device)
    with needs("dropout"):
        outs = []
        for seed in (5, 5, 6):
            torch.manual_seed(seed)
            outs.append(flash_attn_func(x.q, x.k, x.v, dropout_p=0.3))
        assert_bitwise("out", outs[1], outs[0])
        assert not torch.equal(outs[2], outs[0])


def test_no_dropout_draws_nothing_from_the_generator(device):
    x = make_inputs(Case(), device)
    torch.manual_seed(3)
    expected = torch.rand(4, device=device)
    torch.manual_seed(3)
    flash_attn_func(x.q, x.k, x.v)
    assert_bitwise("next numbers", torch.rand(4, device=device), expected)


@pytest.mark.parametrize("window", [(-1, -1), (40, 10)])
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_public_forward_and_backward_use_one_mask(dtype, window, device, needs):
    """The mask read off S_dmask explains the output and all three gradients."""
    case = Case(dtype=dtype, sq=129, sk=200, window=window, dropout_p=0.25)
    x = make_inputs(case, device)
    inputs = {"q": x.q, "k": x.k, "v": x.v}
    with needs("dropout", "attn_probs", "backward", *case.features):
        leaves = {name: t.detach().requires_grad_() for name, t in inputs.items()}
        out, _, probs = flash_attn_func(
            **leaves, dropout_p=0.25, window_size=window, return_attn_probs=True
        )
        out.backward(x.dout)
        mask = kept(probs)

        def written_out(attention):
            return lambda q, k, v: attention(
                q, k, v, window_size=window, dropout_p=0.25, keep_mask=mask
            )[:2]

        ref_out, _, ref = gradients(written_out(attention_ref), inputs, x.dout, None, torch.float64)
        std_out, _, std = gradients(written_out(standard_attention), inputs, x.dout)
        assert_accurate("out", out, ref_out, std_out)
        for name, leaf in leaves.items():
            factor = 2.0 if name == "q" else 3.0
            assert_accurate(f"d{name}", leaf.grad, ref[name], std[name], factor)


@pytest.mark.parametrize("lengths", ["mixed", "keys_longer", "zeros"])
def test_varlen_mask_equals_dense_mask(lengths, device, needs):
    """The bits depend on the place in the sequence, not on where the sequence is packed."""
    case = Case(h=2, hk=1, d=32, dropout_p=0.4)
    x = pack(case, LENGTHS[lengths], device)
    with needs("dropout", "attn_probs"):
        _, _, probs, _ = torch.ops.flash_attn._flash_attn_varlen_forward(
            x.q, x.k, x.v, *x.lengths.values(), 0.4, case.d**-0.5, False, -1, -1, 0.0, None, True,
            rng_state=rng_state(device),
        )  # fmt: skip
        batch = len(x.cu_q) - 1
        assert probs.shape == (batch, case.h, x.max_q, x.max_k)
        mask = keep_mask(SEED, OFFSET, batch, case.h, x.max_q, x.max_k, 0.4)
        for b in range(batch):
            sq, sk = x.cu_q[b + 1] - x.cu_q[b], x.cu_k[b + 1] - x.cu_k[b]
            assert torch.equal(kept(probs[b, :, :sq, :sk]).cpu(), mask[b, :, :sq, :sk])


ORIGINS = [(19, 48, 32), (7, 16, 4096)]  # batch * heads + head, query, key of each sequence


def mask_of_parts(case: Case) -> torch.Tensor:
    """(b, h, sq, sk) bool: what is kept of sequences that begin at ORIGINS in the whole."""
    masks = []
    for head, query, key in ORIGINS:
        whole = keep_mask(
            SEED, OFFSET, 1, head + case.h, query + case.sq, key + case.sk, case.dropout_p
        )
        masks.append(whole[0, head:, query:, key:])
    return torch.stack(masks)


@pytest.mark.parametrize("packed", [False, True])
def test_a_part_drops_what_the_whole_drops(packed, device, needs):
    """Forward and backward of a call that is a part of a larger one, as over several GPUs."""
    case = Case(b=2, sq=70, sk=131, h=3, hk=1, d=32, dropout_p=0.3, dtype=FP16)
    x, mask = make_inputs(case, device), mask_of_parts(case)
    state = torch.cat([rng_state(device), torch.tensor(ORIGINS, device=device).flatten()])
    options = (0.3, case.d**-0.5, False, -1, -1, 0.0, None)
    tensors, dout, lengths = (x.q, x.k, x.v), x.dout, ()
    if packed:
        tensors, dout = tuple(t.flatten(0, 1) for t in tensors), dout.flatten(0, 1)
        cu = (torch.arange(3, dtype=torch.int32, device=device) * n for n in (case.sq, case.sk))
        lengths = (*cu, case.sq, case.sk)
    operations = (
        (private._flash_attn_varlen_forward, private._flash_attn_varlen_backward)
        if packed
        else (private._flash_attn_forward, private._flash_attn_backward)
    )
    with needs("dropout", "attn_probs", "backward"):
        out, lse, probs, again = operations[0](*tensors, *lengths, *options, True, rng_state=state)
        assert_bitwise("rng_state", again, state)
        assert torch.equal(kept(probs).cpu(), mask)
        grads = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in tensors]
        operations[1](dout, *tensors, out, lse, *grads, *lengths, *options, False, state)

        def written_out(attention):
            return lambda q, k, v: attention(
                q, k, v, dropout_p=0.3, keep_mask=mask.to(q.device)
            )[:2]  # fmt: skip

        inputs = {"q": x.q, "k": x.k, "v": x.v}
        ref_out, _, ref = gradients(written_out(attention_ref), inputs, x.dout, None, torch.float64)
        std_out, _, std = gradients(written_out(standard_attention), inputs, x.dout)
        assert_accurate("out", out.view_as(ref_out), ref_out, std_out)
        for (name, exact), got in zip(ref.items(), grads, strict=True):
            factor = 2.0 if name == "q" else 3.0
            assert_accurate(f"d{name}", got.view_as(exact), exact, std[name], factor)


@pytest.mark.parametrize("entries", [0, 1, 3, 5, 11])
def test_a_state_of_another_length_is_named(entries, device):
    x = make_inputs(Case(dropout_p=0.3), device)
    state = torch.zeros(entries, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match=rf"rng_state: got torch.int64 of shape \({entries},\)"):
        private._flash_attn_forward(
            x.q, x.k, x.v, 0.3, 1.0, False, -1, -1, 0.0, None, False, rng_state=state
        )


def test_public_varlen_and_packed_calls_drop(device, needs):
    qkv = torch.randn(1, 64, 3, 2, 32, device=device).to(BF16)
    cu = torch.tensor([0, 64], dtype=torch.int32, device=device)
    q, k, v = qkv.unbind(2)
    with needs("dropout"):
        outs = []
        for function, args in [
            (flash_attn_func, (q, k, v)),
            (flash_attn_qkvpacked_func, (qkv,)),
            (flash_attn_varlen_func, (q[0], k[0], v[0], cu, cu, 64, 64)),
        ]:
            torch.manual_seed(11)
            outs.append(function(*args, dropout_p=0.5).reshape(64, 2, 32))
        assert not torch.allclose(outs[0], flash_attn_func(q, k, v)[0])
        assert_bitwise("qkvpacked", outs[1], outs[0])
        torch.testing.assert_close(outs[2], outs[0])


def test_mean_over_seeds_is_attention_without_dropout(device, needs):
    case = Case(b=1, sq=16, sk=64, h=1, hk=1, d=16, dtype=FP32, dropout_p=0.5)
    x = make_inputs(case, device)
    with needs("dropout", "fp32"):
        outs = [forward(case, x, rng_state(device, n, 0), False)[0] for n in range(400)]
        mean = torch.stack(outs).mean(0)
        plain = flash_attn_func(x.q, x.k, x.v)
        deviation = torch.stack(outs).std(0) / len(outs) ** 0.5
        assert ((mean - plain).abs() < 5 * deviation + 1e-6).all()
