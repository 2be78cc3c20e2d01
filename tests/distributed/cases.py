"""What several ranks compute, and what one process says of it in float64."""

from __future__ import annotations

from dataclasses import dataclass

import reference_dropout
import torch
from reference import attention_ref, gradients, varlen_ref
from torch import Tensor

from flash_attn.dispatch import autograd
from flash_attn.distributed import Layout, dense_layout, packed_layout
from flash_attn.distributed.shard import token_ids


@dataclass(frozen=True)
class Case:
    method: str  # "ring", "gather", "all_to_all", "mesh"
    ranks: int
    kind: str = "zigzag"
    seqlen: int = 67
    lengths: tuple[int, ...] | None = None  # of packed sequences
    batch: int = 2
    heads: int = 4
    heads_k: int = 2
    head_dim: int = 8
    head_dim_v: int = 8
    causal: bool = True
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    alibi: str = ""  # "heads", or "batch" for slopes of each sequence
    sinks: bool = False
    dropout_p: float = 0.0
    dlse: bool = False
    deterministic: bool = False
    gradient_dtype: torch.dtype | None = None
    dtype: torch.dtype = torch.float64
    device: str = "cpu"

    @property
    def packed(self) -> bool:
        return self.lengths is not None

    @property
    def split(self) -> int:
        return {"all_to_all": self.ranks, "mesh": 2}.get(self.method, 1)

    @property
    def multiple(self) -> int:
        return 16 if self.dropout_p else 1

    @property
    def sequences(self) -> int:
        return len(self.lengths) if self.packed else self.batch

    def layout(self) -> Layout:
        if not self.packed:
            return dense_layout(
                self.seqlen, self.ranks, self.kind, split=self.split, multiple=self.multiple
            )
        cu_seqlens = [sum(self.lengths[:i]) for i in range(len(self.lengths) + 1)]
        return packed_layout(
            cu_seqlens, self.ranks, self.kind, split=self.split, causal=self.causal,
            window=self.window[0], multiple=self.multiple,
        )  # fmt: skip

    def options(self) -> dict:
        return dict(
            causal=self.causal, window_size=self.window, softcap=self.softcap,
            dropout_p=self.dropout_p,
        )  # fmt: skip

    def slopes(self) -> Tensor | None:
        if not self.alibi:
            return None
        slopes = 0.5 ** torch.arange(1, self.heads + 1).float()
        if self.alibi == "heads":
            return slopes
        return slopes * torch.arange(1, self.sequences + 1)[:, None]

    def __str__(self) -> str:
        said = [f"{self.method}{self.ranks}", self.kind]
        default = Case(self.method, self.ranks)
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            if name not in ("method", "ranks", "kind") and value != getattr(default, name):
                said.append(f"{name}={value}".replace(" ", ""))
        return "-".join(said)


@dataclass
class Inputs:
    tensors: dict[str, Tensor]  # q, k, v and s_aux of the whole
    dout: Tensor
    dlse: Tensor | None


def inputs(case: Case) -> Inputs:
    gen = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=gen, dtype=torch.float64).to(case.dtype)

    rows = (sum(case.lengths),) if case.packed else (case.batch, case.seqlen)
    tensors = {
        "q": normal(*rows, case.heads, case.head_dim),
        "k": normal(*rows, case.heads_k, case.head_dim),
        "v": normal(*rows, case.heads_k, case.head_dim_v),
    }
    if case.sinks:
        tensors["s_aux"] = normal(case.heads).to(torch.promote_types(case.dtype, torch.float32))
    dout = normal(*rows, case.heads, case.head_dim_v)
    lse_rows = (case.heads, *rows) if case.packed else (rows[0], case.heads, rows[1])
    lse_dtype = torch.promote_types(case.dtype, torch.float32)
    return Inputs(tensors, dout, normal(*lse_rows).to(lse_dtype) if case.dlse else None)


def seed(rank: int) -> None:
    """Before a call with dropout, which drops what rank 0 draws."""
    torch.manual_seed(5 + rank)


def keep_mask(case: Case) -> Tensor | None:
    """(sequences, h, longest, longest) bool: what one process keeps of the whole."""
    if not case.dropout_p:
        return None
    with torch.random.fork_rng():
        seed(0)
        state = autograd.draw_rng_state(torch.device(case.device)).tolist()
    longest = max(case.lengths) if case.packed else case.seqlen
    return reference_dropout.keep_mask(
        *state, case.sequences, case.heads, longest, longest, case.dropout_p
    )


def expected(case: Case, given: Inputs, attention=attention_ref, dtype=torch.float64):
    """out, lse and gradients by name, of the whole."""
    options = dict(**case.options(), alibi_slopes=case.slopes(), keep_mask=keep_mask(case))

    def whole(**tensors: Tensor) -> tuple[Tensor, Tensor]:
        if case.packed:
            s_aux = tensors.pop("s_aux", None)
            cu = list(case.layout().cu_seqlens)
            return varlen_ref(attention, **tensors, s_aux=s_aux, cu_seqlens_q=cu,
                              cu_seqlens_k=cu, **options)  # fmt: skip
        return attention(**tensors, **options)[:2]

    return gradients(whole, given.tensors, given.dout, given.dlse, dtype)


def assembled(case: Case, name: str, parts: list[Tensor]) -> Tensor:
    """The whole of what each rank has of it."""
    if name == "s_aux":
        return torch.stack(parts).sum(0)
    layout = case.layout()
    by_heads = name in ("lse", "max_logits")
    dim = (1 if by_heads else 0) if case.packed else (2 if by_heads else 1)
    joined = torch.cat(parts, dim)
    order = torch.cat([token_ids(layout, rank) for rank in range(layout.ranks)]).argsort()
    return joined.index_select(dim, order)
