"""What the backends of all engines share: attention of a step's queries over pages of a cache."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flash_attn.api.checks_fp8 import NO_CODES, given_of
from flash_attn.call import FP8, Descale, Keys, Lengths, Options
from flash_attn.dispatch import private

#: What engines call caches of float8_e4m3fn codes.
FP8_NAMES = ("fp8", "fp8_e4m3")


class Step(NamedTuple):
    """Where the sequences of a step lie: prompts, chunks of prompts and single tokens together.

    The host reads none of the tensors: a captured graph replays with other contents, within the two
    bounds. Sequences without queries and rows past the last sequence are padding.
    """

    cu_seqlens_q: Tensor  # (batch + 1,) int32
    seqused_k: Tensor  # (batch,) int32: the keys of each sequence, its new ones included
    block_table: Tensor  # (batch, pages) int32; wider than needed is fine, whatever lies there
    max_seqlen_q: int
    max_seqlen_k: int


class Scales(NamedTuple):
    """What a layer's codes are multiplied by, as an engine keeps it: a number, a tensor of one or
    of each KV head, which a captured graph reads again, or None, which is 1."""

    k: Tensor | float | None = None
    v: Tensor | float | None = None


def attend(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, step: Step, options: Options,
    scales: Scales | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention over pages.

    Arguments:
        q: (total_q, heads, head_dim).
        k_pages: (pages, page_size, heads_k, head_dim), any strides with a unit last one.
        v_pages: as k_pages; its head_dim may differ.
        scales: pages are codes, as float8_e4m3fn or as the uint8 that engines store them in.

    Returns:
        out (total_q, heads, head_dim of v); lse (heads, total_q), float32, natural logarithms. Rows
        of padding have out 0 and lse -inf, a sink's if there is one.
    """
    cu_seqlens_q, seqused_k, block_table, max_seqlen_q, max_seqlen_k = step
    # With pages, seqused_k says how long sequences are, and cu_seqlens_k is not read.
    lengths = Lengths(cu_seqlens_q, cu_seqlens_q, max_seqlen_q, max_seqlen_k)
    keys = Keys(block_table, seqused_k=seqused_k)
    given = NO_CODES
    if scales is not None:
        k_pages, v_pages = k_pages.view(FP8), v_pages.view(FP8)
        k_descale, v_descale = (_descale(scale, lengths, k_pages) for scale in scales)
        given = given_of(None, k_descale, v_descale, None)
    out, lse, _, _ = private.forward(q, k_pages, v_pages, options, lengths, keys, given=given)
    return out, lse


def _descale(scale: Tensor | float | None, lengths: Lengths, pages: Tensor) -> Descale:
    if not isinstance(scale, Tensor):
        return scale
    return scale.detach().to(torch.float32).reshape(-1).expand(lengths.batch, pages.shape[2])


def attend_new(
    q: Tensor, k: Tensor, v: Tensor, step: Step, options: Options
) -> tuple[Tensor, Tensor]:
    """``attend`` among the tokens of the step alone: k and v (total_q, heads_k, head_dim)."""
    lengths = Lengths(step.cu_seqlens_q, step.cu_seqlens_q, step.max_seqlen_q, step.max_seqlen_q)
    out, lse, _, _ = private.forward(q, k, v, options, lengths)
    return out, lse


def refuse_cache(got: object) -> str:
    """Why a cache is refused."""
    return (
        f"got a KV cache of {got}; this backend reads float16 and bfloat16, the model's own dtype, "
        "and float8_e4m3fn: leave kv_cache_dtype at 'auto', or choose 'fp8_e4m3'"
    )
