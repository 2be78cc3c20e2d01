"""The checks of latent attention, whose keys are a cache's values and more columns; see
``checks.py``."""

from __future__ import annotations

import functools
from collections.abc import Callable

from torch import Tensor
from torch.compiler import is_compiling

from flash_attn.api import checks
from flash_attn.call import FP8, MaxLogits, Options

#: The check of q, k and v by themselves, where there is a qv.
operands: Callable[..., None] = functools.partial(checks.operands, latent=True)


def queries(qv: Tensor, q: Tensor, v: Tensor, v_name: str) -> None:
    """qv (b, sq, h, dv), or (total_q, h, dv), beside q of as many rows; v is a cache."""
    checks.laid_out(qv, "qv", checks.DENSE_Q if q.dim() == 4 else checks.VARLEN_Q)
    if v.dtype is FP8:
        raise NotImplementedError(
            f"{v_name}: got dtype {FP8} with a qv; a latent cache has the dtype of q, {q.dtype}"
        )
    checks.like_q(qv, "qv", q, is_compiling())
    shape = (*q.shape[:-1], v.shape[-1])
    if tuple(qv.shape) != shape:
        raise checks.bad_shape(qv, "qv", f"that of q, up to the head_dim of {v_name}, {shape},")
    if q.is_cuda and (q.shape[-1] % 8 or v.shape[-1] % 8):
        raise NotImplementedError(
            f"qv: got head dims {q.shape[-1]} and {v.shape[-1]}; on CUDA multiples of 8 are served"
        )


def in_pages(block_table: Tensor | None) -> None:
    """Raises where a packed call has no pages."""
    if block_table is None:
        raise ValueError("qv: got one without block_table; it is for a latent cache, in pages")


def refuse_gradients(**tensors: Tensor) -> None:
    """Raises where a call that could have a gradient elsewhere is asked for one."""
    checks.without_gradients("attention with a qv", **tensors)


def scaled(options: Options, q: Tensor, v: Tensor) -> Options:
    """With the scale of all columns, where none is given."""
    if options.softmax_scale is not None:
        return options
    return options._replace(softmax_scale=(q.shape[-1] + v.shape[-1]) ** -0.5)


def refuse(dropout_p: float, return_attn_probs: bool, return_max_logits: MaxLogits) -> None:
    """NotImplementedError for what attention with a qv does not have."""
    wanted = {
        "dropout_p": dropout_p,
        "return_attn_probs": return_attn_probs,
        "return_max_logits": return_max_logits,
    }
    for name, value in wanted.items():
        if value:
            raise NotImplementedError(f"{name}: got {value} with a qv; attention with one has none")
