"""What is asked in one forward: 35 arguments under one name each, and those that are refused."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from flash_attn.api import checks
from flash_attn.api.checks_fp8 import OfCodes, are_codes, given_of
from flash_attn.call import FP8, Descale


class Asked(NamedTuple):
    """A forward's arguments, in the order of ``_flash_attn_forward`` and the operator ``fwd``, and
    what these do not have, after them."""

    q: Tensor  # (b, sq, h, d), or (total_q, h, d) with cu_seqlens_q
    k: Tensor  # (b_cache, sk, hk, d), (total_k, hk, d) with cu_seqlens_k, pages with page_table
    v: Tensor
    k_new: Tensor | None = None  # (b, s_new, hk, d), or (total_new, hk, d) with cu_seqlens_k_new
    v_new: Tensor | None = None
    qv: Tensor | None = None  # as q, with the columns of v: those of a latent cache
    out: Tensor | None = None  # a buffer for the result
    cu_seqlens_q: Tensor | None = None  # (b + 1,) int32
    cu_seqlens_k: Tensor | None = None
    cu_seqlens_k_new: Tensor | None = None
    seqused_q: Tensor | None = None  # (b,) int32
    seqused_k: int | Tensor | None = None
    max_seqlen_q: int | Tensor | None = None
    max_seqlen_k: int | Tensor | None = None
    page_table: Tensor | None = None  # (b, pages) int32
    kv_batch_idx: Tensor | None = None  # (b,) int32
    leftpad_k: Tensor | None = None  # (b,) int32
    rotary_cos: Tensor | None = None
    rotary_sin: Tensor | None = None
    seqlens_rotary: Tensor | None = None
    q_descale: Descale = None
    k_descale: Descale = None
    v_descale: Descale = None
    softmax_scale: float | None = None
    causal: bool = False
    window_size_left: int = -1
    window_size_right: int = -1
    attention_chunk: int | None = 0
    softcap: float = 0.0
    rotary_interleaved: bool = True
    scheduler_metadata: Tensor | None = None
    num_splits: int = 1
    pack_gqa: bool | None = None
    sm_margin: int = 0
    fp8_products: bool = False

    @property
    def has_cache(self) -> bool:
        """Whether keys are those of a cache: some of its rows, and perhaps new ones."""
        cached = (
            self.page_table, self.kv_batch_idx, self.leftpad_k, self.k_new, self.v_new,
            self.rotary_cos, self.rotary_sin, self.seqused_k,
        )  # fmt: skip
        return any(x is not None for x in cached)

    @property
    def of_codes(self) -> OfCodes:
        """What there is beside q, k and v where these are codes."""
        wanted = self.out.dtype if are_codes(self.q) and isinstance(self.out, Tensor) else None
        out_dtype = wanted if wanted is torch.float16 else None  # bfloat16, or `into` refuses
        descales = self.q_descale, self.k_descale, self.v_descale
        return given_of(*descales, out_dtype, self.fp8_products)


#: Arguments of a cache that codes of q do not go with.
_BESIDE_16_BITS = ("k_new", "v_new", "rotary_cos", "rotary_sin", "leftpad_k", "qv")


def refuse(asked: Asked) -> None:
    """NotImplementedError for what would change a result and has no kernel here."""
    if asked.qv is not None and asked.cu_seqlens_k is not None and asked.page_table is None:
        raise NotImplementedError(
            f"qv: got {_shown(asked.qv)} with cu_seqlens_k and without page_table; it is for a "
            "cache, of rows or of pages"
        )
    if not are_codes(asked.q):
        if asked.q_descale is not None and isinstance(asked.q, Tensor):
            raise ValueError(
                f"q_descale: got {_shown(asked.q_descale)} with a q of {asked.q.dtype}; it scales "
                f"codes, q of {FP8}"
            )
        if checks.flag(asked.fp8_products, "fp8_products") and isinstance(asked.q, Tensor):
            raise ValueError(
                f"fp8_products: got True with a q of {asked.q.dtype}; it is for codes, q of {FP8}"
            )
        return
    for name in _BESIDE_16_BITS:
        value = getattr(asked, name)
        if value is not None:
            raise NotImplementedError(
                f"{name}: got {_shown(value)} with a q of {FP8}; convert q to float16 or bfloat16 "
                f"(the cache may be {FP8})"
            )


def of_latent_part(asked: Asked, only_qv: bool | None, values: str = "v") -> Asked:
    """The same where only_qv is not set; else q and k have no column: scores are those of qv and v.

    What q and k are then is not looked at: SGLang leaves them out, vLLM does not fill them.
    """
    if only_qv is None or not checks.flag(only_qv, "only_qv"):
        return asked
    if asked.qv is None:
        raise ValueError("only_qv: got True without a qv; scores would have no part at all")
    for name, value in (("k", asked.k_new), ("v", asked.v_new)):
        if value is not None:
            raise ValueError(
                f"{name}: got {_shown(value)} with only_qv=True, which takes no new keys; write "
                "latent rows to v_cache before the call"
            )
    checks.tensor(asked.qv, "qv")
    checks.tensor(asked.v, values)
    return asked._replace(q=asked.qv[..., :0], k=asked.v[..., :0])


def _shown(x: Any) -> str:
    return f"a tensor of shape {tuple(x.shape)}" if isinstance(x, torch.Tensor) else repr(x)


def one_of(**given: Tensor | None) -> Tensor | None:
    """What has several names: the one that is given, or the same tensor under more than one."""
    named = {name: x for name, x in given.items() if x is not None}
    if not named:
        return None
    first = next(iter(named.values()))
    if any(x is not first for x in named.values()):
        raise ValueError(f"{' and '.join(named)}: got two tensors; they are names of one argument")
    return first
