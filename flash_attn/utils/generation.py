"""Generation: the state that a model's layers share, sampling, and the loop around a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from flash_attn.compat.names import refusing

__all__ = [
    "Decoded",
    "GenerationMixin",
    "InferenceParams",
    "decode",
    "modify_logits_for_top_k_filtering",
    "modify_logits_for_top_p_filtering",
    "sample",
]


@dataclass
class InferenceParams:
    """What ``MHA.forward(..., inference_params=...)`` reads; any object with these fields will do.

    Attributes:
        max_seqlen: length that the caches are allocated with.
        max_batch_size: batch that they are allocated with.
        seqlen_offset: tokens already in the cache, for every sequence. The caller advances it.
        batch_size_offset: first row of the caches that this batch uses.
        key_value_memory_dict: layer_idx -> (max_batch, max_seqlen, 2, heads_kv, head_dim).
        lengths_per_sample: (batch,) int32, tokens in the cache per sequence; wins over
            ``seqlen_offset`` where given.
    """

    max_seqlen: int
    max_batch_size: int
    seqlen_offset: int = 0
    batch_size_offset: int = 0
    key_value_memory_dict: dict[int, Tensor] = field(default_factory=dict)
    lengths_per_sample: Tensor | None = None

    def reset(self, max_seqlen: int, max_batch_size: int) -> None:
        """Start over with the same caches."""
        self.max_seqlen = max_seqlen
        self.max_batch_size = max_batch_size
        self.seqlen_offset = 0
        if self.lengths_per_sample is not None:
            self.lengths_per_sample.zero_()


def modify_logits_for_top_k_filtering(logits: Tensor, top_k: int) -> None:
    """All but the ``top_k`` highest of each row become -inf, in place: (..., vocab)."""
    lowest = logits.topk(top_k, dim=-1).values[..., -1:]
    logits.masked_fill_(logits < lowest, -torch.inf)


def modify_logits_for_top_p_filtering(logits: Tensor, top_p: float) -> None:
    """All but the fewest that together have probability ``top_p`` become -inf, in place.

    (..., vocab). Nothing changes unless 0 < top_p < 1. Holtzman et al. 2019, arXiv:1904.09751.
    """
    if not 0.0 < top_p < 1.0:
        return
    ordered, indices = logits.sort(dim=-1, descending=True)
    probabilities = ordered.softmax(dim=-1)
    # What comes before an entry in this order says whether it is still needed.
    beyond = probabilities.cumsum(dim=-1) - probabilities >= top_p
    logits.masked_fill_(torch.zeros_like(beyond).scatter(-1, indices, beyond), -torch.inf)


def sample(logits: Tensor, top_k: int = 1, top_p: float = 0.0, temperature: float = 1.0) -> Tensor:
    """A token for each row: (batch, vocab) → (batch,) int64.

    ``top_k`` 1 is the likeliest one; 0 is no limit.
    """
    if top_k == 1:
        return logits.argmax(dim=-1)
    if not 0.0 <= top_p <= 1.0:
        raise ValueError(f"top_p: got {top_p}; 0 to 1 is needed")
    logits = logits / temperature  # a copy, which the filters may write into
    if top_k > 0:
        modify_logits_for_top_k_filtering(logits, min(top_k, logits.shape[-1]))
    modify_logits_for_top_p_filtering(logits, top_p)
    return torch.multinomial(logits.softmax(dim=-1), num_samples=1)[:, 0]


class Decoded(NamedTuple):
    """What ``decode`` returns: the tokens (batch, length), and the logits (batch, vocab) of each
    new one, which ``generate`` leaves out unless it is asked for them."""

    sequences: Tensor
    scores: tuple[Tensor, ...] | None


class _Streamer(Protocol):
    """Gets tokens as they are made, as those of transformers do."""

    def put(self, value: Tensor) -> object: ...

    def end(self) -> object: ...


@torch.no_grad()
def decode(
    input_ids: Tensor,
    model: Callable[..., Any],
    max_length: int,
    top_k: int = 1,
    top_p: float = 0.0,
    temperature: float = 1.0,
    eos_token_id: int | None = None,
    teacher_outputs: Tensor | None = None,
    vocab_size: int | None = None,
    tensor_parallel: int = 1,
    cg: bool = False,
    enable_timing: bool = False,
    streamer: _Streamer | None = None,
) -> Decoded:
    """Prompts of one length (batch, seqlen), continued up to ``max_length`` tokens.

    Args:
        model: called as ``model(ids, position_ids=…, inference_params=…, num_last_tokens=1)``;
            its result has ``logits`` (batch, 1, vocab).
        top_k, top_p, temperature: as in ``sample``.
        eos_token_id: ends when all rows made it at once.
        teacher_outputs: (batch, length): the tokens to go on with instead of the sampled ones.
        vocab_size: logits past it are padding.
        streamer: gets each column of tokens by ``put``, and ``end``.
        tensor_parallel: accepted for the drop-in; layers know how many ranks share them.
        cg: not offered: capture or compile the model instead.
        enable_timing: accepted for the drop-in.
    """
    if cg:
        raise NotImplementedError(
            "cg=True: CUDA graphs of the loop are not offered; compile the model with "
            'torch.compile(mode="reduce-overhead")'
        )
    batch, seqlen = input_ids.shape
    state = InferenceParams(max_seqlen=max_length, max_batch_size=batch)
    tokens, columns, scores = input_ids, [input_ids], []
    if streamer is not None:
        streamer.put(input_ids.cpu())
    while seqlen < max_length:
        positions = torch.arange(state.seqlen_offset, seqlen, device=input_ids.device)
        logits = model(
            tokens,
            position_ids=positions.expand(batch, -1),
            inference_params=state,
            num_last_tokens=1,
        ).logits[:, -1, :vocab_size]
        scores.append(logits)
        if teacher_outputs is None or seqlen >= teacher_outputs.shape[1]:
            tokens = sample(logits, top_k, top_p, temperature)[:, None]
        else:
            tokens = teacher_outputs[:, seqlen : seqlen + 1]
        columns.append(tokens)
        state.seqlen_offset, seqlen = seqlen, seqlen + 1
        if streamer is not None:
            streamer.put(tokens.cpu())
        if eos_token_id is not None and bool((tokens == eos_token_id).all()):
            break
    if streamer is not None:
        streamer.end()
    return Decoded(torch.cat(columns, dim=1), tuple(scores))


class GenerationMixin:
    """Gives a model ``generate``, by ``decode``."""

    def allocate_inference_cache(
        self, batch_size: int, max_seqlen: int, dtype: torch.dtype | None = None, **kwargs: Any
    ) -> Any:
        """The caches of all layers; a model says what they are."""
        raise NotImplementedError

    def generate(
        self,
        input_ids: Tensor,
        max_length: int,
        top_k: int = 1,
        top_p: float = 0.0,
        temperature: float = 1.0,
        return_dict_in_generate: bool = False,
        output_scores: bool = False,
        **kwargs: Any,
    ) -> Tensor | Decoded:
        """The tokens (batch, length), or with return_dict_in_generate what ``decode`` returns, its
        ``scores`` None unless ``output_scores``."""
        output = decode(
            input_ids, self, max_length, top_k, top_p, temperature=temperature, **kwargs
        )
        if not return_dict_in_generate:
            return output.sequences
        return output if output_scores else output._replace(scores=None)


if not TYPE_CHECKING:
    __getattr__ = refusing(__name__)
