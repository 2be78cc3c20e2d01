"""A step with a cache has no gradient: it runs as under no_grad, and says so once."""

from __future__ import annotations

import warnings

import pytest
import torch
from bad_input import cache, rotary
from compare import assert_bitwise

from flash_attn import flash_attn_with_kvcache
from flash_attn.api import warn
from flash_attn.layers.rotary import apply_rotary_emb
from flash_attn.modules.mha import MHA
from flash_attn.utils.generation import InferenceParams

NAMES = ["q", "k", "v", "rotary_cos", "rotary_sin", "s_aux"]


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch):
    monkeypatch.setattr(warn, "_said", set())


def call(device: str) -> dict:
    s_aux = torch.randn(4, device=device)
    return {**cache(device), **rotary(device), "s_aux": s_aux, "causal": True}


@pytest.mark.parametrize("name", NAMES)
def test_runs_and_warns_once(device, name):
    torch.manual_seed(0)
    plain = call(device)
    torch.manual_seed(0)
    asked = call(device)
    asked[name].requires_grad_()
    expected = flash_attn_with_kvcache(**plain)
    with pytest.warns(UserWarning, match="no backward: a tensor of this call") as raised:
        out, lse = flash_attn_with_kvcache(**asked, return_lse=True)
    assert [warning.filename for warning in raised] == [__file__]
    assert not out.requires_grad
    assert not lse.requires_grad
    assert_bitwise("out", out, expected)
    for written in ("k_cache", "v_cache"):
        assert_bitwise(written, asked[written], plain[written])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        flash_attn_with_kvcache(**asked)


@pytest.mark.parametrize("name", ["k_cache", "v_cache"])
def test_a_cache_that_is_only_read_may_ask_for_one(device, name):
    asked = cache(device) | {"k": None, "v": None}
    asked[name].requires_grad_()
    with pytest.warns(UserWarning, match="no backward"):
        assert not flash_attn_with_kvcache(**asked).requires_grad


def test_nothing_is_said_without_gradients(device):
    asked = cache(device)
    asked["q"].requires_grad_()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")
        flash_attn_with_kvcache(**asked)


@pytest.mark.parametrize("name", ["q", "k"])
def test_compiled(name):
    torch.manual_seed(0)
    plain = cache("cpu")
    torch.manual_seed(0)
    asked = cache("cpu")
    asked[name].requires_grad_()
    expected = flash_attn_with_kvcache(**plain)
    compiled = torch.compile(flash_attn_with_kvcache, backend="aot_eager", fullgraph=True)
    out = compiled(**asked)
    assert not out.requires_grad
    assert_bitwise("out", out, expected)
    for written in ("k_cache", "v_cache"):
        assert_bitwise(written, asked[written], plain[written])


def test_one_memory_for_keys_that_are_values():
    """What both write is the same; and without new keys there is nothing to write."""
    asked = cache("cpu")
    asked |= {"v": asked["k"], "v_cache": asked["k_cache"]}
    two = asked | {"v_cache": asked["k_cache"].clone(), "v": asked["k"].clone()}
    expected = flash_attn_with_kvcache(**two)
    assert_bitwise("out", flash_attn_with_kvcache(**asked), expected)
    flash_attn_with_kvcache(**asked | {"k": None, "v": None})


@pytest.mark.parametrize("use_flash_attn", [True, False])
def test_mha_generates_with_gradients_enabled(use_flash_attn):
    layer = MHA(64, 4, causal=True, layer_idx=0, use_flash_attn=use_flash_attn)
    x = torch.randn(2, 3, 64)
    with torch.no_grad():
        expected = layer(x, inference_params=InferenceParams(8, 2))
    state = InferenceParams(8, 2)
    with pytest.warns(UserWarning, match="no backward"):
        out = layer(x, inference_params=state)
    assert not state.key_value_memory_dict[0].requires_grad
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("name", ["cos", "sin"])
def test_rotary_tables_get_no_gradient(name):
    x = torch.randn(2, 6, 4, 32, requires_grad=True)
    tables = {"cos": torch.rand(16, 16), "sin": torch.rand(16, 16)}
    tables[name].requires_grad_()
    with pytest.warns(UserWarning, match="no gradient in cos and sin"):
        out = apply_rotary_emb(x, **tables)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        apply_rotary_emb(x, **tables)
    out.sum().backward()
    assert x.grad is not None
    assert tables[name].grad is None
    compiled = torch.compile(apply_rotary_emb, backend="aot_eager", fullgraph=True)
    compiled(x, **tables).sum().backward()
    assert tables[name].grad is None
