"""The four functions below the public ones that clients call themselves.

Ring and context-parallel attention call these inside autograd functions of their own; they read
the argument names with ``inspect.getfullargspec(f)``, or of ``f._init_fn`` where ``f`` used to be a
custom operation. The names and their order are therefore part of the API. ``dq``, ``dk`` and
``dv`` are overwritten; a buffer that is None is a gradient that is not wanted. Nothing is padded
here: on CUDA head dims are multiples of 8.
"""

from __future__ import annotations

from torch import Tensor

from flash_attn import _autograd, _calls, _ops, checks
from flash_attn._autograd import rows_contiguous


def _rng_state(dropout_p: float, q: Tensor) -> Tensor | None:
    return _autograd.draw_rng_state(q.device) if dropout_p > 0 else None


def _needed_rng_state(dropout_p: float, rng_state: Tensor | None, q: Tensor) -> Tensor | None:
    if dropout_p == 0:
        return None
    checks.rng_state(rng_state, q)
    return rng_state


def _unpadded(*tensors: Tensor) -> None:
    for x in tensors:
        if x.is_cuda and x.shape[-1] % 8:
            raise ValueError(
                f"got head_dim {x.shape[-1]} (shape {tuple(x.shape)}); on CUDA the private "
                "functions take multiples of 8, the public ones pad"
            )


def _flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    return_softmax: bool,
    *,
    s_aux: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One forward with every option spelled out; shapes as in ``flash_attn_func``.

    Returns:
        out (batch, seqlen_q, heads, head_dim); softmax_lse (batch, heads, seqlen_q), float32;
        S_dmask (batch, heads, seqlen_q, seqlen_k) if return_softmax, else (0,); rng_state (2,)
        int64 with dropout, else (0,).
    """
    checks.dense(q, k, v)
    _unpadded(q, v)
    checks.scores(q, q.shape[0], dropout_p, softmax_scale, softcap, alibi_slopes, s_aux)
    left, right = checks.window((window_size_left, window_size_right))
    return _autograd.call(
        _ops.forward, q, k, v, dropout_p, softmax_scale, causal, left, right, softcap,
        alibi_slopes, return_softmax, s_aux=_calls.sinks(s_aux, q),
        rng_state=_rng_state(dropout_p, q),
    )  # fmt: skip


def _flash_attn_varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    return_softmax: bool = False,
    block_table: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    zero_tensors: bool = False,
    *,
    s_aux: Tensor | None = None,
    num_splits: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One varlen forward with every option spelled out; shapes as in ``flash_attn_varlen_func``.

    Arguments:
        cu_seqlens_k: may be None with block_table and seqused_k, which say how long sequences are;
            with both, what it holds does not count.
        leftpad_k: (batch,), int32: the position of the first key of each sequence.
        seqused_k: (batch,), int32: how many keys of each sequence are in use; None is all.
        zero_tensors: accepted and ignored: rows that no sequence owns are always 0.
        num_splits: as in ``flash_attn_with_kvcache``, for sequences of few queries.

    Returns:
        out (total_q, heads, head_dim); softmax_lse (heads, total_q), float32; S_dmask (batch,
        heads, max_seqlen_q, max_seqlen_k) if return_softmax, else (0,); rng_state (2,) int64 with
        dropout, else (0,).
    """
    max_seqlen_q, max_seqlen_k = _calls.max_seqlens(
        q, k, max_seqlen_q, max_seqlen_k, block_table, exact=return_softmax
    )
    if cu_seqlens_k is None and block_table is not None and seqused_k is not None:
        cu_seqlens_k = cu_seqlens_q
    num_splits = checks.num_splits(num_splits)
    checks.varlen(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, block_table, seqused_k,
        leftpad_k,
    )  # fmt: skip
    _unpadded(q, v)
    batch = cu_seqlens_q.shape[0] - 1
    checks.scores(q, batch, dropout_p, softmax_scale, softcap, alibi_slopes, s_aux)
    left, right = checks.window((window_size_left, window_size_right))
    return _autograd.call(
        _ops.varlen_forward, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        dropout_p, softmax_scale, causal, left, right, softcap, alibi_slopes, return_softmax,
        block_table, leftpad_k, seqused_k, zero_tensors, s_aux=_calls.sinks(s_aux, q),
        rng_state=_rng_state(dropout_p, q), num_splits=num_splits,
    )  # fmt: skip


def _flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
    *,
    dlse: Tensor | None = None,
    s_aux: Tensor | None = None,
    ds_aux: Tensor | None = None,
) -> Tensor:
    """One backward: overwrites dq, dk, dv (and ds_aux) where given; not recorded by autograd.

    Arguments:
        dout, out: (batch, seqlen_q, heads, head_dim); softmax_lse and dlse (batch, heads,
            seqlen_q); dq, dk, dv shaped like q, k, v, any strides with a unit last one.
        rng_state: what the forward returned; needed with dropout.

    Returns:
        softmax_d (batch, heads, seqlen_q): rowsum(dout · out) - dlse.
    """
    checks.dense(q, k, v)
    _unpadded(q, v)
    checks.scores(q, q.shape[0], dropout_p, softmax_scale, softcap, alibi_slopes, s_aux)
    left, right = checks.window((window_size_left, window_size_right))
    lse_shape = (q.shape[0], q.shape[2], q.shape[1])
    checks.backward(
        q, k, v, dout, out, softmax_lse, lse_shape, dq, dk, dv, dlse, s_aux, ds_aux
    )  # fmt: skip
    dlse = None if dlse is None else dlse.contiguous()
    return _autograd.unrecorded(
        _ops.backward, rows_contiguous(dout), q, k, v, rows_contiguous(out),
        softmax_lse.contiguous(), dq, dk, dv, dropout_p, softmax_scale, causal, left, right,
        softcap, alibi_slopes, deterministic, _needed_rng_state(dropout_p, rng_state, q), dlse=dlse,
        s_aux=_calls.sinks(s_aux, q), ds_aux=ds_aux,
    )  # fmt: skip


def _flash_attn_varlen_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
    zero_tensors: bool = False,
    *,
    dlse: Tensor | None = None,
    s_aux: Tensor | None = None,
    ds_aux: Tensor | None = None,
    seqused_k: Tensor | None = None,
) -> Tensor:
    """One varlen backward: overwrites dq, dk, dv (and ds_aux); not recorded by autograd.

    Arguments:
        dout, out: (total_q, heads, head_dim); softmax_lse and dlse (heads, total_q); dq, dk, dv
            shaped like q, k, v, any strides with a unit last one.
        rng_state: what the forward returned; needed with dropout.
        zero_tensors: accepted and ignored: rows that no sequence owns are always 0.

    Returns:
        softmax_d (heads, total_q): rowsum(dout · out) - dlse.
    """
    max_seqlen_q, max_seqlen_k = _calls.max_seqlens(q, k, max_seqlen_q, max_seqlen_k)
    checks.varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, None, seqused_k)
    _unpadded(q, v)
    batch = cu_seqlens_q.shape[0] - 1
    checks.scores(q, batch, dropout_p, softmax_scale, softcap, alibi_slopes, s_aux)
    left, right = checks.window((window_size_left, window_size_right))
    lse_shape = (q.shape[1], q.shape[0])
    checks.backward(
        q, k, v, dout, out, softmax_lse, lse_shape, dq, dk, dv, dlse, s_aux, ds_aux
    )  # fmt: skip
    dlse = None if dlse is None else dlse.contiguous()
    return _autograd.unrecorded(
        _ops.varlen_backward, rows_contiguous(dout), q, k, v, rows_contiguous(out),
        softmax_lse.contiguous(), dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q,
        max_seqlen_k, dropout_p, softmax_scale, causal, left, right, softcap, alibi_slopes,
        deterministic, _needed_rng_state(dropout_p, rng_state, q), zero_tensors,
        dlse=dlse, s_aux=_calls.sinks(s_aux, q), ds_aux=ds_aux, seqused_k=seqused_k,
    )  # fmt: skip


# Where these were custom operations, clients reached the Python function through _init_fn.
for _function in (
    _flash_attn_forward,
    _flash_attn_varlen_forward,
    _flash_attn_backward,
    _flash_attn_varlen_backward,
):
    _function._init_fn = _function
