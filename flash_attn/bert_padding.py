"""Between padded batches (batch, seqlen, ...) and packed ones (total, ...) with ``cu_seqlens``.

Everything is differentiable and made of torch's own indexing. ``unpad_input`` and
``unpad_input_for_concatenated_sequences`` synchronise with the device: the number of tokens, and
``max_seqlen`` as an int, are needed on the host to size the result.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from flash_attn.compat.functions import Applied, function_class

__all__ = [
    "IndexFirstAxis",
    "IndexFirstAxisResidual",
    "IndexPutFirstAxis",
    "index_first_axis",
    "index_first_axis_residual",
    "index_put_first_axis",
    "pad_input",
    "rearrange",
    "unpad_input",
    "unpad_input_for_concatenated_sequences",
]


def rearrange(tensor: Tensor, pattern: str, **axes_lengths: int) -> Tensor:
    """``einops.rearrange`` for one tensor, through the implementation that ships with torch.

    Some clients import this name from here; it costs nothing until it is called.
    """
    from functorch.einops import rearrange as torch_rearrange

    return torch_rearrange(tensor, pattern, **axes_lengths)


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """Rows of ``input``: (rows, ...), (n,) int64 or int32 -> (n, ...).

    Repeated indices add gradients up.
    """
    return input.index_select(0, indices)


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """The inverse of ``index_first_axis``: (n, ...), (n,) -> (first_axis_dim, ...), zero elsewhere.

    ``indices`` must not repeat. They are int64, or int32 like the ``cu_seqlens[:-1]`` that
    some clients pass when they decode.
    """
    rows = values.new_zeros(first_axis_dim, *values.shape[1:])
    return rows.index_copy(0, indices.long(), values)


def index_first_axis_residual(input: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """``index_first_axis``, and the input itself, as a residual; gradients of both reach it."""
    return index_first_axis(input, indices), input


IndexFirstAxis: Applied = function_class("IndexFirstAxis", index_first_axis, __name__)
IndexPutFirstAxis: Applied = function_class("IndexPutFirstAxis", index_put_first_axis, __name__)
IndexFirstAxisResidual: Applied = function_class(
    "IndexFirstAxisResidual", index_first_axis_residual, __name__
)


def _cu_seqlens(seqlens: Tensor) -> Tensor:
    """(batch,) lengths -> (batch + 1,) int32 running sum that starts with 0."""
    return F.pad(seqlens.cumsum(0, dtype=torch.int32), (1, 0))


def _max_as_int(seqlens: Tensor) -> int:
    return int(seqlens.max()) if seqlens.numel() else 0


def _check_mask(name: str, mask: Tensor, hidden_states: Tensor) -> None:
    if mask.shape != hidden_states.shape[:2]:
        raise ValueError(
            f"{name}: got shape {tuple(mask.shape)}; (batch, seqlen) = "
            f"{tuple(hidden_states.shape[:2])} of hidden_states is needed"
        )


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Pack the tokens that a mask keeps.

    Args:
        hidden_states: (batch, seqlen, ...), any dtype.
        attention_mask: (batch, seqlen), bool or int; nonzero where the token is used.
        unused_mask: (batch, seqlen); nonzero where a token keeps its place in the packed tensor but
            is not used. Such tokens count in ``cu_seqlens`` and not in ``seqused``.

    Returns:
        hidden (total, ...): the kept tokens, row by row.
        indices (total,) int64: where they were in the flattened (batch * seqlen) input.
        cu_seqlens (batch + 1,) int32.
        max_seqlen: int, the longest packed sequence.
        seqused (batch,) int32: used tokens of each sequence.

    Raises:
        ValueError: a mask that is not (batch, seqlen).
    """
    _check_mask("attention_mask", attention_mask, hidden_states)
    used = attention_mask.bool()
    kept = used
    if unused_mask is not None:
        _check_mask("unused_mask", unused_mask, hidden_states)
        kept = used | unused_mask.bool()
    seqlens = kept.sum(dim=-1, dtype=torch.int32)
    indices = torch.nonzero(kept.flatten()).flatten()
    return (
        index_first_axis(hidden_states.flatten(0, 1), indices),
        indices,
        _cu_seqlens(seqlens),
        _max_as_int(seqlens),
        used.sum(dim=-1, dtype=torch.int32),
    )


def unpad_input_for_concatenated_sequences(
    hidden_states: Tensor, attention_mask_in_length: Tensor
) -> tuple[Tensor, Tensor, Tensor, int]:
    """Pack rows that each hold several sequences one after another, so that none sees another.

    Args:
        hidden_states: (batch, seqlen, ...).
        attention_mask_in_length: (batch, seqlen) int; a row lists the lengths of its sequences and
            then zeros. ``[2, 3, 0, 0, 0, 0]`` is two sequences, in tokens 0-1 and 2-4; token 5 is
            padding.

    Returns:
        hidden (total, ...), indices (total,) int64, cu_seqlens (sequences + 1,) int32, and
        max_seqlen as an int.

    Raises:
        ValueError: lengths that are not (batch, seqlen), or a row whose lengths exceed seqlen.
    """
    _check_mask("attention_mask_in_length", attention_mask_in_length, hidden_states)
    seqlen = hidden_states.shape[1]
    used = attention_mask_in_length.sum(dim=-1, keepdim=True)  # (batch, 1)
    if used.numel() and _max_as_int(used) > seqlen:
        raise ValueError(
            f"attention_mask_in_length: got a row that sums to {_max_as_int(used)}; at most "
            f"seqlen = {seqlen} is needed"
        )
    kept = torch.arange(seqlen, device=used.device) < used
    indices = torch.nonzero(kept.flatten()).flatten()
    seqlens = attention_mask_in_length.flatten()
    seqlens = seqlens[seqlens.nonzero().flatten()]
    return (
        index_first_axis(hidden_states.flatten(0, 1), indices),
        indices,
        _cu_seqlens(seqlens),
        _max_as_int(seqlens),
    )


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """The inverse of ``unpad_input``: (total, ...), (total,) -> (batch, seqlen, ...), else 0.

    Raises:
        ValueError: not one index for each row, or (CPU tensors) one past batch * seqlen.
    """
    if indices.shape != hidden_states.shape[:1]:
        raise ValueError(
            f"indices: got shape {tuple(indices.shape)}; one for each row of hidden_states, "
            f"({hidden_states.shape[0]},), is needed"
        )
    # Values are read where that costs no synchronisation and no graph break.
    readable = type(indices) is Tensor and indices.is_cpu and not torch.compiler.is_compiling()
    if readable and indices.numel() and int(indices.max()) >= batch * seqlen:
        raise ValueError(
            f"indices: got {int(indices.max())}; less than batch * seqlen = {batch * seqlen} is "
            "needed"
        )
    rows = index_put_first_axis(hidden_states, indices, batch * seqlen)
    return rows.unflatten(0, (batch, seqlen))
