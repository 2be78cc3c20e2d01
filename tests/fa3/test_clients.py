"""What programs import of FA3 and how they call it: a line of the program each."""

from __future__ import annotations

import importlib.util
import inspect

import pytest
import torch
from torch import Tensor

import flash_attn_interface as fa3

H, HK, D = 4, 2, 32


def tensors(*shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.randn(shape).bfloat16() for shape in shapes]


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


# As in the programs' sources.
IMPORTS = {
    "transformers": "from flash_attn_interface import flash_attn_func, flash_attn_varlen_func, "
    "flash_attn_with_kvcache",
    "diffusers": "from flash_attn_interface import flash_attn_func, flash_attn_varlen_func",
    "transformer-engine": "from flash_attn_interface import flash_attn_func, "
    "flash_attn_varlen_func, flash_attn_with_kvcache, _flash_attn_forward, _flash_attn_backward",
    "megatron-core": "from flash_attn_3.flash_attn_interface import _flash_attn_forward, "
    "flash_attn_with_kvcache",
    "xformers": "from flash_attn_3 import _C",
    "torch": "import flash_attn_interface",
}


@pytest.mark.parametrize("client", IMPORTS)
def test_import(client):
    exec(IMPORTS[client])


def test_what_they_look_for():
    """find_spec of diffusers and xformers; the operators; what Megatron asks of a function."""
    assert importlib.util.find_spec("flash_attn_3") is not None
    assert importlib.util.find_spec("flash_attn_3._C") is not None
    assert hasattr(torch.ops.flash_attn_3, "fwd")
    assert hasattr(torch.ops.flash_attn_3, "bwd")
    assert inspect.isfunction(fa3._flash_attn_forward)
    assert "num_splits" in inspect.signature(fa3.flash_attn_with_kvcache).parameters
    for name in ("deterministic", "softcap", "s_aux", "window_size"):
        assert name in inspect.signature(fa3.flash_attn_varlen_func).parameters


def diffusers(q, k, v):
    out, lse, *_ = fa3.flash_attn_func(
        q=q, k=k, v=v, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None,
        v_descale=None, window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1,
        pack_gqa=None, deterministic=False, sm_margin=0, return_attn_probs=True,
    )  # fmt: skip
    return out, lse, {}


def diffusers_hub(q, k, v):
    """Its context parallelism."""
    none = (None,) * 20
    out, lse, *_ = fa3._flash_attn_forward(
        q, k, v, *none, D**-0.5, causal=True, window_size_left=-1, window_size_right=-1,
        attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, sm_margin=0,
    )  # fmt: skip
    return out, lse, {"causal": True}


def transformer_engine(q, k, v):
    out, lse, *_ = fa3._flash_attn_forward(
        q, k, v, *[None] * 17, q_descale=None, k_descale=None, v_descale=None,
        softmax_scale=D**-0.5, causal=True, window_size_left=-1, window_size_right=0,
    )  # fmt: skip
    return out, lse, {"causal": True}


def transformer_engine_public(q, k, v):
    out = fa3.flash_attn_func(
        q, k, v, softmax_scale=D**-0.5, causal=True, window_size=(4, 0), num_splits=1,
        deterministic=True,
    )  # fmt: skip
    return out, None, {"causal": True, "window_size": (4, 0)}


def torch_sdpa(q, k, v):
    out, lse, _, _ = torch.ops.flash_attn_3.fwd(
        q, k, v, *[None] * 9, q.shape[1], k.shape[1], *[None] * 9, None, True, -1, -1, 0, 0.0,
        True, None, 1, None, 0,
    )  # fmt: skip
    return out, lse, {"causal": True}


def megatron_decode(q, k, v):
    out, lse = fa3.flash_attn_with_kvcache(
        q=q, k_cache=k, v_cache=v, cache_seqlens=ints(*[k.shape[1]] * len(q)), causal=True,
        page_table=None, num_splits=0, return_softmax_lse=True,
    )  # fmt: skip
    return out, lse, {"causal": True}


def sglang(q, k, v):
    """Pages, packed queries, cu_seqlens_k_new without new keys; three names for what returns."""
    batch, rows, keys = q.shape[0], q.shape[1], k.shape[1]
    table = torch.arange(batch, dtype=torch.int32)[:, None]
    ends = torch.arange(batch + 1, dtype=torch.int32)
    o, lse, *rest = fa3.flash_attn_with_kvcache(
        q=q.flatten(0, 1), k_cache=k, v_cache=v, page_table=table,
        cache_seqlens=ints(*[keys] * batch), cu_seqlens_q=ends * rows, cu_seqlens_k_new=ends * keys,
        max_seqlen_q=rows, softmax_scale=D**-0.5, causal=True, window_size=(-1, -1), softcap=0.0,
        k_descale=None, v_descale=None, return_softmax_lse=True, num_splits=1, sinks=None,
    )  # fmt: skip
    assert rest == []
    return (
        o.unflatten(0, (batch, rows)),
        lse.unflatten(1, (batch, rows)).transpose(0, 1),
        {"causal": True},
    )


def vllm(q, k, v):
    """Its call of a varlen function: pages by block_table, lengths by seqused_k, a buffer."""
    batch, rows = q.shape[:2]
    table = torch.arange(batch, dtype=torch.int32)[:, None]
    buffer = torch.empty_like(q.flatten(0, 1))
    out = fa3.flash_attn_varlen_func(
        q=q.flatten(0, 1), k=k, v=v, out=buffer, max_seqlen_q=rows, max_seqlen_k=k.shape[1],
        cu_seqlens_q=torch.arange(batch + 1, dtype=torch.int32) * rows, cu_seqlens_k=None,
        seqused_k=ints(*[k.shape[1]] * batch), softmax_scale=D**-0.5, causal=True,
        window_size=(-1, -1), block_table=table, softcap=0.0, num_splits=0, s_aux=None,
    )  # fmt: skip
    assert out is buffer
    return out.unflatten(0, (batch, rows)), None, {"causal": True}


def verl(q, k, v):
    """Through transformers: packed sequences, and what it passes where a signature has it."""
    batch, rows = q.shape[:2]
    out = fa3.flash_attn_varlen_func(
        q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1),
        cu_seqlens_q=torch.arange(batch + 1, dtype=torch.int32) * rows,
        cu_seqlens_k=torch.arange(batch + 1, dtype=torch.int32) * k.shape[1],
        max_seqlen_q=rows, max_seqlen_k=k.shape[1], causal=True, dropout_p=0.0,
        softmax_scale=None, deterministic=False,
    )  # fmt: skip
    return out.unflatten(0, (batch, rows)), None, {"causal": True}


def gpt_oss(q, k, v):
    """Of transformers, by a kernel of the hub or of LOCAL_KERNELS: a layer with a window."""
    sinks = torch.randn(H, generator=torch.Generator().manual_seed(0)).bfloat16()
    out = fa3.flash_attn_func(
        q, k, v, causal=True, dropout_p=0.0, softmax_scale=D**-0.5, window_size=(3, 3),
        deterministic=False, s_aux=sinks,
    )  # fmt: skip
    return out, None, {"causal": True, "window_size": (3, 0), "learnable_sink": sinks}


CALLS = (
    diffusers, diffusers_hub, transformer_engine, transformer_engine_public, torch_sdpa,
    megatron_decode, sglang, vllm, verl, gpt_oss,
)  # fmt: skip


@pytest.mark.parametrize("client", CALLS, ids=lambda client: client.__name__)
def test_call(client):
    q, k, v = tensors((2, 6, H, D), (2, 9, HK, D), (2, 9, HK, D))
    out, lse, options = client(q, k, v)
    expected, expected_lse = fa3.flash_attn_func(q, k, v, **options, return_attn_probs=True)
    torch.testing.assert_close(out, expected, atol=1e-2, rtol=1e-2)
    if lse is not None:
        torch.testing.assert_close(lse, expected_lse, atol=1e-4, rtol=1e-4)


def test_backward_of_context_parallelism():
    """Transformer Engine's: nine by position behind the log-sum-exp, then keywords."""
    q, k, v = tensors((2, 6, H, D), (2, 9, HK, D), (2, 9, HK, D))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out, lse = fa3.flash_attn_func(*leaves, causal=True, return_attn_probs=True)
    dout = torch.randn_like(out)
    gradients = [torch.empty_like(x) for x in (q, k, v)]
    fa3._flash_attn_backward(
        dout, q, k, v, out.detach(), lse.detach(), *[None] * 6, *gradients,
        softmax_scale=D**-0.5, is_causal=True, window_size_left=-1, window_size_right=0,
        deterministic=True,
    )  # fmt: skip
    for ours, theirs in zip(gradients, torch.autograd.grad(out, leaves, dout)):
        torch.testing.assert_close(ours, theirs, atol=1e-2, rtol=1e-2)


def test_models_of_transformers(monkeypatch):
    """A model by "flash_attention_3", as the client is, but that it asks for a GPU."""
    pytest.importorskip("transformers")
    import transformers.modeling_flash_attention_utils as client

    from tests.clients.models import FAMILIES, batch

    needs = dict(client.FLASH_ATTENTION_COMPATIBILITY_MATRIX[3])
    needs |= {
        "general_availability_check": lambda *_, **__: True,
        "pkg_availability_check": lambda *_, **__: True,
        "supported_devices": ((lambda: True, "cpu"),),
    }
    monkeypatch.setitem(client.FLASH_ATTENTION_COMPATIBILITY_MATRIX, 3, needs)
    monkeypatch.setattr(client, "is_flash_attn_3_available", lambda *_, **__: True)
    kept = {n: getattr(client, n) for n in vars(client) if n.startswith(("_flash_", "_loaded"))}
    for name, value in kept.items():  # what it imports once, for one implementation
        monkeypatch.setattr(client, name, value)
    monkeypatch.setattr(client, "_loaded_implementation", None)
    weights = FAMILIES["llama"].build("eager", torch.bfloat16, "cpu").state_dict()
    eager, model = (
        FAMILIES["llama"].build(kind, torch.float32, "cpu", weights)
        for kind in ("eager", "flash_attention_3")
    )
    x = batch("cpu")
    used = x["attention_mask"].bool()
    logits = model(**x).logits[used]
    assert client._flash_varlen_fn is fa3.flash_attn_varlen_func
    torch.testing.assert_close(logits, eager(**x).logits[used], atol=1e-4, rtol=1e-4)
