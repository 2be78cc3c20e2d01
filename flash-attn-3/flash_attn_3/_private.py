"""The two functions below the public ones that clients call in autograd functions of their own.

They look for a function, or for one behind ``_init_fn``; names and order of the arguments are part
of the API.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flash_attn.api import checks
from flash_attn.call import Gradients, Options
from flash_attn_3 import _backward, _forward
from flash_attn_3._asked import Asked, one_of


def _flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_new: Tensor | None = None,
    v_new: Tensor | None = None,
    qv: Tensor | None = None,
    out_: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    page_table: Tensor | None = None,
    kv_batch_idx: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    seqlens_rotary: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    attention_chunk: int | None = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    *,
    alibi_slopes: Tensor | None = None,
    fp8_products: bool = False,
    s_aux: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One forward with every option spelled out, dense, packed or of a cache.

    Arguments: as in the public functions, by the names that the operator ``fwd`` has; seqused_k is
    cache_seqlens where k and v are a cache.

    Returns:
        out (batch, seqlen_q, heads, head_dim_v), or (total_q, heads, head_dim_v); lse (batch,
        heads, seqlen_q), or (heads, total_q), float32; and two tensors without elements, which
        FA3 fills where it splits keys.
    """
    asked = Asked(
        q, k, v, k_new, v_new, qv, out_, cu_seqlens_q, cu_seqlens_k, cu_seqlens_k_new, seqused_q,
        seqused_k, max_seqlen_q, max_seqlen_k, page_table, kv_batch_idx, leftpad_k, rotary_cos,
        rotary_sin, seqlens_rotary, q_descale, k_descale, v_descale, softmax_scale, causal,
        window_size_left, window_size_right, attention_chunk, softcap, rotary_interleaved,
        scheduler_metadata, num_splits, pack_gqa, sm_margin, fp8_products,
    )  # fmt: skip
    options = Options(
        alibi_slopes=alibi_slopes,
        s_aux=one_of(s_aux=s_aux, learnable_sink=learnable_sink, sinks=sinks),
    )
    out, lse = _forward.forward(asked, options)
    return out, lse, *(q.new_empty(0, dtype=torch.float32) for _ in range(2))


def _flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    sequed_q: Tensor | None = None,
    sequed_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dq: Tensor | None = None,
    dk: Tensor | None = None,
    dv: Tensor | None = None,
    softmax_scale: float | None = None,
    is_causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    deterministic: bool = False,
    sm_margin: int = 0,
    *,
    attention_chunk: int | None = 0,
    alibi_slopes: Tensor | None = None,
    dlse: Tensor | None = None,
    s_aux: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    sinks: Tensor | None = None,
    ds_aux: Tensor | None = None,
) -> Tensor:
    """One backward: overwrites dq, dk, dv (and ds_aux) where given; not recorded by autograd.

    Arguments:
        dout, out: (batch, seqlen_q, heads, head_dim_v), or (total_q, heads, head_dim_v);
            softmax_lse and dlse (batch, heads, seqlen_q), or (heads, total_q).
        sequed_q, sequed_k: seqused_q and seqused_k; FA3 spells them so.
        dq, dk, dv: shaped like q, k, v; None is a gradient that is not wanted.
        attention_chunk: that of the forward.
        learnable_sink, sinks: other names of s_aux.

    Returns:
        softmax_d, as softmax_lse: rowsum(dout · out) - dlse.
    """
    tensors = Gradients(dout, q, k, v, out, softmax_lse, dq, dk, dv, dlse, ds_aux)
    options = Options(
        softmax_scale=softmax_scale,
        causal=is_causal,
        window_size=(window_size_left, window_size_right),
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        deterministic=deterministic,
        s_aux=one_of(s_aux=s_aux, learnable_sink=learnable_sink, sinks=sinks),
        sm_margin=checks.sm_margin(sm_margin),
    )
    return _backward.backward(
        tensors, options, cu_seqlens_q, cu_seqlens_k, sequed_q, sequed_k, max_seqlen_q,
        max_seqlen_k, attention_chunk,
    )  # fmt: skip


for _function in (_flash_attn_forward, _flash_attn_backward):
    _function._init_fn = _function  # type: ignore[attr-defined]
