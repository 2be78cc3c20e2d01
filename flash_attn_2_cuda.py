"""The module that clients of the compiled extension call by position: ``fwd``, ``bwd`` and so on.

It is Python: the names, the order of the arguments and what comes back are those clients know, and
each call is one of the operations, on whatever device its tensors are. A ``?`` in the argument
lists below marks what may be None. Buffers that are given (``out``, ``dq`` …) are written and
returned. ``gen`` has to be None: the state of dropout comes from torch's default generator of the
device.
"""

from __future__ import annotations

from flash_attn.call import Cache, Options
from flash_attn.compat.tensors import into
from flash_attn.dispatch import calls, private

__all__ = ["bwd", "fwd", "fwd_kvcache", "varlen_bwd", "varlen_fwd"]


def _no_generator(gen) -> None:
    if gen is not None:
        # The error of the package whose calls these are.
        raise RuntimeError(
            f"gen: got a {type(gen).__name__}; the `generator` argument is no longer supported, "
            "None is needed: dropout draws from torch's default generator of the device; call "
            "torch.manual_seed before"
        )


def _no_splits_without_pages(num_splits: int, block_table) -> None:
    if num_splits > 1 and block_table is None:
        # As of the package whose calls these are.
        raise RuntimeError(
            f"num_splits: got {num_splits} without block_table; 0 or 1, or keys in pages are needed"
        )


def fwd(
    q, k, v, out, alibi_slopes, p_dropout, softmax_scale, is_causal, window_size_left,
    window_size_right, softcap, return_softmax, gen=None,
):  # fmt: skip
    """q (b, sq, h, d), k and v (b, sk, hk, d), out?, alibi_slopes?.

    Returns:
        [out (b, sq, h, d), softmax_lse (b, h, sq), S_dmask (b, h, sq, sk) or (0,),
        rng_state (2,) or (0,) int64].
    """
    _no_generator(gen)
    result, lse, probs, rng_state = private._flash_attn_forward(
        q, k, v, p_dropout, softmax_scale, is_causal, window_size_left, window_size_right, softcap,
        alibi_slopes, return_softmax,
    )  # fmt: skip
    return [into(out, result), lse, probs, rng_state]


def varlen_fwd(
    q, k, v, out, cu_seqlens_q, cu_seqlens_k, seqused_k, leftpad_k, block_table, alibi_slopes,
    max_seqlen_q, max_seqlen_k, p_dropout, softmax_scale, zero_tensors, is_causal,
    window_size_left, window_size_right, softcap, return_softmax, gen=None, num_splits=0,
):  # fmt: skip
    """q (total_q, h, d), k and v (total_k, hk, d) or pages, out?, cu_seqlens (b + 1,) int32,
    seqused_k? and leftpad_k? (b,) int32, block_table? (b, max_blocks) int32, alibi_slopes?.

    With block_table and seqused_k what cu_seqlens_k holds does not count, and it may be None.
    num_splits: as in ``flash_attn_with_kvcache``, for sequences of few queries; more than 1 needs
    block_table.

    Returns:
        [out (total_q, h, d), softmax_lse (h, total_q), S_dmask (b, h, max_q, max_k) or (0,),
        rng_state (2,) or (0,) int64].
    """
    _no_generator(gen)
    _no_splits_without_pages(num_splits, block_table)
    result, lse, probs, rng_state = private._flash_attn_varlen_forward(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, p_dropout, softmax_scale,
        is_causal, window_size_left, window_size_right, softcap, alibi_slopes, return_softmax,
        block_table, leftpad_k, seqused_k, zero_tensors, num_splits=num_splits,
    )  # fmt: skip
    return [into(out, result), lse, probs, rng_state]


def bwd(
    dout, q, k, v, out, softmax_lse, dq, dk, dv, alibi_slopes, p_dropout, softmax_scale, is_causal,
    window_size_left, window_size_right, softcap, deterministic, gen=None, rng_state=None,
):  # fmt: skip
    """dout and out (b, sq, h, d), softmax_lse (b, h, sq), dq?, dk?, dv? like q, k, v, rng_state?.

    Returns:
        [dq, dk, dv, softmax_d (b, h, sq)].
    """
    _no_generator(gen)
    dq, dk, dv = _gradients(q, k, v, dq, dk, dv)
    softmax_d = private._flash_attn_backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, p_dropout, softmax_scale, is_causal,
        window_size_left, window_size_right, softcap, alibi_slopes, deterministic,
        rng_state,
    )  # fmt: skip
    return [dq, dk, dv, softmax_d]


def varlen_bwd(
    dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, alibi_slopes,
    max_seqlen_q, max_seqlen_k, p_dropout, softmax_scale, zero_tensors, is_causal,
    window_size_left, window_size_right, softcap, deterministic, gen=None, rng_state=None,
):  # fmt: skip
    """dout and out (total_q, h, d), softmax_lse (h, total_q), dq?, dk?, dv? like q, k, v.

    Returns:
        [dq, dk, dv, softmax_d (h, total_q)].
    """
    _no_generator(gen)
    dq, dk, dv = _gradients(q, k, v, dq, dk, dv)
    softmax_d = private._flash_attn_varlen_backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q,
        max_seqlen_k, p_dropout, softmax_scale, is_causal, window_size_left, window_size_right,
        softcap, alibi_slopes, deterministic, rng_state, zero_tensors,
    )  # fmt: skip
    return [dq, dk, dv, softmax_d]


def _gradients(q, k, v, dq, dk, dv):
    return (
        q.new_empty(q.shape) if dq is None else dq,
        k.new_empty(k.shape) if dk is None else dk,
        v.new_empty(v.shape) if dv is None else dv,
    )


def fwd_kvcache(
    q, k_cache, v_cache, k, v, cache_seqlens, rotary_cos, rotary_sin, cache_batch_idx,
    cache_leftpad, block_table, alibi_slopes, out, softmax_scale, is_causal, window_size_left,
    window_size_right, softcap, is_rotary_interleaved, num_splits,
):  # fmt: skip
    """q (b, sq, h, d), caches (bc, sc, hk, d) or pages, written in place; k?, v?, cache_seqlens?,
    rotary_cos?, rotary_sin?, cache_batch_idx?, cache_leftpad?, block_table?, alibi_slopes?, out?.

    Returns:
        [out (b, sq, h, d), softmax_lse (b, h, sq)].
    """
    cache = Cache(
        k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx,
        cache_leftpad, block_table,
    )  # fmt: skip
    options = Options(
        softmax_scale=softmax_scale, causal=is_causal, softcap=softcap, alibi_slopes=alibi_slopes,
        window_size=(window_size_left, window_size_right), return_lse=True,
    )  # fmt: skip
    result, lse = calls.kvcache(q, cache, options, is_rotary_interleaved, num_splits)
    return [into(out, result), lse]
