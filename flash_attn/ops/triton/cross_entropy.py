"""Cross entropy over large, possibly sharded vocabularies, with a regulariser on the normaliser.

Rows are worked on a few at a time: the fp32 copy of 16-bit logits never exists as a whole, and the
gradient can overwrite the logits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from flash_attn.api import checks
from flash_attn.compat.functions import Applied, function_class
from flash_attn.compat.names import refusing

__all__ = ["CrossEntropyLoss", "cross_entropy_loss"]

# Elements of an fp32 chunk: 32 MiB, small next to the logits and large next to a kernel launch.
_CHUNK_ELEMENTS = 2**23


def _row_chunks(logits: Tensor):
    rows = max(1, _CHUNK_ELEMENTS // max(1, logits.shape[1]))
    for start in range(0, logits.shape[0], rows):
        yield slice(start, min(start + rows, logits.shape[0]))


def _scaled(logits: Tensor, logit_scale: float) -> Tensor:
    """(rows, vocab) in fp32 (fp64 for fp64), times the scale."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return wide if logit_scale == 1.0 else wide * logit_scale


def _gather_over_ranks(lse: Tensor, sums: Tensor, group) -> tuple[Tensor, Tensor]:
    """From each rank's share of the vocabulary to the whole: lse (rows,), sums (2, rows)."""
    highest = lse.clone()
    dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
    parts = torch.cat((torch.exp(lse - highest)[None], sums))
    dist.all_reduce(parts, group=group)
    return highest + torch.log(parts[0]), parts[1:]


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        logits,
        labels,
        precomputed_lse,
        smoothing,
        logit_scale,
        lse_square_scale,
        ignore_index,
        inplace_backward,
        group,
    ):
        shards = 1 if group is None else dist.get_world_size(group)
        rank = 0 if group is None else dist.get_rank(group)
        vocab_local = logits.shape[1]
        vocab = vocab_local * shards
        used = labels != ignore_index
        wide = torch.promote_types(logits.dtype, torch.float32)

        # The label's column in this shard; -1 where another shard has it, or the row is ignored.
        column = labels - rank * vocab_local
        here = used & (column >= 0) & (column < vocab_local)
        column = torch.where(here, column, -1)

        lse = torch.empty(logits.shape[0], dtype=wide, device=logits.device)
        sums = torch.zeros(2, logits.shape[0], dtype=wide, device=logits.device)
        for rows in _row_chunks(logits):
            chunk = _scaled(logits[rows], logit_scale)
            lse[rows] = (
                torch.logsumexp(chunk, 1) if precomputed_lse is None else precomputed_lse[rows]
            )
            target = chunk.gather(1, column[rows].clamp(min=0)[:, None])[:, 0]
            sums[0, rows] = torch.where(here[rows], target, 0)
            if smoothing:
                sums[1, rows] = chunk.sum(1)
        if shards > 1:
            lse, sums = _gather_over_ranks(lse, sums, group)

        losses = lse - (1 - smoothing) * sums[0]
        if smoothing:
            losses = losses - smoothing / vocab * sums[1]
        z_losses = torch.where(used, lse_square_scale * lse.square(), 0)
        losses = torch.where(used, losses + z_losses, 0)

        ctx.save_for_backward(logits, column, used, lse)
        ctx.constants = _Constants(smoothing, vocab, logit_scale, lse_square_scale)
        ctx.inplace_backward, ctx.shards = inplace_backward, shards
        ctx.mark_non_differentiable(z_losses)
        return losses, z_losses

    @staticmethod
    def backward(ctx, dlosses, _):
        logits, column, used, lse = ctx.saved_tensors
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # create_graph=True
            return _differentiable_gradient(ctx, dlosses), *(None for _ in range(8))
        dlogits = logits if ctx.inplace_backward else torch.empty_like(logits)
        for rows in _row_chunks(logits):
            dlogits[rows] = _gradient(
                logits[rows], column[rows], used[rows], lse[rows], dlosses[rows], ctx.constants
            )
        return dlogits, *(None for _ in range(8))


class _Constants(NamedTuple):
    smoothing: float
    vocab: int
    logit_scale: float
    lse_square_scale: float


def _gradient(
    logits: Tensor, column: Tensor, used: Tensor, lse: Tensor, dlosses: Tensor, c: _Constants
) -> Tensor:
    """The gradient of some rows: (rows, vocab), dtype of the logits. Differentiable, if lse is."""
    p = torch.exp(_scaled(logits, c.logit_scale) - lse[:, None])
    grad = p * (1 + 2 * c.lse_square_scale * lse[:, None])
    if c.smoothing:
        grad = grad - c.smoothing / c.vocab
    at_label = torch.where(column >= 0, c.smoothing - 1, 0.0).to(grad.dtype)
    grad.scatter_add_(1, column.clamp(min=0)[:, None], at_label[:, None])
    # An ignored row may hold inf or NaN: it gets 0, not 0 * NaN.
    dlosses = torch.where(used, dlosses, 0) * c.logit_scale
    return torch.where(used[:, None], grad * dlosses[:, None], 0).to(logits.dtype)


def _differentiable_gradient(ctx, dlosses: Tensor) -> Tensor:
    """For second derivatives: all rows at once, from a log-sum-exp that depends on the logits."""
    logits, column, used, _ = ctx.saved_tensors
    if ctx.shards > 1:
        raise RuntimeError("cross_entropy_loss has no second derivative with process_group")
    # What ignored rows hold would make their second derivative 0 * NaN.
    logits = logits.masked_fill(~used[:, None], 0)
    lse = torch.logsumexp(_scaled(logits, ctx.constants.logit_scale), 1)
    return _gradient(logits, column, used, lse, dlosses, ctx.constants)


def _check_tensors(logits: Tensor, labels: Tensor) -> None:
    checks.tensor(logits, "logits")
    checks.tensor(labels, "labels")
    if not logits.is_floating_point():
        raise ValueError(f"logits: got dtype {logits.dtype}; a floating-point one is needed")
    if labels.dtype not in (torch.int64, torch.int32):
        hint = "; probabilities of classes are not offered" if labels.is_floating_point() else ""
        raise ValueError(
            f"labels: got dtype {labels.dtype}; classes of rows, int64 or int32, are needed{hint}"
        )


def _check_labels(labels: Tensor, vocab: int, ignore_index: int) -> None:
    """A label of no class would be a row without a target. A GPU would have to be waited for."""
    wrong = (labels != ignore_index) & ((labels < 0) | (labels >= vocab))
    if wrong.any():
        raise ValueError(
            f"labels: got {int(labels[wrong][0])}; accepted are 0 to {vocab - 1}, and "
            f"ignore_index = {ignore_index}"
        )


def cross_entropy_loss(
    logits: Tensor,
    labels: Tensor,
    precomputed_lse: Tensor | None = None,
    label_smoothing: float = 0.0,
    logit_scale: float = 1.0,
    lse_square_scale: float = 0.0,
    ignore_index: int = -100,
    inplace_backward: bool = False,
    process_group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """Cross entropy of each row, differentiable in ``logits``, twice unless ``process_group``.

    With z = logit_scale * logits and lse = logsumexp(z), a row's loss is
    ``lse - (1 - s) z[label] - s mean(z) + lse_square_scale * lse**2``. The last term keeps the
    normaliser near 1 (Chowdhery et al. 2022, "PaLM", arXiv:2204.02311).

    Args:
        logits: (rows, vocab), any floating dtype; the arithmetic is fp32 (fp64 for fp64).
        labels: (rows,) int64 or int32, in [0, vocab) or ``ignore_index`` (checked on the CPU only).
        precomputed_lse: (rows,) logsumexp of z where the caller has it (of this rank's shard with
            ``process_group``).
        label_smoothing: s in [0, 1].
        logit_scale: multiplies the logits.
        lse_square_scale: weight of lse**2.
        ignore_index: rows with this label have loss and gradient 0.
        inplace_backward: write the gradient over the logits. They must not be needed again. With
            create_graph=True, where they are, the gradient is a tensor of its own.
        process_group: tensor parallelism: each rank holds (rows, vocab / ranks), in rank order, and
            all hold the same labels; all get the same losses.

    Returns:
        losses (rows,), which include the last term, and that term alone (rows,), without gradient.

    Raises:
        ValueError: logits that are not (rows, vocab), labels that are not (rows,), not integers or
            hold a class that does not exist.
        RuntimeError: a gradient with create_graph=True over more than one rank.
    """
    _check_tensors(logits, labels)
    if logits.dim() != 2:
        raise ValueError(f"logits: got shape {tuple(logits.shape)}; (rows, vocab) is needed")
    if labels.shape != logits.shape[:1]:
        raise ValueError(
            f"labels: got shape {tuple(labels.shape)}; {tuple(logits.shape[:1])}, a class for "
            "each row of logits, is needed"
        )
    if labels.is_cpu and type(labels) is Tensor and not torch.compiler.is_compiling():
        shards = 1 if process_group is None else dist.get_world_size(process_group)
        _check_labels(labels, shards * logits.shape[1], ignore_index)
    return _CrossEntropy.apply(
        logits,
        labels.long(),
        precomputed_lse,
        label_smoothing,
        logit_scale,
        lse_square_scale,
        ignore_index,
        inplace_backward,
        process_group,
    )


CrossEntropyLoss: Applied = function_class("CrossEntropyLoss", cross_entropy_loss, __name__)

if not TYPE_CHECKING:
    __getattr__ = refusing(__name__)
