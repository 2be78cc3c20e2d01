"""The gated delta rule (Yang et al. 2025)."""

from __future__ import annotations

import torch
from torch import Tensor

from flash_attn.dispatch.autograd import records
from flash_attn.linear import _checks, delta_ops

__all__ = ["chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"]

_EPS = 1e-6


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_size: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """S_t = e^(g_t) S_(t-1) + k_t β_t (v_t - e^(g_t) S_(t-1)ᵀ k_t)ᵀ, o_t = scale S_tᵀ q_t.

    Arguments:
        q, k: [B, T, H, K], bf16, fp16 or fp32 (on the CPU fp64 too).
        v: [B, T, HV, V]; HV a multiple of H.
        g: log decay [B, T, HV] in [-inf, 0]; None: no decay.
        beta: [B, T, HV], how much of a value is written; None is ones.
        scale: multiplies q; None is K^-0.5.
        initial_state, output_final_state, state_v_first, cu_seqlens: as in ``chunk_scan``.
        use_qk_l2norm_in_kernel: q and k are divided by their norms, sqrt(Σ x² + 1e-6).
        use_beta_sigmoid_in_kernel: beta is the sigmoid of what is given; with
            ``allow_neg_eigval`` twice that.
        cu_seqlens_cpu, chunk_size: accepted and not needed.

    Returns:
        o [B, T, HV, V] in q's dtype and the final state or None. Gradients go to q, k, v, g, beta
        and initial_state.

    Raises:
        ValueError, TypeError: as ``chunk_scan``; for ``allow_neg_eigval`` without the sigmoid.
    """
    _checks.operands(q, k, v)
    cu_seqlens = _checks.cu_seqlens_of(cu_seqlens, v)
    state = _checks.state_of(initial_state, k, v, cu_seqlens, state_v_first)
    g, beta = _per_token(v, g, beta, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    if use_qk_l2norm_in_kernel:
        q, k = _normalized(q), _normalized(k)
    scale = _checks.scale_of(scale, k.shape[-1])
    o, final = delta_ops.forward(
        q, k, v, g, beta, state, cu_seqlens, scale, bool(output_final_state), bool(state_v_first)
    )
    if not output_final_state:
        return o, None
    return o, final.mT if state_v_first else final


def fused_recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """``chunk_gated_delta_rule`` for few tokens: one without gradients is not a chunk's work."""
    if not _checks.is_step(v, cu_seqlens) or records(q, k, v, g, beta, initial_state):
        return chunk_gated_delta_rule(
            q, k, v, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel,
            use_beta_sigmoid_in_kernel, allow_neg_eigval, state_v_first, cu_seqlens,
        )  # fmt: skip
    _checks.operands(q, k, v)
    state = _checks.state_of(initial_state, k, v, None, state_v_first)
    g, beta = _per_token(v, g, beta, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    if use_qk_l2norm_in_kernel:
        q, k = _normalized(q), _normalized(k)
    o, final = _step(q, k, v, g, beta, _checks.scale_of(scale, k.shape[-1]), state)
    final = final.mT.contiguous() if state_v_first else final
    return o, final if output_final_state else None


def _step(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float, state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """One token, T = 1: o [B, 1, HV, V] and the state after it, [B, HV, K, V]."""
    compute = torch.promote_types(v.dtype, torch.float32)
    shared = v.shape[2] // max(1, k.shape[2])
    q, k = (x[:, 0].to(compute).repeat_interleave(shared, dim=1) for x in (q, k))
    v_, factor = v[:, 0].to(compute), g[:, 0].to(compute).exp()[..., None, None]
    if state is None:
        state = v_.new_zeros(*v_.shape[:2], k.shape[-1], v.shape[-1])
    state = state * factor
    new = beta[:, 0].to(compute)[..., None] * (v_ - (k[..., None] * state).sum(-2))
    state = state + k[..., None] * new[..., None, :]
    o = ((q * scale)[..., None] * state).sum(-2)
    return o[:, None].to(v.dtype), state


def _per_token(
    v: Tensor, g: Tensor | None, beta: Tensor | None, sigmoid: bool, allow_neg_eigval: bool
) -> tuple[Tensor, Tensor]:
    """g and beta [B, T, HV] as they are computed with."""
    shape = v.shape[:3]
    dtype = torch.promote_types(v.dtype, torch.float32)
    if allow_neg_eigval and not sigmoid:
        raise ValueError(
            "allow_neg_eigval: doubles the sigmoid of use_beta_sigmoid_in_kernel=True; without it "
            "give a beta in (0, 2)"
        )
    if g is None:
        g = v.new_zeros(shape, dtype=dtype)
    if beta is None:
        beta = v.new_ones(shape, dtype=dtype)
    elif sigmoid:
        beta = beta.to(dtype).sigmoid() * (2.0 if allow_neg_eigval else 1.0)
    for name, x in (("g", g), ("beta", beta)):
        _checks.shape(name, x, ("[B, T, HV]", tuple(shape)))
    return g, beta


def _normalized(x: Tensor) -> Tensor:
    """x over its norm, sums in fp32."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * (wide.square().sum(-1, keepdim=True) + _EPS).rsqrt()).to(x.dtype)
