"""What is asked in one forward: 34 arguments under one name each, and those that are refused."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from flash_attn.call import FP8, Descale


class Asked(NamedTuple):
    """A forward's arguments, in the order of ``_flash_attn_forward`` and the operator ``fwd``."""

    q: Tensor  # (b, sq, h, d), or (total_q, h, d) with cu_seqlens_q
    k: Tensor  # (b_cache, sk, hk, d), (total_k, hk, d) with cu_seqlens_k, pages with page_table
    v: Tensor
    k_new: Tensor | None = None  # (b, s_new, hk, d), or (total_new, hk, d) with cu_seqlens_k_new
    v_new: Tensor | None = None
    qv: Tensor | None = None
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
    q_descale: Tensor | None = None
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

    @property
    def has_cache(self) -> bool:
        """Whether keys are those of a cache: some of its rows, and perhaps new ones."""
        cached = (
            self.page_table, self.kv_batch_idx, self.leftpad_k, self.k_new, self.v_new,
            self.rotary_cos, self.rotary_sin, self.seqused_k,
        )  # fmt: skip
        return any(x is not None for x in cached)


_NO_FP8 = "there is no FP8 of q here: convert it to float16 or bfloat16, and leave this out"
_ONLY_CACHES = (
    "FP8 is read from a KV cache alone (flash_attn_with_kvcache, or page_table): convert q, k and "
    "v to float16 or bfloat16, and leave it out"
)
_INSTEAD = {
    "qv": (
        "with d + d_v of at most 256 pass torch.cat([q, qv], -1) and torch.cat([k, v], -1) as q "
        "and k, and softmax_scale"
    ),
    "q_descale": _NO_FP8,
    "k_descale": _ONLY_CACHES,
    "v_descale": _ONLY_CACHES,
}


def refuse(asked: Asked, is_cache: bool) -> None:
    """NotImplementedError for what would change a result and has no kernel here."""
    if isinstance(asked.q, torch.Tensor) and asked.q.dtype is FP8:
        raise NotImplementedError(
            f"q: got {FP8}; there is no FP8 of q here: convert it to float16 or bfloat16 (k_cache "
            f"and v_cache may be {FP8})"
        )
    for name in ("qv", "q_descale", *("k_descale", "v_descale") * (not is_cache)):
        value = getattr(asked, name)
        if value is not None:
            raise NotImplementedError(f"{name}: got {_shown(value)}; {_INSTEAD[name]}")


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
