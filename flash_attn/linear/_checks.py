"""What a caller's arguments meet: shapes, dtypes and devices. What tensors contain is checked where
it is read: sequence lengths, on torch operations, in ``_table``."""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["cu_seqlens_of", "is_step", "one_of", "operands", "scale_of", "shape", "state_of"]

_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def shape(name: str, x: Tensor, *accepted: tuple[str, tuple[int, ...]]) -> None:
    """Raises unless x has one of these shapes, each with its description."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: got {type(x).__name__}; a tensor is needed")
    if all(tuple(x.shape) != sizes for _, sizes in accepted):
        wanted = " or ".join(f"{words} {sizes}" for words, sizes in accepted)
        raise ValueError(f"{name}: got shape {tuple(x.shape)}; {wanted} is needed")


def operands(q: Tensor, k: Tensor, v: Tensor) -> None:
    """q, k [B, T, HK, K] and v [B, T, H, V] of one dtype on one device, H a multiple of HK."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name}: got {type(x).__name__}; a tensor is needed")
        if x.dim() != 4:
            raise ValueError(f"{name}: got shape {tuple(x.shape)}; [B, T, H, D] is needed")
        if x.dtype not in _DTYPES:
            raise ValueError(f"{name}: got dtype {x.dtype}; bf16, fp16 or fp32 is needed")
        if x.dtype != q.dtype or x.device != q.device:
            raise ValueError(
                f"{name}: got {x.dtype} on {x.device}; those of q, {q.dtype} on {q.device}, "
                "are needed"
            )
        if x.shape[-1] == 0:
            raise ValueError(f"{name}: got shape {tuple(x.shape)}; a head dim >= 1 is needed")
    shape("k", k, ("q's", tuple(q.shape)))
    if v.shape[:2] != q.shape[:2]:
        raise ValueError(f"v: got shape {tuple(v.shape)}; q's B and T {tuple(q.shape[:2])}")
    if v.shape[2] != q.shape[2] and (q.shape[2] == 0 or v.shape[2] % q.shape[2]):
        raise ValueError(f"v: got {v.shape[2]} heads; a multiple of q's {q.shape[2]} is needed")


def scale_of(scale: float | None, channels: int) -> float:
    """K^-0.5 unless it is given."""
    if scale is None:
        return channels**-0.5
    if isinstance(scale, bool) or not isinstance(scale, (int, float)) or not math.isfinite(scale):
        raise ValueError(f"scale: got {scale!r}; a finite number or None is needed")
    return float(scale)


def cu_seqlens_of(cu_seqlens: Tensor | None, v: Tensor) -> Tensor | None:
    """[N + 1] int32 on v's device, for a v [1, T, H, V]."""
    if cu_seqlens is None:
        return None
    if cu_seqlens.dim() != 1 or len(cu_seqlens) == 0:
        raise ValueError(f"cu_seqlens: got shape {tuple(cu_seqlens.shape)}; [N + 1] is needed")
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"cu_seqlens: got dtype {cu_seqlens.dtype}; int32 or int64 is needed")
    if cu_seqlens.device != v.device:
        raise ValueError(f"cu_seqlens: got device {cu_seqlens.device}; {v.device} is needed")
    if v.shape[0] != 1:
        raise ValueError(f"cu_seqlens: got B = {v.shape[0]}; one batch entry is needed")
    return cu_seqlens.to(torch.int32).contiguous()


def is_step(v: Tensor, cu_seqlens: Tensor | None) -> bool:
    """Whether a call is one token of each entry of the batch."""
    return v.dim() == 4 and v.shape[1] == 1 and cu_seqlens is None


def state_of(
    state: Tensor | None, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, v_first: bool,
    name: str = "initial_state",
) -> Tensor | None:  # fmt: skip
    """The state as [N, H, K, V] fp32 (fp64 beside fp64), whichever way it lies."""
    if state is None:
        return None
    sequences = v.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
    heads, columns, channels = v.shape[-2], v.shape[-1], k.shape[-1]
    if v_first:
        shape(name, state, ("[N, H, V, K]", (sequences, heads, columns, channels)))
    else:
        shape(name, state, ("[N, H, K, V]", (sequences, heads, channels, columns)))
    if not state.is_floating_point() or state.device != v.device:
        raise ValueError(
            f"{name}: got {state.dtype} on {state.device}; floating point on {v.device} is needed"
        )
    state = state.to(torch.promote_types(v.dtype, torch.float32))
    return state.mT if v_first else state


def step(
    q: Tensor, k: Tensor, v: Tensor, state: Tensor, state_indices: Tensor | None, v_first: bool
) -> Tensor | None:
    """Checks one token of each row, q [B, HK, K], and its states; the slots [B] int32, or None."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor) or x.dim() != 3:
            got = f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else f"{x!r}"
            raise ValueError(f"{name}: got {got}; a tensor [B, H, D] is needed")
    operands(q[:, None], k[:, None], v[:, None])
    batch, heads = v.shape[:2]
    sizes = (heads, v.shape[-1], k.shape[-1]) if v_first else (heads, k.shape[-1], v.shape[-1])
    slots = batch if state_indices is None else state.shape[0]
    words = "[slots, H, V, K]" if v_first else "[slots, H, K, V]"
    shape("state", state, (words, (slots, *sizes)))
    if state_indices is None:
        return None
    shape("state_indices", state_indices, ("[B]", (batch,)))
    return state_indices.to(torch.int32)


def one_of(name: str, value: object, accepted: tuple) -> None:
    if value not in accepted:
        raise ValueError(f"{name}: got {value!r}; one of {accepted} is needed")
