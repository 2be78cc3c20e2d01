"""Keys and values as 8-bit codes for a KV cache, and the descales that they need.

A key is its float8_e4m3fn code times its descale; docs/fp8.md says how calls take both.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn

from flash_attn.api import checks
from flash_attn.call import FP8, Descale
from flash_attn.cpu.fp8 import LARGEST, encoded

__all__ = ["KVScales", "quantize_kv"]

#: For what there is one descale: each row ("token") and head, each head, or all of a tensor.
Per: TypeAlias = Literal["head", "token", "tensor"]
_TINY = torch.finfo(torch.float32).tiny


@torch.no_grad()
def quantize_kv(
    k: Tensor,
    v: Tensor,
    *,
    k_descale: Descale = None,
    v_descale: Descale = None,
    per: Per = "head",
) -> tuple[Tensor, Tensor, Descale, Descale]:
    """The codes of keys and values, for a cache that a prompt has filled, or to copy into one.

    Codes are rounded as ``flash_attn_with_kvcache`` rounds what it appends. A descale that is not
    given is chosen so that the largest number it is for becomes the largest code, 448; numbers
    that are not finite do not count. It is 1 where all are 0.

    Arguments:
        k: (batch, seqlen, heads_k, head_dim), pages (num_pages, page_size, heads_k, head_dim), or
            packed (total, heads_k, head_dim); any floating dtype.
        v: as k; its head_dim may differ.
        k_descale: a number, or a float32 tensor: (heads_k,), of each row and head k.shape[:-1], or,
            with four dimensions of k, (batch, heads_k). None chooses.
        v_descale: as k_descale.
        per: what there is a descale for, where it is chosen: "head": of each entry of a batch and
            each head, of packed rows of each head; "token": of each row and head; "tensor": one.
            Pages of one sequence would have several with "head": give those of
            :class:`KVScales`, or ask for "token".

    Returns:
        codes of k and of v, float8_e4m3fn, contiguous, shaped as they are; their descales: those
        given, or float32: "head" and "tensor" (batch, heads_k), of packed rows (heads_k,); "token"
        k.shape[:-1].

    Raises:
        TypeError, ValueError: tensors, descales or a ``per`` that are not as above.
    """
    if per not in ("head", "token", "tensor"):
        raise ValueError(f'per: got {per!r}; "head", "token" or "tensor" is needed')
    k_codes, k_descale = _quantized(k, "k", k_descale, per)
    v_codes, v_descale = _quantized(v, "v", v_descale, per)
    return k_codes, v_codes, k_descale, v_descale


def _quantized(x: Tensor, name: str, descale: Descale, per: Per) -> tuple[Tensor, Descale]:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: got {type(x).__name__}; a torch.Tensor is needed")
    if x.dim() not in (3, 4) or not x.is_floating_point() or x.dtype is FP8:
        raise ValueError(
            f"{name}: got shape {tuple(x.shape)} of {x.dtype}; (…, heads_k, head_dim) with three "
            "or four dimensions of a floating dtype is needed"
        )
    if descale is None:
        descale = _chosen(x, per)
    return encoded(x, _of_rows(descale, f"{name}_descale", x)).contiguous(), descale


def _chosen(x: Tensor, per: Per) -> Tensor:
    amax = _amax(x, dims=(-1,))  # x.shape[:-1]
    if per != "token" and amax.numel():
        amax = amax.amax(1 if x.dim() == 4 else 0)  # (batch, hk), or (hk,)
    elif per != "token":
        amax = amax.new_zeros((x.shape[0], x.shape[2]) if x.dim() == 4 else x.shape[1])
    if per == "tensor" and amax.numel():
        amax = amax.amax().expand(amax.shape)
    return _descale(amax)


def _of_rows(descale: float | Tensor, name: str, x: Tensor) -> Tensor:
    """A descale as one that multiplies rows of x (…, hk, d): (), (hk,), or of as many dimensions
    as x has, but for the last."""
    if not isinstance(descale, Tensor):
        checks.number(descale, name)
        if not descale > 0:
            raise ValueError(f"{name}: got {descale}; a positive number is needed")
        descale = torch.full((), descale, dtype=torch.float32, device=x.device)
    shape, rows = tuple(descale.shape), tuple(x.shape[:-1])
    descale = descale.to(x.device, torch.float32)
    if shape in ((), rows[-1:], rows):
        return descale
    if x.dim() == 4 and shape == (rows[0], rows[2]):
        return descale[:, None]
    raise ValueError(f"{name}: got shape {shape}; it does not go with a tensor of {(*x.shape,)}")


def _amax(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """The largest finite sizes over some dimensions of x, float32; 0 where there are none."""
    if 0 in x.shape:
        kept = [n for i, n in enumerate(x.shape) if i not in {d % x.dim() for d in dims}]
        return x.new_zeros(kept, dtype=torch.float32)
    return torch.where(x.isfinite(), x, 0).abs().amax(dims).to(torch.float32)


def _descale(amax: Tensor) -> Tensor:
    """The descale that makes amax the largest code; never 0, because numbers are divided by it."""
    # Divided by a tensor: for a Python number torch on a GPU multiplies by the reciprocal, with
    # other bits.
    largest = amax.new_full((), LARGEST)
    return torch.where(amax == 0, 1.0, (amax / largest).clamp(min=_TINY))


class KVScales(nn.Module):
    """Descales for a layer's cache, from the keys and values that it has seen: calibration.

    It keeps the largest size of each KV head, in two buffers, so ``state_dict`` and ``to`` work.

    Arguments:
        heads_k: KV heads.
        margin: how many times as large as those seen numbers may be before they saturate. Codes
            are floating-point, so a larger one costs precision among the smallest numbers alone.
        device: of the buffers.

    Raises:
        ValueError: a margin that is not positive.
    """

    k_amax: Tensor  # (heads_k,) float32
    v_amax: Tensor

    def __init__(
        self, heads_k: int, *, margin: float = 1.0, device: torch.device | str | None = None
    ):
        """Arguments, defaults and errors: see the class."""
        super().__init__()
        if not margin > 0:
            raise ValueError(f"margin: got {margin}; a positive number is needed")
        self.margin = float(margin)
        for name in ("k_amax", "v_amax"):
            self.register_buffer(name, torch.zeros(heads_k, dtype=torch.float32, device=device))

    @torch.no_grad()
    def observe(self, k: Tensor, v: Tensor) -> None:
        """Takes k and v (…, heads_k, head_dim) of a batch into account; keys as they are stored,
        that is, rotated. Numbers that are not finite do not count."""
        for seen, name, x in ((self.k_amax, "k", k), (self.v_amax, "v", v)):
            if x.dim() < 2 or x.shape[-2] != seen.shape[0]:
                raise ValueError(
                    f"{name}: got shape {tuple(x.shape)}; (…, {seen.shape[0]}, head_dim) is needed"
                )
            others = tuple(i for i in range(x.dim()) if i != x.dim() - 2)
            torch.maximum(seen, _amax(x, others).to(seen.device), out=seen)

    def descales(self, batch: int) -> tuple[Tensor, Tensor]:
        """k_descale and v_descale for calls of a batch: (batch, heads_k) each, float32, expanded.

        A head of which nothing but 0 was seen has 1.
        """
        k, v = (_descale(x.float() * self.margin) for x in (self.k_amax, self.v_amax))
        return k.expand(batch, -1), v.expand(batch, -1)

    def extra_repr(self) -> str:
        return f"heads_k={self.k_amax.shape[0]}, margin={self.margin:g}"
