"""``flash_attn.fp8.attention``: from 16 bits to codes and through attention in one call."""

from __future__ import annotations

import pytest
import torch
from cases import BF16, FP16
from torch import Tensor

from flash_attn import flash_attn_func
from flash_attn.fp8 import attention


def inputs(device, offset: float = 0.0, dtype=BF16) -> list[Tensor]:
    """Keys of which some channels lie far from 0."""
    # The same numbers on every device: how far rounded logits lie from others depends on them.
    q, k, v = (torch.randn(2, n, h, 64) for n, h in ((40, 4), (70, 2), (70, 2)))
    k[..., ::16] += offset
    return [x.to(device, dtype) for x in (q, k, v)]


def error(out: Tensor, expected: Tensor) -> float:
    return float((out.float() - expected.float()).norm() / expected.float().norm())


@pytest.mark.parametrize(
    "options",
    [{}, {"causal": True}, {"window_size": (20, 5)}, {"softcap": 10.0}, {"softmax_scale": 0.2}],
    ids=str,
)
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_near_16_bits(options, dtype, device):
    q, k, v = inputs(device, dtype=dtype)
    out, lse = attention(q, k, v, **options, return_lse=True)
    expected, expected_lse = flash_attn_func(q, k, v, **options, return_lse=True)
    assert out.dtype == dtype
    assert error(out, expected) < 0.06
    torch.testing.assert_close(lse, expected_lse, atol=0.1, rtol=0)


def test_sinks_and_slopes(device):
    q, k, v = inputs(device)
    for given in ({"s_aux": torch.ones(4, device=device)},
                  {"alibi_slopes": torch.full((4,), 0.1, device=device)}):  # fmt: skip
        assert error(attention(q, k, v, **given), flash_attn_func(q, k, v, **given)) < 0.06


def test_a_mean_costs_nothing(device):
    """Channels far from 0 take the codes of the others, unless the mean is off."""
    q, k, v = inputs(device, offset=30.0)
    expected, expected_lse = flash_attn_func(q, k, v, return_lse=True)
    out, lse = attention(q, k, v, return_lse=True)
    rough = attention(q, k, v, smooth_k=False)
    assert error(out, expected) < 0.1
    assert error(rough, expected) > 2 * error(out, expected)
    torch.testing.assert_close(lse, expected_lse, atol=0.1, rtol=1e-2)


def test_compiled(device):
    q, k, v = inputs(device)
    run = torch.compile(lambda *x: attention(*x, causal=True), fullgraph=True, backend="aot_eager")
    assert torch.equal(run(q, k, v), attention(q, k, v, causal=True))


def test_no_keys(device):
    q = torch.randn(2, 5, 4, 32, device=device).to(BF16)
    k = torch.randn(2, 0, 2, 32, device=device).to(BF16)
    out, lse = attention(q, k, k, return_lse=True)
    assert not out.any()
    assert (lse == float("-inf")).all()
    assert attention(q[:, :0], q, q).shape == (2, 0, 4, 32)


def test_refused(device):
    q, k, v = inputs(device)
    with pytest.raises(RuntimeError, match="q: requires_grad is set; attention of codes has no"):
        attention(q.requires_grad_(), k, v)
    with pytest.raises(TypeError, match="smooth_k: got 1"):
        attention(q.detach(), k, v, smooth_k=1)
    with pytest.raises(ValueError, match="k: got dtype"):
        attention(q.detach(), k.float(), v)
