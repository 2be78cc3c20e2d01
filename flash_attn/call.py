"""What is asked in one call, under names that every layer shares.

A public function says what it was asked (``Options``, beside the tensors of tokens); the checks
make of that what an operation takes (``Scoring``); ``dispatch/calls.py`` spells the call out, once,
as the operation's arguments; implementations in Python make these tuples of them again, by ``of``.
Fields have the names that the schemas in ``dispatch/ops.py`` have.

Named tuples, because a frozen dataclass takes four times as long to make, and a call on a GPU has
microseconds.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import Any, Literal, NamedTuple, Protocol, SupportsIndex, TypeAlias, TypeVar

import torch
from torch import Tensor

_Part = TypeVar("_Part")

#: What tensors of 8 bits hold, a KV cache or q, k and v: codes, whose largest is 448.
FP8: torch.dtype = torch.float8_e4m3fn


class Window(Protocol):
    """(left, right) as the public functions take it: a tuple, a list, an array, a tensor of two."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> SupportsIndex: ...


#: What codes are multiplied by, as the public functions take it: None is 1.
Descale: TypeAlias = float | Tensor | None

#: Whether largest logits are returned, of heads or of each "row".
MaxLogits: TypeAlias = bool | Literal["row"]


UNCOUNTED = 2**30  # what kernels count to, and the width of a window that is none


class Contents(IntEnum):
    """What keys are, as csrc/api/module.cpp counts it."""

    NUMBERS = 0  # of the queries' dtype
    CODES = 1  # of 8 bits, beside queries of 16
    CODES_OF_ROWS = 2  # with descales of rows
    LATENT = 3  # rows of a latent cache, beside a qv
    PRODUCTS = 4  # codes that are multiplied with those of queries as they are


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which sums are kept, and that softmax_lse, softmax_d, s_aux and ds_aux have."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class Options(NamedTuple):
    """What is asked beside tensors of tokens, unchecked, in the order of the public functions.

    Those that spell all of it out give it by position, a microsecond less than by keyword."""

    dropout_p: float = 0.0
    softmax_scale: float | None = None
    causal: bool = False
    window_size: Window = (-1, -1)
    softcap: float = 0.0
    alibi_slopes: Tensor | None = None
    deterministic: bool = False
    return_attn_probs: bool = False
    s_aux: Tensor | None = None
    batch_invariant: bool = False
    return_lse: bool = False
    return_softmax_lse: bool = False  # another name
    return_max_logits: MaxLogits = False
    sm_margin: int = 0  # SMs that the call leaves to what runs beside it


class Scoring(NamedTuple):
    """What a score goes through, checked: in the order of the schemas, but for s_aux."""

    dropout_p: float
    softmax_scale: float
    causal: bool
    window_size_left: int
    window_size_right: int
    softcap: float
    alibi_slopes: Tensor | None  # (h,) or (b, h)
    s_aux: Tensor | None  # (h,), in the accumulation type


class Lengths(NamedTuple):
    """Where the sequences of a packed batch lie."""

    cu_seqlens_q: Tensor  # (b + 1,) int32
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int

    @property
    def batch(self) -> int:
        return self.cu_seqlens_q.shape[0] - 1


class Keys(NamedTuple):
    """Which of a packed batch's keys there are, beyond its lengths."""

    block_table: Tensor | None = None  # (b, pages_per_sequence) int32: k and v are pages
    leftpad_k: Tensor | None = None  # (b,) int32
    seqused_k: Tensor | None = None  # (b,) int32


class Cache(NamedTuple):
    """Keys and values of earlier steps, and those to append."""

    k_cache: Tensor  # (b_cache, s_cache, hk, d), or pages (num_pages, page_size, hk, d)
    v_cache: Tensor
    k: Tensor | None = None  # (b, s_new, hk, d), appended
    v: Tensor | None = None
    rotary_cos: Tensor | None = None  # (max_positions, rotary_dim / 2)
    rotary_sin: Tensor | None = None
    cache_seqlens: Tensor | None = None  # (b,) int32; None: the cache is full; -1: skip
    cache_batch_idx: Tensor | None = None  # (b,) int32
    cache_leftpad: Tensor | None = None  # (b,) int32
    block_table: Tensor | None = None  # (b, pages_per_sequence) int32

    @property
    def new(self) -> int:
        """How many keys each sequence gets."""
        return 0 if self.k is None else self.k.shape[1]


class Descales(NamedTuple):
    """What the codes of an fp8 cache are multiplied by: a tensor's numbers times the one for all.

    A tensor is float32 and has any strides: (b, hk), or a number of each row and head, shaped as
    the cache is without its last dimension.
    """

    k_descale: Tensor | None = None
    v_descale: Tensor | None = None
    k_descale_all: float = 1.0
    v_descale_all: float = 1.0


class AllDescales(NamedTuple):
    """The same where q, k and v are codes: tensors are (b, hk), that of q as well."""

    q_descale: Tensor | None = None
    k_descale: Tensor | None = None
    v_descale: Tensor | None = None
    q_descale_all: float = 1.0
    k_descale_all: float = 1.0
    v_descale_all: float = 1.0


class Forward(NamedTuple):
    """``_flash_attn_forward`` and, with lengths, ``_flash_attn_varlen_forward``."""

    q: Tensor  # (b, sq, h, d), or (total_q, h, d)
    k: Tensor  # (b, sk, hk, d), or (total_k, hk, d), or pages
    v: Tensor
    scoring: Scoring
    lengths: Lengths | None = None
    keys: Keys = Keys()
    return_softmax: bool = False
    rng_state: Tensor | None = None
    batch_invariant: bool = False
    deterministic: bool = False
    return_max_logits: bool = False
    max_logits_of_heads: bool = False  # not of rows
    num_splits: int = 0
    descales: Descales = Descales()
    qv: Tensor | None = None  # (total_q, h, dv), of latent attention against pages
    sm_margin: int = 0

    @classmethod
    def of(cls, arguments: dict[str, Any]) -> Forward:
        return pick(cls, {**arguments, **_parts(arguments)})


class CodedForward(NamedTuple):
    """``_flash_attn_fp8_forward``: q, k and v are codes."""

    q: Tensor  # (b, sq, h, d), or with lengths (total_q, h, d)
    k: Tensor  # (b, sk, hk, d), or (total_k, hk, d), or pages
    v: Tensor
    scoring: Scoring  # without dropout
    lengths: Lengths | None = None
    keys: Keys = Keys()  # without left padding
    batch_invariant: bool = False
    num_splits: int = 0
    descales: AllDescales = AllDescales()
    fp16_out: bool = False  # out is float16, else bfloat16
    fp8_products: bool = False  # kernels may multiply codes as they are
    sm_margin: int = 0

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of out."""
        return torch.float16 if self.fp16_out else torch.bfloat16

    @classmethod
    def of(cls, arguments: dict[str, Any]) -> CodedForward:
        parts = _parts({"dropout_p": 0.0, **arguments})
        if arguments["cu_seqlens_q"] is None:
            parts["lengths"] = None
        parts["descales"] = pick(AllDescales, arguments)
        return pick(cls, {**arguments, **parts})

    def in_order(self) -> tuple:
        """The operation's arguments."""
        q, k, v, scoring, lengths, keys, batch_invariant, num_splits, descales, *_ = self
        _, scale, causal, left, right, softcap, slopes, s_aux = scoring
        cu_seqlens_q, cu_seqlens_k, longest_q, longest_k = (
            (None, None, q.shape[1], k.shape[1]) if lengths is None else lengths
        )
        return (
            q, k, v, cu_seqlens_q, cu_seqlens_k, keys.seqused_k, keys.block_table, longest_q,
            longest_k, scale, causal, left, right, softcap, slopes, s_aux, batch_invariant,
            num_splits, *descales, self.fp16_out, self.sm_margin,
        )  # fmt: skip


class Gradients(NamedTuple):
    """The tensors of a backward; dq, dk, dv and ds_aux are written."""

    dout: Tensor  # as out
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor  # (b, sq, h, dv), or (total_q, h, dv)
    softmax_lse: Tensor  # (b, h, sq), or (h, total_q)
    dq: Tensor | None
    dk: Tensor | None
    dv: Tensor | None
    dlse: Tensor | None = None  # as softmax_lse
    ds_aux: Tensor | None = None  # (h,)


class Backward(NamedTuple):
    """``_flash_attn_backward`` and, with lengths, ``_flash_attn_varlen_backward``."""

    tensors: Gradients
    scoring: Scoring
    lengths: Lengths | None = None
    keys: Keys = Keys()  # there is no backward of pages and left padding
    deterministic: bool = False
    rng_state: Tensor | None = None
    sm_margin: int = 0

    @classmethod
    def of(cls, arguments: dict[str, Any]) -> Backward:
        parts = _parts(arguments)
        return pick(cls, {**arguments, **parts, "tensors": pick(Gradients, arguments)})


class CacheStep(NamedTuple):
    """``_flash_attn_with_kvcache``."""

    q: Tensor  # (b, sq, h, d)
    cache: Cache
    scoring: Scoring
    rotary_interleaved: bool
    num_splits: int
    descales: Descales = Descales()
    qv: Tensor | None = None  # (b, sq, h, dv), of latent attention
    sm_margin: int = 0

    @classmethod
    def of(cls, arguments: dict[str, Any]) -> CacheStep:
        parts = {
            "cache": pick(Cache, arguments),
            "scoring": pick(Scoring, {"dropout_p": 0.0, **arguments}),
            "descales": pick(Descales, arguments),
        }
        return pick(cls, {**arguments, **parts})


def pick(part: Callable[..., _Part], arguments: dict[str, Any]) -> _Part:
    """A description, made of those of the named arguments for which it has a field."""
    return part(**{name: arguments[name] for name in part._fields if name in arguments})  # type: ignore[attr-defined]


def _parts(arguments: dict[str, Any]) -> dict[str, Any]:
    packed = "cu_seqlens_q" in arguments
    return {
        "scoring": pick(Scoring, arguments),
        "lengths": pick(Lengths, arguments) if packed else None,
        "keys": pick(Keys, arguments),
        "descales": pick(Descales, arguments),
    }


def named(schema: torch.FunctionSchema) -> Callable[[tuple, dict], dict[str, Any]]:
    """A function from an operation's arguments, as given, to all of them by name."""
    names = [argument.name for argument in schema.arguments]
    # The dispatcher leaves out arguments that equal their defaults.
    defaults = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
    return lambda args, kwargs: {**defaults, **dict(zip(names, args)), **kwargs}


def in_order(schema: torch.FunctionSchema) -> Callable[[tuple, dict], tuple]:
    """A function from an operation's arguments, as given, to all of them by position."""
    names = [argument.name for argument in schema.arguments]
    defaults = tuple(a.default_value if a.has_default_value() else None for a in schema.arguments)

    def arrange(args: tuple, kwargs: dict) -> tuple:
        n = len(args)
        if not kwargs:
            return args + defaults[n:]
        return args + tuple(map(kwargs.get, names[n:], defaults[n:]))

    return arrange
