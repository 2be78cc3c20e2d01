"""The module around ``cross_entropy_loss``."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor, nn

from flash_attn.ops.triton.cross_entropy import cross_entropy_loss

__all__ = ["CrossEntropyLoss"]


class CrossEntropyLoss(nn.Module):
    """``nn.CrossEntropyLoss`` for (rows, vocab) logits, also sharded over ranks.

    Args:
        ignore_index: rows with this label count neither in the sum nor in the mean.
        reduction: "mean", "sum" or "none".
        label_smoothing, logit_scale, lse_square_scale, inplace_backward, process_group: see
            ``flash_attn.ops.triton.cross_entropy.cross_entropy_loss``.
        return_z_loss: also return the lse**2 term, reduced alike and without gradient.
    """

    def __init__(
        self,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        logit_scale: float = 1.0,
        lse_square_scale: float = 0.0,
        inplace_backward: bool = False,
        process_group: dist.ProcessGroup | None = None,
        return_z_loss: bool = False,
    ):
        """Arguments, defaults and errors: see the class."""
        super().__init__()
        if reduction not in ("mean", "sum", "none"):
            raise ValueError(f"reduction: got {reduction!r}; 'mean', 'sum' or 'none' is needed")
        self.ignore_index = ignore_index
        self.reduction = reduction
        self.label_smoothing = label_smoothing
        self.logit_scale = logit_scale
        self.lse_square_scale = lse_square_scale
        self.inplace_backward = inplace_backward
        self.process_group: dist.ProcessGroup | None = process_group
        self.return_z_loss = return_z_loss

    def forward(
        self, input: Tensor, target: Tensor, precomputed_lse: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """``input`` (rows, vocab), ``target`` (rows,) -> a scalar, or (rows,) for "none".

        A mean over no rows at all is NaN, as in ``nn.CrossEntropyLoss``.
        """
        losses, z_losses = cross_entropy_loss(
            input, target, precomputed_lse, self.label_smoothing, self.logit_scale,
            self.lse_square_scale, self.ignore_index, self.inplace_backward, self.process_group,
        )  # fmt: skip
        loss, z_loss = (self._reduce(t, target) for t in (losses, z_losses))
        return (loss, z_loss) if self.return_z_loss else loss

    def _reduce(self, losses: Tensor, target: Tensor) -> Tensor:
        if self.reduction == "none":
            return losses
        total = losses.sum()
        return total if self.reduction == "sum" else total / (target != self.ignore_index).sum()
