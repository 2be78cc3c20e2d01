"""``chunk_scan``: every function of linear attention with a decay is a case of it."""

from __future__ import annotations

import torch
from torch import Tensor

from flash_attn.dispatch.autograd import records
from flash_attn.linear import _checks, ops

__all__ = ["chunk_scan", "recurrent_scan", "recurrent_step"]


def chunk_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Linear attention with a decay: S_t = e^(g_t) ∘ S_(t-1) + k_t v_tᵀ, o_t = scale S_tᵀ q_t.

    Arguments:
        q, k: [B, T, HK, K], bf16, fp16 or fp32 (on the CPU fp64 too).
        v: [B, T, H, V]; H a multiple of HK, whose heads are shared by H / HK heads each.
        g: log decay in [-inf, 0], any floating dtype. None: no decay. [H]: the same at every
            token. [B, T, H]: one factor for a head's state. [B, T, H, K]: one for each row of it.
        scale: multiplies q; None is K^-0.5.
        initial_state: fp32 [N, H, K, V], or [N, H, V, K] with ``state_v_first``; None is zeros.
            N is B, or the number of sequences of ``cu_seqlens``.
        output_final_state: whether the final state is returned.
        state_v_first: the layout of both states.
        cu_seqlens: [N + 1] int32 or int64, where the packed sequences of a B of 1 begin and end;
            empty ones are allowed. Outputs of tokens that are in none are zeros.

    Returns:
        o [B, T, H, V] in q's dtype, and the final state, fp32 as the initial one, or None.

    Gradients go to q, k, v, g and initial_state, through o and the final state. Chunks are counted
    from each sequence's start, so that its results do not depend on its neighbours. T = 0 is
    allowed, and so is any K and V >= 1.

    Raises:
        ValueError, TypeError: for a shape, dtype, device or content that is not as above.
    """
    _checks.operands(q, k, v)
    cu_seqlens = _checks.cu_seqlens_of(cu_seqlens, v)
    state = _checks.state_of(initial_state, k, v, cu_seqlens, state_v_first)
    if g is not None:
        batch, seqlen, heads = v.shape[:3]
        _checks.shape(
            "g",
            g,
            ("[H]", (heads,)),
            ("[B, T, H]", (batch, seqlen, heads)),
            ("[B, T, H, K]", (batch, seqlen, heads, k.shape[-1])),
        )
        if g.dim() == 1:
            g = g.float() if q.dtype != torch.float64 else g.double()
        elif g.dtype not in (q.dtype, torch.float32):
            g = g.float()
    o, final = ops.scan(
        q, k, v, g, state, cu_seqlens, _checks.scale_of(scale, k.shape[-1]),
        bool(output_final_state), bool(state_v_first),
    )  # fmt: skip
    if not output_final_state:
        return o, None
    return o, final.mT if state_v_first else final


def recurrent_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """``chunk_scan``, with ``reverse`` from each sequence's last token to its first.

    A single token without gradients takes the step kernel instead of a chunk.
    """
    if reverse:
        return _reversed(
            q, k, v, g, scale, initial_state, output_final_state, state_v_first, cu_seqlens
        )
    if not _checks.is_step(v, cu_seqlens) or records(q, k, v, g, initial_state):
        return chunk_scan(
            q, k, v, g, scale, initial_state, output_final_state, state_v_first, cu_seqlens
        )
    _checks.operands(q, k, v)
    shape = (v.shape[0], v.shape[2], k.shape[-1], v.shape[-1])
    if initial_state is None:
        shape = (*shape[:2], *shape[:1:-1]) if state_v_first else shape
        state = v.new_zeros(shape, dtype=torch.promote_types(v.dtype, torch.float32))
    else:
        _checks.state_of(initial_state, k, v, None, state_v_first)
        dtype = torch.promote_types(v.dtype, torch.float32)
        state = initial_state.to(dtype, copy=True, memory_format=torch.contiguous_format)
    g_step = g if g is None or g.dim() == 1 else g[:, 0]
    o = recurrent_step(q[:, 0], k[:, 0], v[:, 0], g_step, state, None, scale, state_v_first)
    return o[:, None], state if output_final_state else None


def _reversed(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, scale: float | None,
    initial_state: Tensor | None, output_final_state: bool, state_v_first: bool,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """All tokens from the last to the first, and with them the packed sequences."""
    flipped = [x.flip(1) for x in (q, k, v)]
    g = g if g is None or g.dim() == 1 else g.flip(1)
    if cu_seqlens is not None:
        cu_seqlens = v.shape[1] - cu_seqlens.flip(0)
        initial_state = None if initial_state is None else initial_state.flip(0)
    o, final = chunk_scan(
        *flipped, g, scale, initial_state, output_final_state, state_v_first, cu_seqlens
    )
    if final is not None and cu_seqlens is not None:
        final = final.flip(0)
    return o.flip(1), final


def recurrent_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    state: Tensor,
    state_indices: Tensor | None = None,
    scale: float | None = None,
    state_v_first: bool = False,
) -> Tensor:
    """One token of each sequence against its state in a cache, which is updated in place.

    Arguments:
        q, k: [B, HK, K]; v: [B, H, V]; g: None, [H], [B, H] or [B, H, K], as in ``chunk_scan``.
        state: [slots, H, K, V], or [slots, H, V, K] with ``state_v_first``; fp32, or on torch
            operations any floating dtype. No gradients.
        state_indices: [B] int32 or int64, the slot of each row, no two the same; a row with a
            negative one, padding of a captured graph, changes nothing, and its output is zeros.
            None: row b's slot is b.
        scale: multiplies q; None is K^-0.5.

    Returns:
        o [B, H, V] in q's dtype.

    Raises:
        ValueError, TypeError: for a shape, dtype or device that is not as above.
    """
    state_indices = _checks.step(q, k, v, state, state_indices, state_v_first)
    batch, heads = v.shape[:2]
    if g is not None:
        accepted = (heads,), (batch, heads), (batch, heads, k.shape[-1])
        _checks.shape("g", g, *zip(("[H]", "[B, H]", "[B, H, K]"), accepted))
    in_place = state.mT if state_v_first else state
    return ops.step(q, k, v, g, in_place, state_indices, _checks.scale_of(scale, k.shape[-1]))
