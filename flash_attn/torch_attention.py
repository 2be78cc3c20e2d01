"""torch's own attention on these kernels: the flash attention implementation ``"flash_attn"``.

``import flash_attn`` registers it, which changes nothing. From
``torch.nn.attention.activate_flash_attention_impl("flash_attn")`` on the operators of
``F.scaled_dot_product_attention`` (its flash back end), ``torch.nn.attention.varlen`` and jagged
tensors run the functions below for CUDA tensors. torch keeps what it has for their autograd, their
fake results and the choice of the back end. Arguments have the operators' names and order.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import attention

from flash_attn.call import Gradients, Keys, Lengths, Options
from flash_attn.dispatch import calls, private
from flash_attn.dispatch.autograd import rows_contiguous

NAME = "flash_attn"


def flash_attention_forward(
    query: Tensor, key: Tensor, value: Tensor, cum_seq_q: Tensor | None, cum_seq_k: Tensor | None,
    max_q: int, max_k: int, dropout_p: float, is_causal: bool, return_debug_mask: bool, *,
    scale: float | None = None, window_size_left: int | None = None,
    window_size_right: int | None = None, seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None, block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """``aten::_flash_attention_forward``, of a dense or, with cum_seq_q, of a packed batch.

    Arguments:
        query: (batch, seqlen_q, heads, head_dim), or (total_q, heads, head_dim).
        key, value: (batch, seqlen_k, heads_k, head_dim), (total_k, heads_k, head_dim), or, with
            block_table, (pages, page_size, heads_k, head_dim).
        cum_seq_q, cum_seq_k: (batch + 1,), int32; the second may be None with pages.
        max_q, max_k: at least the length of the longest sequence.
        is_causal: aligned to the bottom right, where the lengths differ.
        window_size_left, window_size_right: None and -1 are no limit.
        seqused_k: (batch,), int32: how many keys of each sequence are in use.
        alibi_slopes: (heads,) or (batch, heads), float32.
        block_table: (batch, pages of a sequence), int32; needs seqused_k or cum_seq_k.
        num_splits: 1 makes a row's result independent of the rest of the batch, None leaves the
            choice to the kernels.

    Returns:
        out like query, laid out as that is; the log-sum-exp (batch, heads, seqlen_q), or (heads,
        total_q), float32; dropout's state (2,) and (), uint64, not initialised without dropout;
        with return_debug_mask the probabilities (batch, heads, seqlen_q, seqlen_k), else (0,).

    Raises:
        NotImplementedError: a gradient is wanted where torch's backward would be a wrong one.
        ValueError: what ``flash_attn_func`` or ``flash_attn_varlen_func`` refuses.
    """
    _has_a_backward(
        query, key, value, seqused_k=seqused_k, alibi_slopes=alibi_slopes, block_table=block_table
    )
    lengths, keys = None, calls.NO_KEYS
    if cum_seq_q is not None:
        lengths = _lengths(cum_seq_q, cum_seq_k, max_q, max_k, seqused_k, block_table)
        keys = Keys(block_table, seqused_k=seqused_k)
    elif not (cum_seq_k is seqused_k is block_table is None):
        raise ValueError("cum_seq_q: got None; cum_seq_k, seqused_k and block_table need it")
    options = _options(
        dropout_p, is_causal, scale, window_size_left, window_size_right,
        alibi_slopes=alibi_slopes, return_attn_probs=return_debug_mask,
        batch_invariant=num_splits == 1,
    )  # fmt: skip
    with torch.no_grad():  # torch's autograd is above this
        q, k, v = map(rows_contiguous, (query, key, value))
        out, lse, probs, rng_state = private.forward(
            q, k, v, options, lengths, keys, num_splits or 0
        )
    uint64 = torch.uint64
    return (
        _laid_out_as(query, out),
        lse,
        rng_state.view(uint64) if dropout_p > 0 else query.new_empty(2, dtype=uint64),
        query.new_empty((), dtype=uint64),
        probs if return_debug_mask else query.new_empty(0),
    )


def flash_attention_forward_inplace(out: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """``aten::_flash_attention_forward_no_dropout_inplace``: fills out, returns the log-sum-exp."""
    result, lse, *_ = flash_attention_forward(*args, **kwargs)
    out.copy_(result)
    return lse


def flash_attention_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor,
    cum_seq_q: Tensor | None, cum_seq_k: Tensor | None, max_q: int, max_k: int, dropout_p: float,
    is_causal: bool, rng_state: Tensor, unused: Tensor, *, scale: float | None = None,
    window_size_left: int | None = None, window_size_right: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """``aten::_flash_attention_backward``: the gradients of query, key and value, shaped as they
    are. They repeat bit by bit under ``torch.use_deterministic_algorithms``."""
    lengths = None
    if cum_seq_q is not None:
        lengths = _lengths(cum_seq_q, cum_seq_k, max_q, max_k)
    options = _options(
        dropout_p, is_causal, scale, window_size_left, window_size_right,
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )  # fmt: skip
    with torch.no_grad():
        q, k, v = map(rows_contiguous, (query, key, value))
        gradients = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        tensors = Gradients(grad_out, q, k, v, out, logsumexp, *gradients)
        state = rng_state.view(torch.int64) if dropout_p > 0 else None
        private.backward(tensors, options, state, lengths)
    return gradients


def scaled_dot_product_forward(
    query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0, is_causal: bool = False,
    return_debug_mask: bool = False, *, scale: float | None = None,
):  # fmt: skip
    """``aten::_scaled_dot_product_flash_attention``: the same of (batch, heads, seqlen, head_dim);
    between log-sum-exp and dropout's state come cum_seq_q, cum_seq_k (None), max_q and max_k."""
    q, k, v = _transposed(query, key, value)
    longest = q.shape[1], k.shape[1]
    out, lse, *rest = flash_attention_forward(
        q, k, v, None, None, *longest, dropout_p, is_causal, return_debug_mask, scale=scale
    )
    return out.transpose(1, 2), lse, None, None, *longest, *rest


def scaled_dot_product_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, *args: Any,
    scale: float | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """``aten::_scaled_dot_product_flash_attention_backward``."""
    rows = _transposed(grad_out, query, key, value, out)
    return _transposed(*flash_attention_backward(*rows, *args, scale=scale))


_OPERATORS = {
    "_flash_attention_forward": flash_attention_forward,
    "_flash_attention_forward_no_dropout_inplace": flash_attention_forward_inplace,
    "_flash_attention_backward": flash_attention_backward,
    "_scaled_dot_product_flash_attention": scaled_dot_product_forward,
    "_scaled_dot_product_flash_attention_backward": scaled_dot_product_backward,
}


class Override:
    """Serves the operators for one dispatch key, until it is removed: torch's handle."""

    def __init__(self, dispatch_key: str = "CUDA"):
        self._library: torch.library.Library | None = torch.library.Library("aten", "IMPL")
        for name, function in _OPERATORS.items():
            if hasattr(torch.ops.aten, name):  # an older torch lacks the one that fills out
                self._library.impl(name, function, dispatch_key)

    def remove(self) -> None:
        self._library = None  # which takes its functions along


def register() -> None:
    """Makes the name known to ``torch.nn.attention``, and nothing else.

    Raises:
        RuntimeError: this torch has no registry of implementations.
    """
    if not has_registry():
        raise RuntimeError(
            f"flash_attn: torch {torch.__version__} has no "
            "torch.nn.attention.register_flash_attention_impl; torch >= 2.10 is needed to run its "
            "own attention on these kernels"
        )
    attention.register_flash_attention_impl(NAME, register_fn=Override)


def has_registry() -> bool:
    """Whether torch knows implementations of attention by name; older than 2.10 it does not."""
    return hasattr(attention, "register_flash_attention_impl")


def _options(
    dropout_p: float, is_causal: bool, scale: float | None, left: int | None, right: int | None,
    **others: Any,
) -> Options:  # fmt: skip
    window = (-1 if left is None else left, -1 if right is None else right)
    return Options(dropout_p, scale, is_causal, window, **others)


def _lengths(
    cum_seq_q: Tensor, cum_seq_k: Tensor | None, max_q: int, max_k: int,
    seqused_k: Tensor | None = None, block_table: Tensor | None = None,
) -> Lengths:  # fmt: skip
    if cum_seq_k is None:
        if seqused_k is None or block_table is None:
            raise ValueError("cum_seq_k: got None; that needs block_table and seqused_k")
        cum_seq_k = cum_seq_q  # whose numbers do not count then
    return Lengths(cum_seq_q, cum_seq_k, max_q, max_k)


def _has_a_backward(*inputs: Tensor, **forward_only: Tensor | None) -> None:
    """torch records a backward of q, k, v, lengths and window: it would ignore the others."""
    if not torch.is_grad_enabled() or not any(x.requires_grad for x in inputs):
        return
    for name, x in forward_only.items():
        if x is not None:
            raise NotImplementedError(
                f"{name}: got one with inputs that require a gradient; torch has no backward of "
                "it: call under torch.no_grad(), or flash_attn_func or flash_attn_varlen_func"
            )


def _transposed(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(x.transpose(1, 2) for x in tensors)


def _laid_out_as(query: Tensor, out: Tensor) -> Tensor:
    """out with its dimensions in memory in query's order: what torch tells compilers they find."""
    order = sorted(range(query.dim()), key=lambda i: -(query.stride(i) or math.inf))
    seen = [i for i in order if query.shape[i] > 1]
    if seen == sorted(seen):
        return out
    like = torch.empty_permuted(out.shape, order, dtype=out.dtype, device=out.device)
    return like.copy_(out)
