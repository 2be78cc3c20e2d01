"""What programs import of FA3 and how they call it: a line of the program each."""

from __future__ import annotations

import importlib.util
import inspect

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import flash_attn_interface as fa3

H, HK, D = 4, 2, 32
BATCH, ROWS, KEYS = 2, 6, 9


def tensors(device: str) -> list[Tensor]:
    shapes = (BATCH, ROWS, H, D), (BATCH, KEYS, HK, D), (BATCH, KEYS, HK, D)
    return [torch.randn(shape).bfloat16().to(device) for shape in shapes]


def ints(like: Tensor, *values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=like.device)


def ends(like: Tensor, rows: int) -> Tensor:
    return ints(like, *range(0, (BATCH + 1) * rows, rows))


def each(like: Tensor, rows: int) -> Tensor:
    """The same number of every sequence."""
    return ends(like, rows).diff()


PADDING = 2


def padded(x: Tensor) -> Tensor:
    """Packed sequences, with rows of no meaning behind each."""
    return F.pad(x, (0, 0, 0, 0, 0, PADDING), value=float("nan")).flatten(0, 1)


def pages(x: Tensor) -> Tensor:
    """A page for each sequence, the last one's first, with room that holds no keys."""
    return padded(x.flip(0)).unflatten(0, (BATCH, -1))


def table(like: Tensor) -> Tensor:
    return ints(like, *reversed(range(BATCH)))[:, None]


def unpacked(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    return out.unflatten(0, (BATCH, -1)), lse.unflatten(1, (BATCH, -1)).transpose(0, 1)


# As in the programs' sources. vLLM has a copy of its own, verl and axolotl ask transformers.
IMPORTS = {
    "transformers": "from flash_attn_interface import flash_attn_func, flash_attn_varlen_func, "
    "flash_attn_with_kvcache",
    "diffusers": "from flash_attn_interface import flash_attn_func, flash_attn_varlen_func",
    "transformer-engine": "from flash_attn_interface import flash_attn_func, "
    "flash_attn_varlen_func, flash_attn_with_kvcache, _flash_attn_forward, _flash_attn_backward",
    "megatron-core": "from flash_attn_3.flash_attn_interface import _flash_attn_forward, "
    "flash_attn_with_kvcache",
    "megatron-core, MLA": "from flash_mla import flash_mla_with_kvcache, get_mla_metadata",
    # Of kernels-community/sgl-flash-attn3, which a folder of local_kernel stands for.
    "sglang": "import flash_attn_interface as ops; ops.flash_attn_with_kvcache, "
    "ops.flash_attn_varlen_func",
    "sglang, MUSA": "from flash_attn_interface import flash_attn_varlen_func, "
    "flash_attn_with_kvcache, get_scheduler_metadata",
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
    """Its context parallelism: 20 by position behind v, up to the descales."""
    out, lse, *_ = fa3._flash_attn_forward(
        q, k, v, *[None] * 9, ROWS, KEYS, *[None] * 9, softmax_scale=D**-0.5, causal=True,
        window_size_left=-1, window_size_right=0,
    )  # fmt: skip
    return out, lse, {"causal": True}


def transformer_engine_packed(q, k, v):
    """The same of packed sequences."""
    lengths = (ends(q, ROWS), ends(q, KEYS), None, None, None, ROWS, KEYS)
    out, lse, *_ = fa3._flash_attn_forward(
        *(x.flatten(0, 1) for x in (q, k, v)), *[None] * 4, *lengths, *[None] * 9,
        softmax_scale=D**-0.5, causal=True, window_size_left=-1, window_size_right=0,
    )  # fmt: skip
    return *unpacked(out, lse), {"causal": True}


def transformer_engine_public(q, k, v):
    out = fa3.flash_attn_func(
        q, k, v, softmax_scale=D**-0.5, causal=True, window_size=(4, 0), num_splits=1,
        deterministic=True,
    )  # fmt: skip
    return out, None, {"causal": True, "window_size": (4, 0)}


def transformer_engine_padding(q, k, v):
    """Padding between sequences."""
    out = fa3.flash_attn_varlen_func(
        *(padded(x) for x in (q, k, v)), ends(q, ROWS + PADDING), ends(q, KEYS + PADDING),
        ROWS + PADDING, KEYS + PADDING, softmax_scale=D**-0.5, causal=True, window_size=(-1, 0),
        num_splits=1, seqused_q=each(q, ROWS), seqused_k=each(q, KEYS),
        deterministic=True,
    )  # fmt: skip
    return out.unflatten(0, (BATCH, -1))[:, :ROWS], None, {"causal": True}


def transformer_engine_inference(q, k, v):
    """Packed queries against pages."""
    out = fa3.flash_attn_with_kvcache(
        q.flatten(0, 1), pages(k), pages(v), softmax_scale=D**-0.5, causal=True,
        window_size=(-1, 0), num_splits=1, cu_seqlens_q=ends(q, ROWS), max_seqlen_q=ROWS,
        cache_seqlens=each(q, KEYS), page_table=table(q),
    )  # fmt: skip
    return out.unflatten(0, (BATCH, -1)), None, {"causal": True}


def torch_sdpa(q, k, v):
    out, lse, _, _ = torch.ops.flash_attn_3.fwd(
        q, k, v, *[None] * 9, q.shape[1], k.shape[1], *[None] * 9, None, True, -1, -1, 0, 0.0,
        True, None, 1, None, 0,
    )  # fmt: skip
    return out, lse, {"causal": True}


NONE_OF_MEGATRON = (
    "k_new v_new qv out out_ cu_seqlens_k cu_seqlens_k_new seqused_q kv_batch_idx leftpad_k "
    "rotary_cos rotary_sin seqlens_rotary q_descale k_descale v_descale scheduler_metadata pack_gqa"
)


def megatron_prefill(q, k, v):
    """All names that it knows from some release, those alone that the signature has."""
    known = dict.fromkeys(NONE_OF_MEGATRON.split()) | {
        "q": q.flatten(0, 1), "k": pages(k), "v": pages(v), "cu_seqlens_q": ends(q, ROWS),
        "seqused_k": each(q, KEYS), "max_seqlen_q": ROWS, "max_seqlen_k": KEYS,
        "page_table": table(q), "softmax_scale": D**-0.5, "causal": True, "attention_chunk": 0,
        "softcap": 0.0, "window_size": (-1, -1), "window_size_left": -1, "window_size_right": -1,
        "rotary_interleaved": True, "num_splits": 0, "sm_margin": 0,
    }  # fmt: skip
    taken = inspect.signature(fa3._flash_attn_forward).parameters
    out, lse, *_ = fa3._flash_attn_forward(**{n: known[n] for n in taken if n in known})
    return *unpacked(out, lse), {"causal": True}


def megatron_decode(q, k, v):
    out, lse = fa3.flash_attn_with_kvcache(
        q=q, k_cache=pages(k), v_cache=pages(v), cache_seqlens=each(q, KEYS), causal=True,
        page_table=table(q), num_splits=0, return_softmax_lse=True,
    )  # fmt: skip
    return out, lse, {"causal": True}


def sglang(q, k, v):
    """Pages, packed queries, cu_seqlens_k_new without new keys; by position up to pack_gqa; three
    names for what returns."""
    sinks = torch.randn(H, generator=torch.Generator().manual_seed(0)).bfloat16().to(q.device)
    buffer = torch.empty_like(q.flatten(0, 1))
    lengths = (table(q), ends(q, ROWS), ends(q, KEYS), ROWS)
    behind_scale = (True, (-1, -1), None, 0.0, True, None, 0, None)  # None: attention_chunk
    o, lse, *rest = fa3.flash_attn_with_kvcache(
        q.flatten(0, 1), pages(k), pages(v), *[None] * 5, each(q, KEYS), None, None, *lengths,
        *[None] * 4, D**-0.5, *behind_scale, sm_margin=0, only_qv=False, return_softmax_lse=True,
        sinks=sinks, out=buffer,
    )  # fmt: skip
    assert rest == []
    assert o is buffer
    return *unpacked(o, lse), {"causal": True, "learnable_sink": sinks}


def sglang_packed(q, k, v):
    """Its varlen function, of pages."""
    buffer = torch.empty_like(q.flatten(0, 1))
    o, lse, *_ = fa3.flash_attn_varlen_func(
        q=q.flatten(0, 1), k=pages(k), v=pages(v), cu_seqlens_q=ends(q, ROWS), cu_seqlens_k=None,
        max_seqlen_q=ROWS, max_seqlen_k=KEYS, seqused_q=None, seqused_k=each(q, KEYS),
        page_table=table(q), softmax_scale=D**-0.5, causal=True, qv=None, q_descale=None,
        k_descale=None, v_descale=None, window_size=(-1, -1), attention_chunk=0, softcap=0.0,
        num_splits=1, pack_gqa=None, only_qv=False, sm_margin=0, return_softmax_lse=True,
        sinks=None, out=buffer,
    )  # fmt: skip
    assert o is buffer
    return *unpacked(o, lse), {"causal": True}


def vllm(q, k, v):
    """Its call of a varlen function: pages by block_table, lengths by seqused_k, a buffer."""
    buffer = torch.empty_like(q.flatten(0, 1))
    out = fa3.flash_attn_varlen_func(
        q=q.flatten(0, 1), k=pages(k), v=pages(v), out=buffer, max_seqlen_q=ROWS, max_seqlen_k=KEYS,
        cu_seqlens_q=ends(q, ROWS), cu_seqlens_k=None, seqused_k=each(q, KEYS),
        softmax_scale=D**-0.5, causal=True, window_size=(-1, -1), block_table=table(q),
        softcap=0.0, num_splits=0, s_aux=None,
    )  # fmt: skip
    assert out is buffer
    return out.unflatten(0, (BATCH, -1)), None, {"causal": True}


def verl(q, k, v):
    """Through transformers: packed sequences, and what it passes where a signature has it."""
    out = fa3.flash_attn_varlen_func(
        q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), cu_seqlens_q=ends(q, ROWS),
        cu_seqlens_k=ends(q, KEYS), max_seqlen_q=ROWS, max_seqlen_k=KEYS, causal=True,
        dropout_p=0.0, softmax_scale=None, deterministic=False,
    )  # fmt: skip
    return out.unflatten(0, (BATCH, -1)), None, {"causal": True}


def gpt_oss(q, k, v):
    """Of transformers, by a kernel of the hub or of LOCAL_KERNELS: a layer with a window."""
    sinks = torch.randn(H, generator=torch.Generator().manual_seed(0)).bfloat16().to(q.device)
    out = fa3.flash_attn_func(
        q, k, v, causal=True, dropout_p=0.0, softmax_scale=D**-0.5, window_size=(3, 3),
        deterministic=False, s_aux=sinks,
    )  # fmt: skip
    return out, None, {"causal": True, "window_size": (3, 0), "learnable_sink": sinks}


CALLS = (
    diffusers, diffusers_hub, transformer_engine, transformer_engine_packed,
    transformer_engine_public, transformer_engine_padding, transformer_engine_inference,
    torch_sdpa, megatron_prefill, megatron_decode, sglang, sglang_packed, vllm, verl, gpt_oss,
)  # fmt: skip


@pytest.mark.parametrize("client", CALLS, ids=lambda client: client.__name__)
def test_call(client, device):
    q, k, v = tensors(device)
    out, lse, options = client(q, k, v)
    expected, expected_lse = fa3.flash_attn_func(q, k, v, **options, return_attn_probs=True)
    torch.testing.assert_close(out, expected, atol=1e-2, rtol=1e-2)
    if lse is not None:
        torch.testing.assert_close(lse, expected_lse, atol=1e-4, rtol=1e-4)


LAYOUTS = ("dense", "packed", "padding")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_backward_of_context_parallelism(layout, device):
    """Transformer Engine's: nine by position behind the log-sum-exp, then keywords."""
    q, k, v = tensors(device)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out, lse = fa3.flash_attn_func(*leaves, causal=True, return_attn_probs=True)
    dout = torch.randn_like(out)
    expected = torch.autograd.grad(out, leaves, dout)
    x, lse, lengths = [dout, q, k, v, out.detach()], lse.detach(), [None] * 4 + [ROWS, KEYS]
    if layout == "packed":
        x, lse = [y.flatten(0, 1) for y in x], lse.transpose(0, 1).flatten(1)
        lengths[:2] = ends(q, ROWS), ends(q, KEYS)
    if layout == "padding":
        x, lse = [padded(y) for y in x], F.pad(lse, (0, PADDING)).transpose(0, 1).flatten(1)
        more = ROWS + PADDING, KEYS + PADDING
        used = (each(q, n) for n in (ROWS, KEYS))
        lengths = [*(ends(q, n) for n in more), *used, *more]
    gradients = [torch.zeros_like(y) for y in x[1:4]]
    fa3._flash_attn_backward(
        *x, lse, *lengths, *gradients, softmax_scale=D**-0.5, is_causal=True, window_size_left=-1,
        window_size_right=0, deterministic=True,
    )  # fmt: skip
    for ours, theirs in zip(gradients, expected):
        ours = ours if layout == "dense" else ours.unflatten(0, (BATCH, -1))
        torch.testing.assert_close(ours[:, : theirs.shape[1]], theirs, atol=1e-2, rtol=1e-2)
        assert not ours[:, theirs.shape[1] :].any()


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
