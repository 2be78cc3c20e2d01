"""The gated delta rule (Yang et al. 2025)."""

from __future__ import annotations

import torch
from torch import Tensor

from flash_attn.dispatch.autograd import records
from flash_attn.linear import _checks, delta_ops

__all__ = [
    "chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule", "recurrent_gated_delta_rule_step",
]  # fmt: skip


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
    scale = _checks.scale_of(scale, k.shape[-1])
    o, final = delta_ops.forward(
        q, k, v, g, beta, state, cu_seqlens, scale, bool(use_qk_l2norm_in_kernel),
        bool(output_final_state), bool(state_v_first),
    )  # fmt: skip
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
    dtype = torch.promote_types(v.dtype, torch.float32)
    if initial_state is None:
        rows, columns = k.shape[-1], v.shape[-1]
        sizes = (columns, rows) if state_v_first else (rows, columns)
        state = v.new_zeros((v.shape[0], v.shape[2], *sizes), dtype=dtype)
    else:
        _checks.state_of(initial_state, k, v, None, state_v_first)
        state = initial_state.to(dtype, copy=True, memory_format=torch.contiguous_format)
    for name, x in (("g", g), ("beta", beta)):
        if x is not None:
            _checks.shape(name, x, ("[B, T, HV]", tuple(v.shape[:3])))
    g, beta = (None if x is None else x[:, 0] for x in (g, beta))
    o = recurrent_gated_delta_rule_step(
        q[:, 0], k[:, 0], v[:, 0], g, beta, state, None, scale, use_qk_l2norm_in_kernel,
        use_beta_sigmoid_in_kernel, allow_neg_eigval, state_v_first,
    )  # fmt: skip
    return o[:, None], state if output_final_state else None


def recurrent_gated_delta_rule_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    state: Tensor,
    state_indices: Tensor | None = None,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
) -> Tensor:
    """One token of each sequence against its state in a cache, which is updated in place.

    Arguments:
        q, k: [B, H, K]; v: [B, HV, V]; g, beta: None or [B, HV], as in ``chunk_gated_delta_rule``.
        state, state_indices, scale: as in ``recurrent_step``, for the heads of v.
        use_qk_l2norm_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval: as in
            ``chunk_gated_delta_rule``.

    Returns:
        o [B, HV, V] in q's dtype.

    Raises:
        ValueError, TypeError: for a shape, dtype or device that is not as above.
    """
    slots = _checks.step(q, k, v, state, state_indices, state_v_first)
    _check_eigenvalues(allow_neg_eigval, use_beta_sigmoid_in_kernel)
    g, beta = (_of_heads(name, x, v) for name, x in (("g", g), ("beta", beta)))
    of_sigmoid = 0.0
    if use_beta_sigmoid_in_kernel and beta is not None:
        of_sigmoid = 2.0 if allow_neg_eigval else 1.0
    return delta_ops.step(
        q, k, v, g, beta, state.mT if state_v_first else state, slots,
        _checks.scale_of(scale, k.shape[-1]), bool(use_qk_l2norm_in_kernel), of_sigmoid,
    )  # fmt: skip


def _of_heads(name: str, x: Tensor | None, v: Tensor) -> Tensor | None:
    """A number for each row and head, in a dtype that kernels take."""
    if x is None:
        return None
    _checks.shape(name, x, ("[B, HV]", tuple(v.shape[:2])))
    wide = torch.promote_types(v.dtype, torch.float32)
    return x if x.dtype == v.dtype else x.to(wide)


def _check_eigenvalues(allow_neg_eigval: bool, sigmoid: bool) -> None:
    if allow_neg_eigval and not sigmoid:
        raise ValueError(
            "allow_neg_eigval: doubles the sigmoid of use_beta_sigmoid_in_kernel=True; without it "
            "give a beta in (0, 2)"
        )


def _per_token(
    v: Tensor, g: Tensor | None, beta: Tensor | None, sigmoid: bool, allow_neg_eigval: bool
) -> tuple[Tensor, Tensor]:
    """g and beta [B, T, HV] as they are computed with."""
    shape = v.shape[:3]
    dtype = torch.promote_types(v.dtype, torch.float32)
    _check_eigenvalues(allow_neg_eigval, sigmoid)
    for name, x in (("g", g), ("beta", beta)):
        if x is not None:
            _checks.shape(name, x, ("[B, T, HV]", tuple(shape)))
    if g is None:
        g = v.new_zeros(shape, dtype=dtype)
    if beta is None:
        beta = v.new_ones(shape, dtype=dtype)
    elif sigmoid:
        beta = beta.to(dtype).sigmoid() * (2.0 if allow_neg_eigval else 1.0)
    return g, beta
