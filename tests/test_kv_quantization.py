"""Keys and values as codes outside of a call: rounding, descales, calibration."""

from __future__ import annotations

import pytest
import torch
from compare import assert_bitwise
from fp8_cases import FP8, bits, nearest
from torch import Tensor

from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache
from flash_attn.utils.kv_quantization import KVScales, quantize_kv

BF16 = torch.bfloat16


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no GPU")])])  # fmt: skip
def device(request) -> str:
    return request.param


def kv(device, *shape: int, heads_k: int = 2) -> list[Tensor]:
    """With heads of different sizes; the head_dim of v differs."""
    size = torch.tensor([0.1, 30.0])[:heads_k, None].to(device)
    return [(torch.randn(*shape, heads_k, d, device=device) * size).to(BF16) for d in (64, 32)]


def wide(descale: Tensor, x: Tensor) -> Tensor:
    """A descale of quantize_kv beside x."""
    if descale.dim() == 2 and x.dim() == 4:
        descale = descale[:, None]
    return descale[..., None].cpu()


@pytest.mark.parametrize("shape", [(3, 20), (50,)], ids=str)
@pytest.mark.parametrize("per", ["head", "token", "tensor"])
def test_chosen_descales(shape, per, device):
    """The largest number becomes the largest code, of each head, row, or of all."""
    k, v = kv(device, *shape)
    k8, v8, k_descale, v_descale = quantize_kv(k, v, per=per)
    for x, codes, descale in ((k, k8, k_descale), (v, v8, v_descale)):
        assert codes.dtype is FP8
        assert codes.shape == x.shape
        assert descale.shape == (x.shape[:-1] if per == "token" else (*shape[:-1], 2))
        assert_bitwise("codes", bits(codes), bits(nearest(x.cpu().float() / wide(descale, x))))
        sizes = codes.cpu().float().abs()
        largest = {"token": sizes.amax(-1), "tensor": sizes.amax()}.get(per)
        if largest is None:
            largest = sizes.amax((-1, -3))
        assert_bitwise("largest code", largest, torch.full_like(largest, 448))


def test_descales_of_one_number(device):
    k, v = kv(device, 3, 20)
    _, _, k_descale, _ = quantize_kv(k, v, per="tensor")
    assert bool((k_descale.cpu() == k.abs().max().float().cpu() / 448).all())


@pytest.mark.parametrize("kind", ["number", "heads", "batch", "rows"])
def test_descales_that_are_given(kind, device):
    k, v = kv(device, 3, 20)
    descale = {"number": 0.5, "heads": torch.tensor([0.5, 2.0]), "batch": torch.rand(3, 2) + 1,
               "rows": torch.rand(3, 20, 2) + 1}[kind]  # fmt: skip
    if isinstance(descale, Tensor):
        descale = descale.to(device)
    k8, v8, *returned = quantize_kv(k, v, k_descale=descale, v_descale=descale)
    assert returned[0] is returned[1] is descale
    of_rows = wide(torch.as_tensor(descale), k)
    for x, codes in ((k, k8), (v, v8)):
        assert_bitwise("codes", bits(codes), bits(nearest(x.cpu().float() / of_rows)))


def test_numbers_that_are_not_finite(device):
    k, v = kv(device, 1, 4)
    k[0, 0, 0, 0], k[0, 1, 1, 1], v[0, 2, 0, 3] = float("inf"), float("nan"), float("-inf")
    k8, v8, k_descale, v_descale = quantize_kv(k, v)
    assert bool(k_descale.isfinite().all())
    assert bool(v_descale.isfinite().all())
    assert k8[0, 0, 0, 0].float() == 448
    assert bool(k8[0, 1, 1, 1].isnan())
    assert v8[0, 2, 0, 3].float() == -448


def test_zeros_and_no_rows(device):
    zeros = torch.zeros(2, 3, 2, 8, dtype=BF16, device=device)
    for per in ("head", "token", "tensor"):
        k8, _, descale, _ = quantize_kv(zeros, zeros, per=per)
        assert bool((descale == 1).all())
        assert not bits(k8).any()
        for x in (zeros[:, :0], zeros[0, :0]):
            k8, _, descale, _ = quantize_kv(x, x, per=per)
            assert k8.shape == x.shape
            assert bool((descale == 1).all())
    tiny = torch.full((1, 1, 1, 8), 1e-38, device=device)
    assert bool((quantize_kv(tiny, tiny)[2] > 0).all())


@pytest.mark.parametrize("per", ["head", "token"])
def test_a_prompt_and_then_tokens(per, device):
    """Codes of a prompt go into a cache; a call appends to it, by the same descales."""
    k, v = kv(device, 2, 20)
    q = torch.randn(2, 1, 4, 64, device=device).to(BF16)
    prompt, new = slice(0, 19), slice(19, 20)
    k8, v8, k_descale, v_descale = quantize_kv(k, v, per=per)
    k_cache, v_cache = (torch.zeros_like(x) for x in (k8, v8))
    k_cache[:, prompt], v_cache[:, prompt] = k8[:, prompt], v8[:, prompt]
    descales = {"k_descale": k_descale, "v_descale": v_descale}
    flash_attn_with_kvcache(
        q, k_cache, v_cache, k[:, new].contiguous(), v[:, new].contiguous(), cache_seqlens=19,
        **descales,
    )  # fmt: skip
    assert_bitwise("k_cache", bits(k_cache), bits(k8))
    assert_bitwise("v_cache", bits(v_cache), bits(v8))


def test_pages(device):
    k, v = kv(device, 5, 16)
    scales = KVScales(2, device=device)
    scales.observe(k, v)
    descales = scales.descales(3)
    k8, v8, *_ = quantize_kv(k, v, k_descale=descales[0][0], v_descale=descales[1][0])
    ends = torch.tensor([0, 1, 2, 3], dtype=torch.int32, device=device)
    table = torch.tensor([[4], [0], [2]], dtype=torch.int32, device=device)
    q = torch.randn(3, 4, 64, device=device).to(BF16)
    out = flash_attn_varlen_func(
        q, k8, v8, ends, ends * 16, 1, 16, block_table=table, k_descale=descales[0],
        v_descale=descales[1],
    )  # fmt: skip
    plain = flash_attn_varlen_func(q, k, v, ends, ends * 16, 1, 16, block_table=table)
    largest = v.float().abs().amax((0, 1, 3)).repeat_interleave(2)[:, None]
    error = (out - plain).float().abs() / largest
    assert error.max() < 2**-4  # codes are off by at most that of their size


# --- Calibration ----------------------------------------------------------------------------------


def test_scales_are_of_the_largest_seen(device):
    scales = KVScales(2, margin=2.0, device=device)
    batches = [kv(device, 3, 20), kv(device, 50)]
    for k, v in batches:
        scales.observe(k, v)
    for n, descale in enumerate(scales.descales(7)):
        assert descale.shape == (7, 2)
        seen = torch.stack([x[n].float().abs().flatten(0, -3).amax((0, 2)) for x in batches])
        # On the CPU, because a GPU multiplies by the reciprocal of a number.
        assert_bitwise("descale", descale.cpu(), (seen.amax(0).cpu() * 2 / 448).expand(7, 2))


def test_scales_are_saved_and_loaded(device):
    scales, others = (KVScales(2, device=device) for _ in range(2))
    scales.observe(*kv(device, 3, 20))
    others.load_state_dict(scales.state_dict())
    assert sorted(scales.state_dict()) == ["k_amax", "v_amax"]
    assert_bitwise("descale", others.descales(1)[0], scales.descales(1)[0])
    assert "heads_k=2, margin=1" in repr(scales)


def test_a_head_that_was_not_seen(device):
    scales = KVScales(3, device=device)
    assert all(bool((descale == 1).all()) for descale in scales.descales(2))
    scales.observe(*(torch.full((1, 3, 8), float("nan"), device=device) for _ in "kv"))
    scales.observe(*(torch.zeros(0, 3, 8, device=device) for _ in "kv"))
    assert all(bool((descale == 1).all()) for descale in scales.descales(2))


def test_refused():
    k, v = kv("cpu", 3, 20)
    for arguments, said in (
        ({"per": "page"}, 'per: got \'page\'; "head", "token" or "tensor"'),
        ({"k_descale": torch.ones(4)}, r"k_descale: got shape \(4,\); .* \(3, 20, 2, 64\)"),
        ({"k_descale": 0.0}, "k_descale: got 0.0; a positive number"),
        ({"v_descale": torch.ones(20, 2)}, r"v_descale: got shape \(20, 2\)"),
    ):
        with pytest.raises(ValueError, match=said):
            quantize_kv(k, v, **arguments)
    with pytest.raises(ValueError, match=r"k: got shape \(2, 64\) of torch.bfloat16"):
        quantize_kv(k[0, 0], v)
    with pytest.raises(ValueError, match=r"v: got shape .* of torch.float8_e4m3fn"):
        quantize_kv(k, v.to(FP8))
    with pytest.raises(TypeError, match="k: got NoneType"):
        quantize_kv(None, v)
    for margin in (0, -1.0, float("nan")):
        with pytest.raises(ValueError, match=f"margin: got {margin}"):
            KVScales(2, margin=margin)
    with pytest.raises(ValueError, match=r"k: got shape \(3, 20, 2, 64\); \(…, 4, head_dim\)"):
        KVScales(4).observe(k, v)
