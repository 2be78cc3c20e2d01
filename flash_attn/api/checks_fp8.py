"""The checks of codes, and of what they are multiplied by; see ``checks.py``."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling

from flash_attn.api import checks
from flash_attn.call import FP8, AllDescales, Descale, Descales, Keys, Options

#: What codes stand for themselves.
NO_DESCALES = Descales()
_OUT_DTYPES = (torch.bfloat16, torch.float16)
_SMALLEST = torch.finfo(torch.float32).tiny  # kernels divide by it in float32


def descales(
    k_descale: Descale, v_descale: Descale, k: Tensor, v: Tensor, q: Tensor, batch: int
) -> Descales:
    """What an operation takes; k and v are the caches, (b_cache, s_cache, hk, d) or pages."""
    if k_descale is None and v_descale is None:
        return NO_DESCALES
    k_tensor, k_all = _descale(k_descale, "k_descale", k, k, batch, cached=True)
    v_tensor, v_all = _descale(v_descale, "v_descale", v, k, batch, cached=True)
    return Descales(k_tensor, v_tensor, k_all, v_all)


class OfCodes(NamedTuple):
    """What a call takes where q, k and v are codes, as the public functions do."""

    q_descale: Descale = None
    k_descale: Descale = None
    v_descale: Descale = None
    out_dtype: torch.dtype | None = None  # None: bfloat16
    fp8_products: bool = False


NO_CODES = OfCodes()


def given_of(
    q_descale: Descale, k_descale: Descale, v_descale: Descale, out_dtype: torch.dtype | None,
    fp8_products: bool = False,
) -> OfCodes:  # fmt: skip
    if fp8_products is not False:
        fp8_products = checks.flag(fp8_products, "fp8_products")
    descaled = not (q_descale is None and k_descale is None and v_descale is None)
    if not (descaled or fp8_products or out_dtype is not None):
        return NO_CODES
    return OfCodes(q_descale, k_descale, v_descale, out_dtype, fp8_products)


def are_codes(q: Any) -> bool:
    """Whether q is, and k and v have to be."""
    return isinstance(q, Tensor) and q.dtype is FP8


def of_cache(
    given: OfCodes, k: Tensor, v: Tensor, q: Tensor, batch: int, in_pages: bool = False
) -> Descales:
    """What an operation takes where q holds no codes: a cache may. The rest is refused. in_pages: k
    and v are pages of a varlen call, whose queries may be rounded to codes."""
    rounds_queries = in_pages and k.dtype is FP8
    asked = {
        "q_descale": given.q_descale, "out_dtype": given.out_dtype,
        "fp8_products": (given.fp8_products and not rounds_queries) or None,
    }  # fmt: skip
    for name, x in asked.items():
        if x is not None:
            got = "one" if isinstance(x, Tensor) else x
            also = ", or pages of them" * (name == "fp8_products")
            raise ValueError(
                f"{name}: got {got} with a q of {q.dtype}; it is for codes, q, k and v of {FP8}"
                + also
            )
    return descales(given.k_descale, given.v_descale, k, v, q, batch)


def packed_codes(x: Tensor) -> ValueError:
    return ValueError(
        f"{'qkv' if x.shape[-3] == 3 else 'q'}: got dtype {FP8}; codes are taken by "
        "flash_attn_func and flash_attn_varlen_func, of a packed tensor its slices"
    )


def operands(
    q: Tensor, k: Tensor, v: Tensor, q_layout: checks.Layout, kv_layout: checks.Layout,
    k_name: str = "k", v_name: str = "v",
) -> None:  # fmt: skip
    """As ``checks.operands``, of codes: rows may begin anywhere."""
    checks.laid_out(q, "q", q_layout)
    checks.laid_out(k, k_name, kv_layout)
    checks.laid_out(v, v_name, kv_layout)
    checks.known_device(q, is_compiling())
    for name, x in (("q", q), (k_name, k), (v_name, v)):
        if x.dtype is not FP8:
            raise ValueError(
                f"{name}: got dtype {x.dtype}; it must be that of q, {FP8}: q, k and v are codes, "
                "or q is not (call .to(torch.bfloat16))"
            )
        checks.on_device_of(x, name, q)
        checks.unit_stride(x, name)
    checks.fitting(q, k, v, k_name, v_name)


def options(asked: Options, keys: Keys, inputs: tuple[Tensor | None, ...]) -> None:
    """Raises for what attention of codes does not have. inputs: q, k, v, s_aux."""
    wanted = {
        "dropout_p": asked.dropout_p != 0,
        "return_attn_probs": asked.return_attn_probs,
        "return_max_logits": asked.return_max_logits is not False,
    }
    if keys.leftpad_k is not None:
        raise NotImplementedError(
            f"leftpad_k: got one; attention of codes ({FP8}) has none: convert q to torch.bfloat16"
        )
    for name in (name for name, is_wanted in wanted.items() if is_wanted):
        raise NotImplementedError(
            f"{name}: got {getattr(asked, name)}; attention of codes ({FP8}) has none: convert q, "
            "k and v to torch.bfloat16"
        )
    named = dict(zip(("q", "k", "v", "s_aux"), inputs, strict=True))
    checks.without_gradients("attention of codes", **named)


def fp16_out(out_dtype: Any) -> bool:
    """Whether results are float16, else they are bfloat16."""
    if out_dtype is not None and out_dtype not in _OUT_DTYPES:
        raise ValueError(
            f"out_dtype: got {out_dtype}; accepted are {', '.join(map(str, _OUT_DTYPES))}"
        )
    return out_dtype is torch.float16


def all_descales(given: OfCodes, q: Tensor, k: Tensor, v: Tensor, batch: int) -> AllDescales:
    """What the operation takes of them."""
    each = [
        _descale(x, f"{name}_descale", codes, k, batch, cached=False)
        for name, codes, x in zip("qkv", (q, k, v), given[:3], strict=True)
    ]
    return AllDescales(*(tensor for tensor, _ in each), *(number for _, number in each))


def _descale(
    x: Descale, name: str, codes: Tensor, k: Tensor, batch: int, cached: bool
) -> tuple[Tensor | None, float]:
    if x is None:
        return None, 1.0
    if codes.dtype is not FP8:
        what = "a KV cache" if cached else "q, k and v"
        raise ValueError(
            f"{name}: got one with a {name[0]} of {codes.dtype}; it scales the codes of {what} of "
            f"{FP8}"
        )
    if not isinstance(x, Tensor):
        checks.number(x, name)
        if not _SMALLEST <= x <= checks.LARGEST:
            raise ValueError(f"{name}: got {x}; a positive number (of float32) is needed")
        return None, x if isinstance(x, torch.SymFloat) else float(x)
    if x.dtype != torch.float32:
        raise ValueError(f"{name}: got dtype {x.dtype}; torch.float32 is needed")
    checks.on_device_of(x, name, codes)
    shape, per_head, per_row = x.shape, (batch, k.shape[-2]), codes.shape[:-1]
    if shape != per_head and not (cached and shape == per_row):
        rows = f" or, of each row of the cache, {tuple(per_row)}" if cached else ""
        raise checks.bad_shape(x, name, f"(batch, heads_k) = {per_head} (call .expand){rows}")
    return x.detach() if x.requires_grad else x, 1.0
