"""The layer of gated linear attention: its parameters, what it computes, packing, caches."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from flash_attn.linear import GatedLinearAttention, LinearCache
from tests.linear.reference import recurrence

SIZES = dict(hidden_size=32, num_heads=4, layer_idx=3)


def layer(device: str, **options) -> GatedLinearAttention:
    torch.manual_seed(3)
    made = GatedLinearAttention(**SIZES | options).to(device, torch.float64)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return made


def by_hand(m: GatedLinearAttention, x: torch.Tensor) -> torch.Tensor:
    """The layer's definition, for its default norm and gate."""
    p = dict(m.named_parameters())

    def conv(name, t):
        if not m.use_short_conv:
            return t
        weight = p[f"{name}_conv1d.weight"]
        out = F.conv1d(t.mT, weight, padding=weight.shape[-1] - 1, groups=t.shape[-1])
        return F.silu(out[..., : t.shape[1]].mT)

    q, k, v = (conv(n, x @ p[f"{n}_proj.weight"].mT) for n in "qkv")
    low = x @ p["gk_proj.0.weight"].mT @ p["gk_proj.1.weight"].mT + p["gk_proj.1.bias"]
    g = F.logsigmoid(low) / m.gate_logit_normalizer
    heads, groups = m.num_heads, m.num_kv_groups
    q = q.unflatten(-1, (heads, -1))
    k, g, v = (
        t.unflatten(-1, (heads // groups, -1)).repeat_interleave(groups, 2) for t in (k, g, v)
    )
    o, _ = recurrence(q, k, v, g, q.shape[-1] ** -0.5)
    o = o * (o.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * p["g_norm_swish_gate.weight"]
    gate = (x @ p["g_proj.weight"].mT).unflatten(-1, (heads, -1))
    return (o * F.silu(gate)).flatten(2) @ p["o_proj.weight"].mT


@pytest.mark.parametrize("T", [1, 20, 90])
@pytest.mark.parametrize("num_kv_heads", [None, 2])
@pytest.mark.parametrize("conv", [False, True])
def test_definition(conv, num_kv_heads, T, backend):
    m = layer(backend.device, use_short_conv=conv, num_kv_heads=num_kv_heads)
    x = torch.randn(2, T, 32, dtype=torch.float64, device=backend.device)
    o, weights, cache = m(x)
    assert weights is None
    assert cache is None
    # Gates are computed in fp32.
    torch.testing.assert_close(o, by_hand(m, x), rtol=1e-5, atol=1e-5)


def test_parameters():
    """Weights of checkpoints load by these names."""
    names = {n: tuple(x.shape) for n, x in layer("cpu", use_short_conv=True).named_parameters()}
    assert names == {
        "q_proj.weight": (16, 32),
        "k_proj.weight": (16, 32),
        "v_proj.weight": (32, 32),
        "g_proj.weight": (32, 32),
        "q_conv1d.weight": (16, 1, 4),
        "k_conv1d.weight": (16, 1, 4),
        "v_conv1d.weight": (32, 1, 4),
        "gk_proj.0.weight": (16, 32),
        "gk_proj.1.weight": (16, 16),
        "gk_proj.1.bias": (16,),
        "o_proj.weight": (32, 32),
        "g_norm_swish_gate.weight": (8,),
    }
    plain = dict(layer("cpu", use_output_gate=False, fuse_norm=False).named_parameters())
    assert "g_norm.weight" in plain
    assert "g_proj.weight" not in plain


@pytest.mark.parametrize(
    "options",
    [
        dict(mode="fused_recurrent"),
        dict(mode="fused_chunk"),
        dict(fuse_norm=False),
        dict(gate_fn="silu"),
    ],
)
def test_same_by_another_way(options, backend):
    x = torch.randn(2, 90, 32, dtype=torch.float64, device=backend.device)
    m, other = layer(backend.device), layer(backend.device, **options)
    weights = m.state_dict()
    if "g_norm.weight" in other.state_dict():
        weights["g_norm.weight"] = weights.pop("g_norm_swish_gate.weight")
    other.load_state_dict(weights)
    torch.testing.assert_close(other(x)[0], m(x)[0])


@pytest.mark.parametrize("feature_map", ["relu", "elu", "identity"])
def test_features_and_clamp(feature_map, backend):
    x = torch.randn(1, 10, 32, dtype=torch.float64, device=backend.device)
    m = layer(backend.device, feature_map=feature_map, clamp_min=-0.01, use_output_gate=False)
    o, *_ = m(x)
    o.sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in m.parameters())
    clamped = layer(backend.device, feature_map=feature_map, use_output_gate=False)
    assert not torch.allclose(clamped(x)[0], o)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("conv", [False, True])
def test_padding_and_packing(conv, side, backend):
    """A mask's rows, and packed sequences, are as each sequence by itself."""
    m = layer(backend.device, use_short_conv=conv)
    lengths, longest = (70, 13, 1), 70
    rows = [torch.randn(1, n, 32, dtype=torch.float64, device=backend.device) for n in lengths]
    x = torch.full((3, longest, 32), torch.nan, dtype=torch.float64, device=backend.device)
    mask = torch.zeros(3, longest, dtype=torch.long, device=backend.device)
    places = [slice(longest - n, None) if side == "left" else slice(0, n) for n in lengths]
    for b, (row, place) in enumerate(zip(rows, places)):
        x[b, place], mask[b, place] = row[0], 1
    o, *_ = m(x, mask)
    edges = torch.tensor([0, 70, 83, 84], device=backend.device)
    packed, *_ = m(torch.cat(rows, 1), cu_seqlens=edges)
    for b, (row, place) in enumerate(zip(rows, places)):
        alone = m(row)[0][0]
        torch.testing.assert_close(o[b, place], alone)
        torch.testing.assert_close(packed[0, edges[b] : edges[b + 1]], alone)
        assert not o[b][mask[b] == 0].any()


def test_cache(backend):
    """A prompt and then a token at a time is the whole sequence at once."""
    m = layer(backend.device, use_short_conv=True).eval()
    x = torch.randn(2, 80, 32, dtype=torch.float64, device=backend.device)
    cache, parts = LinearCache(), []
    with torch.no_grad():
        want, *_ = m(x)
        for part in x.split([70, 1, 1, 3, 5], 1):
            o, _, same = m(part, past_key_values=cache, use_cache=True)
            assert same is cache
            parts.append(o)
    torch.testing.assert_close(torch.cat(parts, 1), want)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(mode="parallel"), "mode"),
        (dict(gate_fn="tanh"), "gate_fn"),
        (dict(feature_map="dpfp"), "feature_map"),
        (dict(num_kv_heads=3), "num_kv_heads"),
        (dict(expand_k=0.3), "expand_k"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(ValueError, match=message):
        GatedLinearAttention(**SIZES | options)


def test_wrong_calls():
    x = torch.randn(2, 5, 32, dtype=torch.float64)
    with pytest.raises(ValueError, match="attention_mask"):
        layer("cpu")(x, torch.ones(2, 4))
    with pytest.raises(ValueError, match="layer_idx"):
        layer("cpu", layer_idx=None)(x, past_key_values=LinearCache())
