"""Codes of q, k and v that flash_attn.fp8.attention makes: the kernel beside torch's operations."""

from __future__ import annotations

import math

import pytest
import torch
from cases import BF16, FP16, poisoned
from torch import Tensor
from torch.library import opcheck

from flash_attn.call import FP8
from flash_attn.cpu.encode import make_codes as on_torch
from flash_attn.dispatch.encode import Codes, make_codes

OF_QUERIES = torch.ops.flash_attn._make_query_codes.default


def inputs(device, b=2, sq=70, sk=600, h=6, hk=2, d=64, dv=64, dtype=BF16) -> tuple[Tensor, ...]:
    gen = torch.Generator().manual_seed(sq + sk + d)
    shapes = ((b, sq, h, d), (b, sk, hk, d), (b, sk, hk, dv))
    q, k, v = (torch.randn(*shape, generator=gen) for shape in shapes)
    if k.shape[1]:
        k = k + 5 * torch.randn(hk, d, generator=gen)  # channels that lie far from 0
    return tuple(x.to(device, dtype) for x in (q, k, v))


def numbers(codes: Tensor, descale: Tensor) -> Tensor:
    """Of codes (b, s, h, d), whose heads share descales (b, hk)."""
    group = codes.shape[2] // descale.shape[1]
    return codes.float() * descale.repeat_interleave(group, 1)[:, None, :, None]


def check(q, k, v, smooth_k: bool) -> Codes:
    """Of q and v the same bits as on a CPU. Means of keys are summed up in another order, so codes
    of keys are the nearest ones to what is left."""
    made = make_codes(q, k, v, smooth_k)
    on_cpu = on_torch(*(x.cpu() for x in (q, k, v)), smooth_k)
    expected = Codes(*(x.to(q.device) for x in on_cpu))
    same = ["q", "v", "q_descale", "v_descale"] + ([] if smooth_k else ["k", "k_descale"])
    for name in same:
        got, want = getattr(made, name), getattr(expected, name)
        assert got.dtype is want.dtype
        assert got.shape == want.shape
        assert got.is_contiguous()
        assert torch.equal(got.float().nan_to_num(7e7), want.float().nan_to_num(7e7)), name
    assert made.k_mean.shape == expected.k_mean.shape
    torch.testing.assert_close(made.k_mean, expected.k_mean, rtol=1e-5, atol=1e-5, equal_nan=True)
    torch.testing.assert_close(made.k_descale, expected.k_descale, rtol=1e-4, atol=0)
    left = k.float() - made.k_mean if made.k_mean.shape[1] else k.float()
    got, step = numbers(made.k, made.k_descale), made.k_descale[:, None, :, None]
    seen = left.isfinite()
    assert torch.equal(got.isnan(), left.isnan())
    assert ((got - left).abs() <= left.abs() / 16 + step * 2.0**-10 + 1e-6)[seen].all()
    if seen.all() and k.numel():  # the largest number is the largest code
        largest = made.k.float().abs().amax((1, 3))
        assert ((largest == 448) | (left.abs().amax((1, 3)) == 0)).all()
    return made


@pytest.mark.parametrize("smooth_k", [True, False])
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize(
    ("h", "hk", "d", "dv"), [(6, 2, 64, 64), (4, 4, 96, 96), (8, 1, 192, 128), (2, 1, 256, 16)]
)
def test_head_dims(h, hk, d, dv, dtype, smooth_k, device):
    check(*inputs(device, h=h, hk=hk, d=d, dv=dv, dtype=dtype), smooth_k)


@pytest.mark.parametrize(("sq", "sk"), [(1, 1), (256, 257), (0, 5), (3, 0), (0, 0), (700, 31)])
@pytest.mark.parametrize("smooth_k", [True, False])
def test_lengths(sq, sk, smooth_k, device):
    check(*inputs(device, sq=sq, sk=sk), smooth_k)


def test_no_sequences(device):
    made = check(*inputs(device, b=0), True)
    assert made.k.shape == (0, 600, 2, 64)


@pytest.mark.parametrize("d", [8, 72, 20, 272])
def test_other_head_dims_are_served_by_torch(d, device):
    check(*inputs(device, sk=40, d=d, dv=d), True)


def test_strides(device):
    """Slices of a packed tensor, heads before rows, a sequence that all share, an odd address."""
    gen = torch.Generator().manual_seed(3)
    qkv = torch.randn(2, 300, 3, 4, 64, generator=gen).to(device, BF16)
    check(*qkv.unbind(2), True)
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in qkv.unbind(2))
    check(q, k, v, True)
    check(q, k[:1].expand(2, -1, -1, -1), v, True)
    odd = torch.randn(2, 300, 4, 65, generator=gen).to(device, BF16)[..., 1:]
    check(q, odd, v, True)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("smooth_k", [True, False])
def test_numbers_that_are_not_finite(bad, which, smooth_k, device):
    """They do not count for a descale. A mean takes its column along."""
    x = inputs(device)
    x[which][0, 20, 0, 3] = bad
    made = check(*x, smooth_k)
    for descale in made[3:6]:
        assert descale.isfinite().all()
        assert (descale > 0).all()


def test_zeros_and_tiny_numbers(device):
    q, k, v = (torch.zeros_like(x) for x in inputs(device))
    v[0] = 1e-40
    made = check_zeros(q, k, v)
    assert (made.q_descale == 1).all()
    assert (made.k_descale == 1).all()
    assert (made.v_descale[1] == 1).all()
    assert (made.v_descale[0] > 0).all()


def check_zeros(q, k, v) -> Codes:
    made = make_codes(q, k, v, True)
    for x, want in zip(made, on_torch(q.cpu(), k.cpu(), v.cpu(), True)):
        assert torch.equal(x.float().cpu(), want.float())
    return made


def test_the_descale_of_queries_is_that_of_their_kv_head(device):
    q, k, v = inputs(device, h=6, hk=2)
    q[:, :, 4] *= 10
    made = check(q, k, v, True)
    assert (made.q_descale[:, 1] > 5 * made.q_descale[:, 0]).all()


def test_repeatable(device):
    x = inputs(device, sk=3000)
    for a, b in zip(make_codes(*x, True), make_codes(*x, True)):
        assert torch.equal(a.view(torch.uint8) if a.dtype is FP8 else a,
                           b.view(torch.uint8) if b.dtype is FP8 else b)  # fmt: skip


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("lengths", [(600, 0, 1, 70), (3, 1100, 512, 511, 2), (0,), ()], ids=str)
def test_varlen_queries(lengths, dtype, device):
    """Each sequence gets what it gets alone. Some are empty, some have several slices."""
    gen = torch.Generator().manual_seed(5)
    total = sum(lengths) + 5  # the last ones are of no sequence
    q = (torch.randn(total, 6, 128, generator=gen) * torch.rand(total, 1, 1, generator=gen)).to(
        device, dtype
    )
    q[sum(lengths) :] = math.nan
    q = q.transpose(0, 1).contiguous().transpose(0, 1)
    ends = torch.tensor([0, *lengths]).cumsum(0).int().to(device)
    codes, descale = OF_QUERIES(q, ends, 2)
    assert codes.is_contiguous()
    assert (codes.shape, codes.dtype, descale.shape) == (q.shape, FP8, (len(lengths), 2))
    for number, own in enumerate(q[: sum(lengths)].split(lengths) if lengths else ()):
        alone = on_torch(own[None].cpu(), own[None, :, :2].cpu(), own[None, :, :2].cpu(), False)
        rows = slice(int(ends[number]), int(ends[number + 1]))
        assert torch.equal(codes[rows].cpu().float(), alone[0][0].float())
        assert torch.equal(descale[number].cpu(), alone[3][0])


def test_opcheck_of_queries(device):
    q = torch.randn(9, 4, 64).to(device, BF16)
    ends = torch.tensor([0, 4, 9], dtype=torch.int32, device=device)
    opcheck(OF_QUERIES, (q, ends, 2))


@pytest.mark.parametrize(
    "ends", [[0, 6, 13], [-5, 4, 12], [4, 2, 9], [0, 2**31 - 1, -(2**31)], [12, 12, 0]], ids=str
)
def test_any_ends_of_sequences(ends, device):
    """Kernels stay within the tensors. The CPU backend looks at the ends in the next operation."""
    q = poisoned(torch.randn(12, 4, 64).to(device, BF16))
    codes, descale = OF_QUERIES(q, torch.tensor(ends, dtype=torch.int32, device=device), 2)
    assert descale.isfinite().all()
    assert (descale > 0).all()
    assert codes.shape == q.shape


def test_opcheck(device):
    opcheck(torch.ops.flash_attn._make_codes.default, (*inputs(device), True))
