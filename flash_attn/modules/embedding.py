"""Token and position embeddings, also shared out among ranks.

A vocabulary shared out among ranks: Shoeybi et al. 2019, arXiv:1909.08053.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from flash_attn.ops.fused_dense import out_of_ranks

__all__ = [
    "BertEmbeddings",
    "ColumnParallelEmbedding",
    "GPT2Embeddings",
    "ParallelGPT2Embeddings",
    "VocabParallelEmbedding",
]


def _positions(input_ids: Tensor, position_ids: Tensor | None) -> Tensor:
    """Those that are given, or 0, 1, 2, … (seqlen,)."""
    if position_ids is not None:
        return position_ids
    return torch.arange(input_ids.shape[-1], dtype=torch.long, device=input_ids.device)


class GPT2Embeddings(nn.Module):
    """Embeddings of tokens, and of positions where there are any to embed.

    Args:
        embed_dim: of what comes out.
        vocab_size: tokens. max_position_embeddings: positions; 0 or less for no embedding of them.
        padding_idx: a token whose embedding gets no gradient.
        word_embed_proj_dim: the tokens' embeddings have this dimension and are projected.
        device, dtype: of the parameters.
    """

    word_embeddings: nn.Embedding
    project_in: nn.Linear | None
    position_embeddings: nn.Embedding

    def __init__(
        self,
        embed_dim: int,
        vocab_size: int,
        max_position_embeddings: int,
        padding_idx: int | None = None,
        word_embed_proj_dim: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        """Arguments, defaults and errors: see the class."""
        super().__init__()
        where = {"device": device, "dtype": dtype}
        word_dim = embed_dim if word_embed_proj_dim is None else word_embed_proj_dim
        self.word_embeddings = nn.Embedding(vocab_size, word_dim, padding_idx, **where)
        self.project_in = None
        if word_embed_proj_dim is not None:
            self.project_in = nn.Linear(word_dim, embed_dim, bias=False, **where)
        self.max_position_embeddings = max_position_embeddings
        if max_position_embeddings > 0:
            self.position_embeddings = nn.Embedding(max_position_embeddings, embed_dim, **where)

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """(batch, seqlen) → (batch, seqlen, embed_dim); positions default to 0, 1, 2, …"""
        embeddings = self.word_embeddings(input_ids)
        if self.project_in is not None:
            embeddings = self.project_in(embeddings)
        if self.max_position_embeddings > 0:
            embeddings = embeddings + self.position_embeddings(_positions(input_ids, position_ids))
        return embeddings


class BertEmbeddings(nn.Module):
    """Embeddings of tokens, positions and token types; ``type_vocab_size`` 0 for no types."""

    word_embeddings: nn.Embedding
    position_embeddings: nn.Embedding
    token_type_embeddings: nn.Embedding

    def __init__(
        self,
        embed_dim: int,
        vocab_size: int,
        max_position_embeddings: int,
        type_vocab_size: int,
        padding_idx: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        """Arguments, defaults and errors: see the class."""
        super().__init__()
        where = {"device": device, "dtype": dtype}
        self.word_embeddings = nn.Embedding(vocab_size, embed_dim, padding_idx, **where)
        self.max_position_embeddings = max_position_embeddings
        self.type_vocab_size = type_vocab_size
        if max_position_embeddings > 0:
            self.position_embeddings = nn.Embedding(max_position_embeddings, embed_dim, **where)
        if type_vocab_size > 0:
            self.token_type_embeddings = nn.Embedding(type_vocab_size, embed_dim, **where)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        token_type_ids: Tensor | None = None,
    ) -> Tensor:
        """(batch, seqlen) → (batch, seqlen, embed_dim); types default to 0."""
        embeddings = self.word_embeddings(input_ids)
        if self.max_position_embeddings > 0:
            embeddings = embeddings + self.position_embeddings(_positions(input_ids, position_ids))
        if self.type_vocab_size > 0:
            types = torch.zeros_like(input_ids) if token_type_ids is None else token_type_ids
            embeddings = embeddings + self.token_type_embeddings(types)
        return embeddings


def _share(features: int, process_group: dist.ProcessGroup | None, name: str) -> int:
    world = 1 if process_group is None else dist.get_world_size(process_group)
    if features % world:
        raise ValueError(f"{name}: got {features}; a multiple of the {world} ranks is needed")
    return features // world


class VocabParallelEmbedding(nn.Embedding):
    """Each rank has some of the tokens; the sum over the ranks, which is the caller's, is the
    embedding. A token of another rank is 0. ``padding_idx`` needs all tokens on one rank."""

    def __init__(
        self,
        num_embeddings: int,
        *args: Any,
        process_group: dist.ProcessGroup | None = None,
        padding_idx: int | None = None,
        **kwargs: Any,
    ):
        """Arguments, defaults and errors: see the class."""
        self.process_group = process_group
        share = _share(num_embeddings, process_group, "num_embeddings")
        if share != num_embeddings and padding_idx is not None:
            raise ValueError(
                f"padding_idx: got {padding_idx} in a group of {num_embeddings // share} ranks; it "
                "needs a group of one"
            )
        super().__init__(share, *args, padding_idx=padding_idx, **kwargs)

    def forward(self, input: Tensor) -> Tensor:
        """(...) → (..., embedding_dim)."""
        if self.process_group is None:
            return super().forward(input)
        own = input - dist.get_rank(self.process_group) * self.num_embeddings
        elsewhere = (own < 0) | (own >= self.num_embeddings)
        return super().forward(own.masked_fill(elsewhere, 0)).masked_fill(elsewhere[..., None], 0)


class ColumnParallelEmbedding(nn.Embedding):
    """Each rank has some of the features of every entry: (...) → (..., embedding_dim / ranks)."""

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *args: Any,
        process_group: dist.ProcessGroup | None = None,
        **kwargs: Any,
    ):
        """Arguments, defaults and errors: see the class."""
        self.process_group = process_group
        share = _share(embedding_dim, process_group, "embedding_dim")
        super().__init__(num_embeddings, share, *args, **kwargs)


class ParallelGPT2Embeddings(nn.Module):
    """``GPT2Embeddings`` shared out: tokens by vocabulary, positions by features.

    With ``sequence_parallel`` each rank gets its share of the rows of dimension 0.
    """

    word_embeddings: VocabParallelEmbedding
    position_embeddings: ColumnParallelEmbedding

    def __init__(
        self,
        embed_dim: int,
        vocab_size: int,
        max_position_embeddings: int,
        process_group: dist.ProcessGroup | None,
        padding_idx: int | None = None,
        sequence_parallel: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        """Arguments, defaults and errors: see the class."""
        super().__init__()
        where = {"process_group": process_group, "device": device, "dtype": dtype}
        self.process_group = process_group
        self.sequence_parallel = sequence_parallel
        self.max_position_embeddings = max_position_embeddings
        self.word_embeddings = VocabParallelEmbedding(
            vocab_size, embed_dim, padding_idx=padding_idx, **where
        )
        if max_position_embeddings > 0:
            self.position_embeddings = ColumnParallelEmbedding(
                max_position_embeddings, embed_dim, **where
            )

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        combine_batch_seqlen_dim: bool = False,
    ) -> Tensor:
        """(batch, seqlen) → (batch, seqlen, embed_dim), or (batch · seqlen, embed_dim) with
        ``combine_batch_seqlen_dim``; this rank's share of dimension 0 with sequence_parallel."""
        embeddings = self.word_embeddings(input_ids)
        if self.max_position_embeddings > 0:
            positions = _positions(input_ids, position_ids)
            embeddings = embeddings + self._own_columns(self.position_embeddings(positions))
        if combine_batch_seqlen_dim:
            embeddings = embeddings.flatten(0, 1)
        return out_of_ranks(embeddings, self.process_group, self.sequence_parallel)

    def _own_columns(self, positions: Tensor) -> Tensor:
        """(..., share) → (..., embed_dim), 0 in the columns of other ranks."""
        if self.process_group is None:
            return positions
        share, rank = positions.shape[-1], dist.get_rank(self.process_group)
        after = self.word_embeddings.embedding_dim - (rank + 1) * share
        return nn.functional.pad(positions, (rank * share, after))
