"""The checks of what codes of an fp8 KV cache are multiplied by; see ``checks.py``."""

from __future__ import annotations

import torch
from torch import Tensor

from flash_attn.api import checks
from flash_attn.call import FP8, Descale, Descales

#: What codes stand for themselves.
NO_DESCALES = Descales()
_SMALLEST = torch.finfo(torch.float32).tiny  # kernels divide by it in float32


def descales(
    k_descale: Descale, v_descale: Descale, k: Tensor, v: Tensor, q: Tensor, batch: int
) -> Descales:
    """What an operation takes; k and v are the caches, (b_cache, s_cache, hk, d) or pages."""
    if k_descale is None and v_descale is None:
        return NO_DESCALES
    k_tensor, k_all = _descale(k_descale, "k_descale", k, q, batch)
    v_tensor, v_all = _descale(v_descale, "v_descale", v, q, batch)
    return Descales(k_tensor, v_tensor, k_all, v_all)


def _descale(
    x: Descale, name: str, cache: Tensor, q: Tensor, batch: int
) -> tuple[Tensor | None, float]:
    if x is None:
        return None, 1.0
    if cache.dtype is not FP8:
        raise ValueError(
            f"{name}: got one with a {name[0]} of {cache.dtype}; it scales the codes of a KV cache "
            f"of {FP8}"
        )
    if not isinstance(x, Tensor):
        checks.number(x, name)
        if not _SMALLEST <= x <= checks.LARGEST:
            raise ValueError(f"{name}: got {x}; a positive number (of float32) is needed")
        return None, x if isinstance(x, torch.SymFloat) else float(x)
    if x.dtype != torch.float32:
        raise ValueError(f"{name}: got dtype {x.dtype}; torch.float32 is needed")
    checks.on_device_of(x, name, q)
    shape, per_head, per_row = x.shape, (batch, cache.shape[-2]), cache.shape[:-1]
    if shape != per_head and shape != per_row:
        raise checks.bad_shape(
            x, name, f"(batch, heads_k) = {per_head} (call .expand) or, of each row of the cache, "
            f"{tuple(per_row)}",
        )  # fmt: skip
    return x.detach() if x.requires_grad else x, 1.0
