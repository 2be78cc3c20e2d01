"""How ``explain`` sees a call on codes of q, k and v: which of two ways it takes on a GPU."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flash_attn import _gpus as gpus
from flash_attn.api import checks_fp8
from flash_attn.api.checks_fp8 import OfCodes
from flash_attn.call import (
    FP8,
    CodedForward,
    Contents,
    Descales,
    Forward,
    Keys,
    Lengths,
    Options,
    Scoring,
)
from flash_attn.dispatch import fp8

_SCORING = Scoring(0.0, 1.0, False, -1, -1, 0.0, None, None)  # does not decide


class Way(NamedTuple):
    """What becomes of codes on a GPU, and of queries beside them."""

    given: torch.dtype  # of the queries
    dtype: torch.dtype  # of those that a kernel gets
    contents: Contents
    why_no_products: str  # empty: codes are multiplied as they are

    @property
    def converted(self) -> str:
        """The dtype that codes become; empty: none."""
        return "" if self.dtype in (FP8, self.given) else str(self.dtype).removeprefix("torch.")

    @property
    def notes(self) -> tuple[str, ...]:
        if self.contents is Contents.PRODUCTS:
            return ("fp8 products",)
        return (f"as {self.converted}",) if self.converted else ()

    @property
    def rejected(self) -> tuple[tuple[str, str], ...]:
        why = self.why_no_products
        return (("kernels of fp8 products", why),) if why else ()

    @property
    def slow(self) -> tuple[str, ...]:
        what = "q" if self.contents is Contents.CODES else "q, k and v"
        return (f"each call converts {what} to {self.converted}",) if self.converted else ()


def way_beside_pages(
    q: Tensor, k: Tensor, v: Tensor, options: Options, descales: Descales, lengths: Lengths,
    keys: Keys, batch_invariant: bool, gpu: str | None, contents: Contents,
) -> Way:  # fmt: skip
    """The way of queries of 16 bits, whose codes fp8_products permits. contents: the pages'."""
    scoring = _SCORING._replace(dropout_p=options.dropout_p)
    call = Forward(
        q, k, v, scoring, lengths, keys, return_softmax=options.return_attn_probs,
        batch_invariant=batch_invariant, descales=descales,
        return_max_logits=options.return_max_logits is not False,
    )  # fmt: skip
    why = fp8.why_no_codes_of_queries(call, _is_hopper(q, gpu), gpu)
    if why:
        return Way(q.dtype, q.dtype, contents, why)
    return Way(q.dtype, FP8, Contents.PRODUCTS, "")


def _is_hopper(q: Tensor, gpu: str | None) -> bool:
    return fp8.is_hopper(q.device) if gpu is None else gpus.GPUS[gpu].sm == 90


def way_of(
    q: Tensor, k: Tensor, v: Tensor, options: Options, given: OfCodes, lengths: Lengths | None,
    block_table: Tensor | None, batch_invariant: bool, gpu: str | None,
) -> Way:  # fmt: skip
    """Raises what the call would for its options and descales."""
    keys = Keys(block_table)
    checks_fp8.options(options, keys, (q, k, v, None))
    checks_fp8.all_descales(given, q, k, v, q.shape[0] if lengths is None else lengths.batch)
    fp16_out = checks_fp8.fp16_out(given.out_dtype)
    call = CodedForward(q, k, v, _SCORING, lengths, keys, batch_invariant, fp16_out=fp16_out)
    why = "serve calls with fp8_products=True"
    if given.fp8_products:
        why = fp8.why_no_products(call, _is_hopper(q, gpu))
    if not why:
        return Way(FP8, FP8, Contents.PRODUCTS, "")
    if block_table is not None:
        return Way(FP8, call.dtype, Contents.CODES, why)
    by_tensors = any(isinstance(x, Tensor) for x in (given.q_descale, given.k_descale))
    return Way(FP8, torch.bfloat16 if by_tensors else call.dtype, Contents.NUMBERS, why)
