"""A client as it is: a transformer of `diffusers`, and its back ends for this package."""

from __future__ import annotations

import pytest
import torch
from compare import assert_bitwise

import flash_attn
import flash_attn_interface as fa3
from tests.clients.no_worse import assert_no_worse, step

diffusers = pytest.importorskip("diffusers")

from diffusers.models import attention_dispatch as client  # noqa: E402

SIZES = dict(
    patch_size=1, in_channels=8, num_layers=1, num_single_layers=1, attention_head_dim=16,
    num_attention_heads=4, joint_attention_dim=32, pooled_projection_dim=32,
    axes_dims_rope=(4, 4, 8),
)  # fmt: skip
WRITTEN_OUT = "_native_math"


def flux(backend: str, dtype: torch.dtype, device: str) -> torch.nn.Module:
    torch.manual_seed(0)
    model = diffusers.FluxTransformer2DModel(**SIZES)
    for parameter in model.parameters():
        parameter.data.copy_((torch.randn_like(parameter) * 0.3).bfloat16())
    model = model.to(device, dtype)
    model.set_attention_backend(backend)
    return model


def test_it_takes_the_package():
    assert client._CAN_USE_FLASH_ATTN
    assert client.flash_attn_func is flash_attn.flash_attn_func


def test_training(device):
    """Joint attention of 6 tokens of text and 20 of an image."""
    image, text, pooled = (torch.randn(2, *shape) for shape in ((20, 8), (6, 32), (32,)))
    results = []
    for backend, dtype in (
        (WRITTEN_OUT, torch.float32), (WRITTEN_OUT, torch.bfloat16), ("flash", torch.bfloat16)
    ):  # fmt: skip
        model = flux(backend, dtype, device)
        out = model(
            hidden_states=image.to(device, dtype),
            encoder_hidden_states=text.to(device, dtype),
            pooled_projections=pooled.to(device, dtype),
            timestep=torch.full((2,), 0.5, device=device, dtype=dtype),
            img_ids=torch.stack([torch.arange(20)] * 3, dim=-1).to(device, dtype),
            txt_ids=torch.zeros(6, 3, device=device, dtype=dtype),
        )
        results.append(step(model, out.sample))
    assert_no_worse(*results)


@pytest.fixture
def with_fa3(monkeypatch):
    """As where the distribution flash-attn-3 is installed."""
    monkeypatch.setattr(client, "_CAN_USE_FLASH_ATTN_3", True)
    for name in ("flash_attn_func", "flash_attn_varlen_func"):
        taken = name.replace("flash_attn", "flash_attn_3")
        assert hasattr(client, taken)
        monkeypatch.setattr(client, taken, getattr(fa3, name))


@pytest.mark.parametrize("backend", ["flash", "flash_varlen", "_flash_varlen_3"])
@pytest.mark.parametrize("causal", [False, True])
def test_back_ends(device, backend, causal, with_fa3):
    q, k, v = (torch.randn(2, 24, 4, 16, device=device).bfloat16() for _ in "qkv")
    dout = torch.randn_like(q, dtype=torch.float32)
    results = []
    for name, dtype in (
        (WRITTEN_OUT, torch.float32), (WRITTEN_OUT, torch.bfloat16), (backend, torch.bfloat16)
    ):  # fmt: skip
        inputs = {n: x.to(dtype).requires_grad_() for n, x in zip("qkv", (q, k, v))}
        out = client.dispatch_attention_fn(
            *inputs.values(), is_causal=causal, backend=client.AttentionBackendName(name)
        )
        gradients = torch.autograd.grad(out, tuple(inputs.values()), dout.to(dtype))
        results.append({"out": out.detach(), **dict(zip(inputs, gradients))})
    assert_no_worse(*results)


@pytest.mark.parametrize("causal", [False, True])
def test_flash_3(device, causal, with_fa3):
    """An operator of its own for CUDA tensors, without a gradient; here what it calls, too."""
    q, k, v = (torch.randn(2, 24, 4, 16, device=device).bfloat16() for _ in "qkv")
    expected, lse = flash_attn.flash_attn_func(q, k, v, causal=causal, return_lse=True)
    got = client._wrapped_flash_attn_3._init_fn(q, k, v, causal=causal)
    assert_bitwise("out", got[0], expected)
    assert_bitwise("lse", got[1], lse.transpose(1, 2))
    if device == "cuda":
        name = client.AttentionBackendName("_flash_3")
        out = client.dispatch_attention_fn(q, k, v, is_causal=causal, backend=name)
        assert_bitwise("out", out, expected)
