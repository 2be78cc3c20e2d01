"""An attention backend for vLLM: ``LLM(model, attention_config={"backend": "CUSTOM"})``.

One call serves prompts, chunks of prompts, single tokens and mixes of them. It reads lengths on the
GPU alone, so full CUDA graphs of any batch can be captured. docs/engines.md says what is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from flash_attn.api.checks import MAX_HEAD_DIM, MAX_HEAD_DIM_OF_CODES
from flash_attn.call import Options
from flash_attn.distributed.merge import merge_attention
from flash_attn.engines import VLLM_NAME, missing, paged

try:
    from vllm import _custom_ops, envs
    from vllm.config import get_current_vllm_config_or_none
    from vllm.distributed.parallel_state import get_dcp_group, get_dcp_world_size_and_rank
    from vllm.v1.attention.backend import (
        AttentionBackend,
        AttentionCGSupport,
        AttentionImpl,
        AttentionMetadata,
        AttentionMetadataBuilder,
        AttentionType,
    )
    from vllm.v1.attention.backends.utils import get_dcp_local_seq_lens
except ImportError as error:
    raise missing("vLLM", error) from error


class FlashAttnBackend(AttentionBackend):
    """What vLLM asks before it takes a backend."""

    supported_kv_cache_dtypes: ClassVar = [
        *AttentionBackend.supported_kv_cache_dtypes, *paged.FP8_NAMES
    ]  # fmt: skip
    # The engine writes the new keys by ``do_kv_cache_update``, before ``forward``.
    forward_includes_kv_cache_update = False

    @staticmethod
    def get_name() -> str:
        # The name in the engine's registry: parts of it look a backend up by this.
        return VLLM_NAME

    @staticmethod
    def get_impl_cls() -> type[FlashAttnImpl]:
        return FlashAttnImpl

    @staticmethod
    def get_builder_cls() -> type[FlashAttnMetadataBuilder]:
        return FlashAttnMetadataBuilder

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return head_size % 8 == 0 and 0 < head_size <= MAX_HEAD_DIM

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return capability.major >= 8

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True

    @classmethod
    def supports_combination(
        cls, head_size: int, dtype: torch.dtype, kv_cache_dtype: str | None, *others: Any,
        **more: Any,
    ) -> str | None:  # fmt: skip
        if kv_cache_dtype in paged.FP8_NAMES and head_size > MAX_HEAD_DIM_OF_CODES:
            return (
                f"kv_cache_dtype: got {kv_cache_dtype!r} with head_size {head_size}; codes are "
                f"served up to {MAX_HEAD_DIM_OF_CODES}"
            )
        own = str(dtype).removeprefix("torch.")
        if kv_cache_dtype in (None, "auto", own, *paged.FP8_NAMES):
            return None
        return paged.refuse_cache(kv_cache_dtype)


@dataclass
class FlashAttnMetadata(AttentionMetadata):
    """A batch, for all layers of a group. The engine reads some of it under these names."""

    num_actual_tokens: int  # with the padding of a captured graph
    max_query_len: int
    max_seq_len: int
    query_start_loc: Tensor  # (batch + 1,) int32
    seq_lens: Tensor  # (batch,) int32
    block_table: Tensor  # (batch, pages) int32
    slot_mapping: Tensor  # (num_actual_tokens,) int64
    step: paged.Step  # the same as the kernels take it
    #: With decode context parallelism: the earlier tokens of each sequence that lie on this rank.
    context: paged.Step | None = None


class FlashAttnMetadataBuilder(AttentionMetadataBuilder[FlashAttnMetadata]):
    """Makes it: of slices of the engine's buffers, without a look at what they hold."""

    _cudagraph_support = AttentionCGSupport.ALWAYS

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._ranks, self._rank = get_dcp_world_size_and_rank(kv_cache_spec.dcp_sharded)
        # One buffer for all batches: a captured graph reads it again.
        most = vllm_config.scheduler_config.max_num_seqs
        self._context_lens = torch.zeros(most, dtype=torch.int32, device=device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> FlashAttnMetadata:
        common = common_attn_metadata
        if common.causal is not True:
            raise NotImplementedError(
                f"causal: got {common.causal}; decoders alone are served, where it is True"
            )
        step = paged.Step(
            common.query_start_loc, common.seq_lens, common.block_table_tensor,
            common.max_query_len, common.max_seq_len,
        )  # fmt: skip
        return FlashAttnMetadata(
            common.num_actual_tokens, common.max_query_len, common.max_seq_len,
            common.query_start_loc, common.seq_lens, common.block_table_tensor,
            common.slot_mapping, step, self._context(step) if self._ranks > 1 else None,
        )  # fmt: skip

    def _context(self, step: paged.Step) -> paged.Step:
        earlier = step.seqused_k - step.cu_seqlens_q.diff()
        interleave = self.vllm_config.parallel_config.cp_kv_cache_interleave_size
        here = get_dcp_local_seq_lens(earlier, self._ranks, self._rank, interleave)
        lens = self._context_lens[: len(earlier)].copy_(here)
        most = -(-step.max_seqlen_k // (self._ranks * interleave)) * interleave
        return step._replace(seqused_k=lens, max_seqlen_k=most)


class FlashAttnImpl(AttentionImpl[FlashAttnMetadata]):
    """The attention of one layer.

    Raises:
        NotImplementedError: what there is no kernel for; the message says what.
    """

    can_return_lse_for_decode = True
    supports_dcp = True

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        if kv_cache_dtype not in FlashAttnBackend.supported_kv_cache_dtypes:
            raise NotImplementedError(paged.refuse_cache(kv_cache_dtype))
        if attn_type != AttentionType.DECODER:
            raise NotImplementedError(f"attn_type: got {attn_type}; decoders alone are served")
        if self.dcp_world_size > 1 and (sliding_window is not None or alibi_slopes is not None):
            raise NotImplementedError(
                "a sliding window or ALiBi with decode context parallelism: keys of other ranks "
                "lie between those of this one, so kernels do not know how far away they are"
            )
        self.num_heads, self.head_size, self.scale = num_heads, head_size, scale
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_cache_dtype = kv_cache_dtype
        # The engine's window has as many keys as it says, the query's own among them.
        window = (-1, -1) if sliding_window is None else (sliding_window - 1, 0)
        slopes = None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32)
        self._combine = _combine() if self.dcp_world_size > 1 else None
        self._options = Options(
            softmax_scale=scale, causal=True, window_size=window, softcap=logits_soft_cap or 0.0,
            alibi_slopes=slopes, s_aux=sinks, batch_invariant=envs.VLLM_BATCH_INVARIANT,
        )  # fmt: skip

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Writes the new keys, key and value (rows, num_kv_heads, head_size), to their slots;
        slot_mapping (tokens,), -1 is padding. The engine's operation makes codes of them."""
        _custom_ops.reshape_and_cache_flash(
            key, value, *self._pages(kv_cache), slot_mapping, self.kv_cache_dtype, layer._k_scale,
            layer._v_scale,
        )  # fmt: skip

    def _pages(self, kv_cache: Tensor) -> tuple[Tensor, ...]:
        """K and V (blocks, block_size, num_kv_heads, head_size) of a cache (blocks, num_kv_heads,
        block_size, 2 head_size), however that lies in memory."""
        if kv_cache.dim() != 4 or kv_cache.shape[-1] != 2 * self.head_size:
            raise ValueError(
                f"kv_cache: got shape {tuple(kv_cache.shape)}; (blocks, num_kv_heads, block_size, "
                f"2 * head_size) is needed, which vLLM has from 0.33 on; head_size is "
                f"{self.head_size}"
            )
        return kv_cache.transpose(1, 2).split(self.head_size, dim=-1)

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor,
        attn_metadata: FlashAttnMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Attention over the cache, which holds the new keys by now.

        Arguments:
            query, output: (tokens, num_heads, head_size); output is written. Rows past those of
                the batch are padding.
            key, value: (tokens, num_kv_heads, head_size), of which decode context parallelism
                alone makes use.
            kv_cache: (blocks, num_kv_heads, block_size, 2 head_size).
            attn_metadata: None while the engine measures its memory.
        """
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("output_scale: got one; outputs are not quantized here")
        if attn_metadata is None:
            return output.zero_()
        rows = attn_metadata.num_actual_tokens
        query, into = query[:rows], output[:rows]
        pages, scales = self._pages(kv_cache), None
        if self.kv_cache_dtype in paged.FP8_NAMES:
            scales = paged.Scales(layer._k_scale, layer._v_scale)
        if attn_metadata.context is None:
            out, _ = paged.attend(query, *pages, attn_metadata.step, self._options, scales)
            into.copy_(out)
        else:
            new = key[:rows], value[:rows]
            self._attend_shards(query, *new, pages, scales, attn_metadata, into)
        return output

    def _attend_shards(
        self, query: Tensor, key: Tensor, value: Tensor, pages: tuple[Tensor, ...],
        scales: paged.Scales | None, metadata: FlashAttnMetadata, into: Tensor,
    ) -> None:  # fmt: skip
        """With decode context parallelism each rank has some of the earlier keys: for these it
        computes the heads of all ranks, whose parts the engine merges by their LSEs; the step's
        own tokens, which every rank has, are one part more."""
        group = get_dcp_group()
        queries = group.all_gather(query.contiguous(), dim=1)  # (rows, heads of all ranks, d)
        # Every earlier key is visible; the sinks belong to the part that is not sharded.
        options = self._options._replace(causal=False, s_aux=None)
        out, lse = paged.attend(queries, *pages, metadata.context, options, scales)
        # The heads of this rank: (rows, num_heads, d) and (rows, num_heads).
        out, lse = self._combine(out, lse.t().contiguous(), group, return_lse=True)
        own, own_lse = paged.attend_new(query, key, value, metadata.step, self._options)
        merge_attention(out[None], lse.t().contiguous()[None], own[None], own_lse[None], into[None])


def _combine() -> Callable[..., tuple[Tensor, Tensor]]:
    """How the engine merges the parts of all ranks: to be asked while it makes its layers."""
    from vllm.v1.attention.ops import dcp

    config = get_current_vllm_config_or_none()
    if config is not None and config.parallel_config.dcp_comm_backend == "a2a":
        return dcp.dcp_a2a_lse_reduce
    return dcp.cp_lse_ag_out_rs
