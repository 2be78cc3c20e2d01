"""Mamba 2's state space model (Dao & Gu 2024) by mamba_ssm's names: C is q, B is k, x dt is v."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from flash_attn.linear import _checks, ops
from flash_attn.linear.core import chunk_scan

__all__ = ["mamba_chunk_scan_combined", "selective_state_update"]

_INF = float("inf")


def mamba_chunk_scan_combined(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int | None = None,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, _INF),
    return_final_states: bool = False,
    return_varlen_states: bool = False,
) -> Tensor | tuple[Tensor, ...]:
    """S_t = e^(dt_t A) S_(t-1) + dt_t x_t B_tᵀ, out_t = S_t C_t + D x_t, times silu(z_t).

    Arguments:
        x: [batch, T, H, P]; B, C: [batch, T, G, N], shared by H / G heads each.
        dt: [batch, T, H], before ``dt_bias`` [H], softplus and the clamp to ``dt_limit``.
        A: [H], negative.
        chunk_size: accepted and not needed.
        D: [H] or [H, P]; z: as x.
        initial_states: [batch, H, P, N]; with ``cu_seqlens`` one a sequence, or one: the first's.
        seq_idx: [batch, T]; where the number changes, the state begins anew from zeros.
        cu_seqlens: [sequences + 1], packed sequences of a batch of 1.
        return_final_states, return_varlen_states: fp32 [batch, H, P, N], with ``cu_seqlens`` that
            of the last sequence; and [sequences, H, P, N], which needs ``cu_seqlens``.

    Returns:
        out [batch, T, H, P] in x's dtype, or a tuple of it and the states that are asked for. All
        inputs have gradients.

    Raises:
        ValueError, TypeError: as ``chunk_scan``.
    """
    batch, seqlen, heads, _ = x.shape
    _checks.shape("dt", dt, ("[batch, T, H]", (batch, seqlen, heads)))
    _checks.shape("A", A, ("[H]", (heads,)))
    if return_varlen_states and cu_seqlens is None:
        raise ValueError("return_varlen_states: needs cu_seqlens")
    compute = torch.promote_types(x.dtype, torch.float32)
    dt = _discretized(dt.to(compute), dt_bias, dt_softplus, dt_limit)
    g = dt * A.to(compute)
    if seq_idx is not None and cu_seqlens is None:
        _checks.shape("seq_idx", seq_idx, ("[batch, T]", (batch, seqlen)))
        begins = F.pad(seq_idx[:, 1:] != seq_idx[:, :-1], (1, 0))
        g = g.masked_fill(begins[..., None], -torch.inf)
    v = (x.to(compute) * dt[..., None]).to(x.dtype)
    state = _initial(initial_states, cu_seqlens)
    wants_state = return_final_states or return_varlen_states
    out, final = chunk_scan(
        C.to(x.dtype), B.to(x.dtype), v, g, 1.0, state, wants_state, True, cu_seqlens
    )
    out = _skipped_and_gated(out, x, D, z)
    if final is None:
        return out
    states = []
    if return_final_states:
        states.append(final if cu_seqlens is None else final[-1:])
    if return_varlen_states:
        states.append(final)
    return out, *states


def _discretized(
    dt: Tensor, dt_bias: Tensor | None, softplus: bool, limit: tuple[float, float]
) -> Tensor:
    if dt_bias is not None:
        dt = dt + dt_bias.to(dt.dtype)
    if softplus:
        dt = F.softplus(dt)
    return dt if limit == (0.0, _INF) and softplus else dt.clamp(*limit)


def _initial(states: Tensor | None, cu_seqlens: Tensor | None) -> Tensor | None:
    if states is None or cu_seqlens is None or len(states) == len(cu_seqlens) - 1:
        return states
    if len(states) != 1:
        raise ValueError(f"initial_states: got {len(states)}; 1 or one a sequence is needed")
    return torch.cat((states, states.new_zeros(len(cu_seqlens) - 2, *states.shape[1:])))


def _skipped_and_gated(out: Tensor, x: Tensor, D: Tensor | None, z: Tensor | None) -> Tensor:
    if D is None and z is None:
        return out
    wide = out.to(torch.promote_types(x.dtype, torch.float32))
    if D is not None:
        wide = wide + x * (D if D.dim() == 2 else D[:, None])
    if z is not None:
        wide = wide * F.silu(z.to(wide.dtype))
    return wide.to(x.dtype)


def selective_state_update(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    state_batch_indices: Tensor | None = None,
) -> Tensor:
    """One token of each sequence: the state is updated in place.

    Arguments:
        state: [slots, H, P, N], or [slots, P, N] for one head, which all tensors then lack.
        x, dt, z: [batch, H, P]; A: [H, P, N]; B, C: [batch, G, N]; D, dt_bias: [H, P].
            Where A, dt and dt_bias are expanded from one number a head, as Mamba 2's are, the step
            kernel serves the call if there is one.
        state_batch_indices: [batch], the slot of each row; a negative one changes nothing, and its
            output is zeros. None: row b's slot is b.

    Returns:
        out [batch, H, P] in x's dtype. No gradients.

    Raises:
        ValueError: for shapes that are not as above.
    """
    if state.dim() == 3:
        lifted = [t if t is None else t[:, None] for t in (x, dt, B, C, z)]
        x_, dt_, B_, C_, z_ = lifted
        single = [t if t is None else t[None] for t in (A, D, dt_bias)]
        out = selective_state_update(
            state[:, None], x_, dt_, single[0], B_, C_, single[1], z_, single[2], dt_softplus,
            state_batch_indices,
        )  # fmt: skip
        return out[:, 0]
    heads = x.shape[1]
    _checks.shape("dt", dt, ("x's", tuple(x.shape)))
    _checks.shape("A", A, ("[H, P, N]", (heads, x.shape[-1], state.shape[-1])))
    compute = torch.promote_types(torch.promote_types(x.dtype, state.dtype), torch.float32)
    with torch.no_grad():
        if _is_of_head(A, 1) and _is_of_head(dt, 2) and _is_of_head(dt_bias, 1):
            bias = None if dt_bias is None else dt_bias[:, 0]
            step = _discretized(dt[..., 0].to(compute), bias, dt_softplus, (0.0, _INF))
            v = (x.to(compute) * step[..., None]).to(x.dtype)
            g = step * A[:, 0, 0].to(compute)
            slots = None if state_batch_indices is None else state_batch_indices.to(torch.int32)
            out = ops.step(C.to(x.dtype), B.to(x.dtype), v, g, state.mT, slots, 1.0)
        else:
            step = _discretized(dt.to(compute), dt_bias, dt_softplus, (0.0, _INF))
            out = _elementwise(state, x.to(compute), step, A, B, C, state_batch_indices)
        out = _skipped_and_gated(out.to(compute), x, D, z)
        if state_batch_indices is not None:
            out = out.masked_fill((state_batch_indices < 0)[:, None, None], 0)
        return out.to(x.dtype)


def _is_of_head(x: Tensor | None, dims: int) -> bool:
    """Whether x is one number a head, expanded over all dims after the first ``dims``."""
    return x is None or all(stride == 0 for stride in x.stride()[dims:])


def _elementwise(
    state: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, slots: Tensor | None
) -> Tensor:
    """Mamba 1's step: a decay for each number of the state."""
    rows = torch.arange(len(x), device=x.device) if slots is None else slots.long()
    shared = x.shape[1] // B.shape[1]
    B_, C_ = (t.to(x.dtype).repeat_interleave(shared, dim=1)[..., None, :] for t in (B, C))
    S = state[rows.clamp(min=0)].to(x.dtype)
    S = S * (dt[..., None] * A.to(x.dtype)).exp() + (dt * x)[..., None] * B_
    live = rows >= 0
    state[rows[live]] = S[live].to(state.dtype)
    return (S * C_).sum(-1)
