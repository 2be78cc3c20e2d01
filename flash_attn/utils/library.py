"""``triton_op`` under the name that clients import: torch's own."""

from torch.library import triton_op

__all__ = ["triton_op"]
