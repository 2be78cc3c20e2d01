"""The four functions below the public ones that clients call themselves.

Ring and context-parallel attention call these inside autograd functions of their own; they read
the argument names with ``inspect.getfullargspec(f)``, or of ``f._init_fn`` where ``f`` used to be a
custom operation. The names and their order are therefore part of the API. ``dq``, ``dk`` and
``dv`` are overwritten; a buffer that is None is a gradient that is not wanted. Nothing is padded
here: on CUDA head dims are multiples of 8.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flash_attn.api import checks, checks_fp8
from flash_attn.api.checks_fp8 import NO_CODES, OfCodes
from flash_attn.call import Backward, Descale, Forward, Gradients, Keys, Lengths, Options
from flash_attn.dispatch import calls
from flash_attn.dispatch.autograd import rows_contiguous


def _checked_rng_state(
    rng_state: Tensor | None, q: Tensor, options: Options, lengths: Lengths | None
) -> Tensor | None:
    """None for a call without dropout."""
    if options.dropout_p == 0:
        return None
    checks.rng_state(rng_state, q, q.shape[0] if lengths is None else lengths.batch)
    return rng_state


def forward(
    q: Tensor, k: Tensor, v: Tensor, options: Options, lengths: Lengths | None = None,
    keys: Keys = calls.NO_KEYS, num_splits: int = 0, rng_state: Tensor | None = None,
    given: OfCodes = NO_CODES,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """The results of ``calls.forward`` for a dense call or, with lengths, a varlen one."""
    options = checks.flags(options)
    if checks_fp8.are_codes(q):
        return *calls.attend_codes(q, k, v, options, lengths, keys, given, num_splits), None, None
    scoring, lengths = calls.checked(q, k, v, options, lengths, keys)
    checks.unpadded(q, v)
    if rng_state is not None:
        rng_state = _checked_rng_state(rng_state, q, options, lengths)
    descales = checks_fp8.NO_DESCALES
    if given is not NO_CODES:
        batch = q.shape[0] if lengths is None else lengths.batch
        descales = checks_fp8.of_cache(given, k, v, q, batch)
    call = Forward(
        q, k, v, scoring, lengths, keys, return_softmax=options.return_attn_probs,
        rng_state=rng_state, batch_invariant=options.batch_invariant, num_splits=num_splits,
        # Always of rows: ring attention reduces the rows of all its steps to heads.
        return_max_logits=options.return_max_logits is not False, descales=descales,
        sm_margin=options.sm_margin,
    )  # fmt: skip
    return calls.forward(call)


def backward(
    tensors: Gradients, options: Options, rng_state: Tensor | None,
    lengths: Lengths | None = None, seqused_k: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The backward of such a call; rows that it reads may have any strides."""
    dout, q, k, v, out, lse, dq, dk, dv, dlse, ds_aux = tensors
    keys = Keys(seqused_k=seqused_k)
    options = checks.flags(options)
    scoring, lengths = calls.checked(q, k, v, options, lengths, keys)
    checks.unpadded(q, v)
    checks.backward(tensors, options.s_aux)
    rng_state = _checked_rng_state(rng_state, q, options, lengths)
    dlse = None if dlse is None else dlse.contiguous()
    tensors = Gradients(
        rows_contiguous(dout), q, k, v, rows_contiguous(out), lse.contiguous(), dq, dk, dv, dlse,
        ds_aux,
    )  # fmt: skip
    call = Backward(
        tensors, scoring, lengths, keys, deterministic=options.deterministic, rng_state=rng_state,
        sm_margin=options.sm_margin,
    )  # fmt: skip
    return calls.backward(call)


def _filled(
    q: Tensor, results: tuple[Tensor, Tensor, Tensor | None, Tensor | None]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The results as the operation has them: a tensor without elements for each missing one."""
    out, lse, probs, rng_state = results
    probs = q.new_empty(0) if probs is None else probs
    rng_state = q.new_empty(0, dtype=torch.int64) if rng_state is None else rng_state
    return out, lse, probs, rng_state


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
    rng_state: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One forward with every option spelled out; shapes as in ``flash_attn_func``.

    Arguments:
        rng_state: of dropout, int64, as ``checks.rng_state`` has it; drawn if not given.

    Returns:
        out (batch, seqlen_q, heads, head_dim); softmax_lse (batch, heads, seqlen_q), float32;
        S_dmask (batch, heads, seqlen_q, seqlen_k) if return_softmax, else (0,); rng_state (2,), or
        as it was given, int64 with dropout, else (0,).
    """
    options = Options(
        dropout_p=dropout_p, softmax_scale=softmax_scale, causal=causal, softcap=softcap,
        window_size=(window_size_left, window_size_right), alibi_slopes=alibi_slopes, s_aux=s_aux,
        return_attn_probs=checks.flag(return_softmax, "return_softmax"),
    )  # fmt: skip
    return _filled(q, forward(q, k, v, options, rng_state=rng_state))


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
    rng_state: Tensor | None = None,
    num_splits: int = 0,
    k_descale: Descale = None,
    v_descale: Descale = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One varlen forward with every option spelled out; shapes as in ``flash_attn_varlen_func``.

    Arguments:
        cu_seqlens_k: may be None with block_table and seqused_k, which say how long sequences are;
            with both, what it holds does not count.
        leftpad_k: (batch,), int32: the position of the first key of each sequence.
        seqused_k: (batch,), int32: how many keys of each sequence are in use; None is all.
        zero_tensors: accepted and ignored: rows that no sequence owns are always 0.
        rng_state: as in :func:`_flash_attn_forward`.
        num_splits: as in ``flash_attn_with_kvcache``, for sequences of few queries.
        k_descale, v_descale: as there, of pages in float8_e4m3fn.

    Returns:
        out (total_q, heads, head_dim); softmax_lse (heads, total_q), float32; S_dmask (batch,
        heads, max_seqlen_q, max_seqlen_k) if return_softmax, else (0,); rng_state (2,), or as it
        was given, int64 with dropout, else (0,).
    """
    if cu_seqlens_k is None and block_table is not None and seqused_k is not None:
        cu_seqlens_k = cu_seqlens_q
    options = Options(
        dropout_p=dropout_p, softmax_scale=softmax_scale, causal=causal, softcap=softcap,
        window_size=(window_size_left, window_size_right), alibi_slopes=alibi_slopes, s_aux=s_aux,
        return_attn_probs=checks.flag(return_softmax, "return_softmax"),
    )  # fmt: skip
    lengths = Lengths(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    keys = Keys(block_table, leftpad_k, seqused_k)
    num_splits = checks.num_splits(num_splits)
    given = checks_fp8.given_of(None, k_descale, v_descale, None)
    results = forward(q, k, v, options, lengths, keys, num_splits, rng_state, given)
    return _filled(q, results)


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
    options = Options(
        dropout_p=dropout_p, softmax_scale=softmax_scale, causal=causal, softcap=softcap,
        window_size=(window_size_left, window_size_right), alibi_slopes=alibi_slopes, s_aux=s_aux,
        deterministic=deterministic,
    )  # fmt: skip
    tensors = Gradients(dout, q, k, v, out, softmax_lse, dq, dk, dv, dlse, ds_aux)
    return backward(tensors, options, rng_state)


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
    options = Options(
        dropout_p=dropout_p, softmax_scale=softmax_scale, causal=causal, softcap=softcap,
        window_size=(window_size_left, window_size_right), alibi_slopes=alibi_slopes, s_aux=s_aux,
        deterministic=deterministic,
    )  # fmt: skip
    tensors = Gradients(dout, q, k, v, out, softmax_lse, dq, dk, dv, dlse, ds_aux)
    lengths = Lengths(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return backward(tensors, options, rng_state, lengths, seqused_k)


# Where these were custom operations, clients reached the Python function through _init_fn.
for _function in (
    _flash_attn_forward,
    _flash_attn_varlen_forward,
    _flash_attn_backward,
    _flash_attn_varlen_backward,
):
    _function._init_fn = _function
