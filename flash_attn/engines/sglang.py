"""An attention backend for SGLang: ``Engine(model_path, attention_backend="flash_attn")``.

One call serves prompts, chunks of prompts, single tokens and mixes of them. Steps of generation run
in captured graphs; docs/engines.md says what is refused.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from flash_attn.api.checks import MAX_HEAD_DIM_OF_CODES
from flash_attn.call import FP8, Options
from flash_attn.cpu.fp8 import encoded
from flash_attn.engines import missing, paged

try:
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
    from sglang.srt.layers.radix_attention import AttentionType
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc
    from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
except ImportError as error:
    raise missing("SGLang", error) from error


class Metadata(NamedTuple):
    """A batch, for all layers."""

    step: paged.Step
    # Layers with a sliding window may have pages of their own, fewer than the others.
    window_step: paged.Step | None = None
    window_loc: Tensor | None = None  # (tokens,): where their new keys go


class _Buffers(NamedTuple):
    """What captured graphs read, of as many sequences as the largest has."""

    cu_seqlens_q: Tensor  # (most + 1,) int32
    seqused_k: Tensor  # (most,) int32
    block_table: Tensor  # (most, pages of the longest sequence) int32
    window_table: Tensor | None


class FlashAttnBackend(AttentionBackend):
    """Attention of all layers of a model.

    Arguments:
        model_runner: the engine's ModelRunner.

    Raises:
        NotImplementedError: what there is no kernel for; the message says what.
    """

    def __init__(self, model_runner: Any):
        super().__init__()
        _refuse(model_runner)
        self.forward_metadata: Metadata | None = None
        self.page_size = model_runner.page_size
        self.req_to_token: Tensor = (
            model_runner.req_to_token_pool.req_to_token
        )  # (requests, tokens)
        self.pool = model_runner.token_to_kv_pool
        self._has_windows = isinstance(self.pool, SWAKVPool)
        self._invariant = bool(model_runner.server_args.enable_deterministic_inference)
        self._buffers: _Buffers | None = None
        self._has_codes = model_runner.kv_cache_dtype is FP8

    # --- Which pages a step reads ---------------------------------------------------------------

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Before each step that runs without a graph."""
        batch, mode = forward_batch, forward_batch.forward_mode
        if mode.is_idle():
            return
        if mode == ForwardMode.DECODE:
            cu_seqlens_q, longest_q = self._single_tokens(batch.batch_size), 1
        elif mode in (ForwardMode.EXTEND, ForwardMode.MIXED):
            cu_seqlens_q = F.pad(batch.extend_seq_lens.cumsum(0, dtype=torch.int32), (1, 0))
            longest_q = max(batch.extend_seq_lens_cpu)
        else:
            raise NotImplementedError(f"forward_mode: got {mode.name}; {_MODES}")
        longest_k = int(batch.seq_lens_cpu.max())
        table, window_table = self._tables(batch.req_pool_indices, longest_k)
        step = paged.Step(cu_seqlens_q, batch.seq_lens.to(torch.int32), table, longest_q, longest_k)
        self._set(step, window_table)
        self.init_forward_metadata_in_graph(batch)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Buffers for graphs of up to max_bs sequences."""
        pages = -(-self.req_to_token.shape[1] // self.page_size)

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=self.req_to_token.device)

        self._buffers = _Buffers(
            self._single_tokens(max_bs), zeros(max_bs), zeros(max_bs, pages),
            zeros(max_bs, pages) if self._has_windows else None,
        )  # fmt: skip

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Before a graph is captured, and before each replay: fills what it reads."""
        batch, buffers = forward_batch, self._buffers
        if batch.forward_mode != ForwardMode.DECODE:
            raise NotImplementedError(
                f"a CUDA graph of forward_mode {batch.forward_mode.name}: only steps of generation "
                "are captured whole; cuda_graph_backend_prefill='breakable' leaves attention out, "
                "and there is no speculative decoding"
            )
        n = batch.batch_size
        buffers.seqused_k[:n].copy_(batch.seq_lens)
        tables = self._tables(batch.req_pool_indices, int(batch.seq_lens_cpu.max()))
        for kept, table in zip((buffers.block_table, buffers.window_table), tables, strict=True):
            if table is not None:
                kept[:n, : table.shape[1]].copy_(table)
        step = paged.Step(
            buffers.cu_seqlens_q[: n + 1], buffers.seqused_k[:n], buffers.block_table[:n], 1,
            self.req_to_token.shape[1],
        )  # fmt: skip
        self._set(step, buffers.window_table[:n] if self._has_windows else None)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Recorded with a graph, as out_cache_loc is the graph's own."""
        if self._has_windows:
            loc = self.pool.translate_loc_from_full_to_swa(forward_batch.out_cache_loc)
            self.forward_metadata = self.forward_metadata._replace(window_loc=loc)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """The keys of a sequence that is padding."""
        return 1

    def _single_tokens(self, n: int) -> Tensor:
        return torch.arange(n + 1, dtype=torch.int32, device=self.req_to_token.device)

    def _tables(self, requests: Tensor, longest: int) -> tuple[Tensor, Tensor | None]:
        """(batch, pages), of all layers and of those with a window: a page of the pool begins at
        each page_size-th token of a request."""
        tokens = self.req_to_token[:, : max(longest, 1) : self.page_size][requests]
        window = None
        if self._has_windows:
            window = self.pool.translate_loc_from_full_to_swa(tokens)
            window = window.div(self.page_size, rounding_mode="floor").to(torch.int32)
        return tokens // self.page_size, window

    def _set(self, step: paged.Step, window_table: Tensor | None) -> None:
        window_step = None if window_table is None else step._replace(block_table=window_table)
        self.forward_metadata = Metadata(step, window_step)

    # --- Attention of a layer -------------------------------------------------------------------

    def forward_extend(
        self, q: Tensor, k: Tensor | None, v: Tensor | None, layer: Any, forward_batch: Any,
        save_kv_cache: bool = True, sinks: Tensor | None = None, **others: Any,
    ) -> Tensor:  # fmt: skip
        """Writes the new keys and attends to the cache.

        Arguments:
            q: (tokens, heads · head_dim), or with heads as a dimension.
            k, v: (tokens, heads_k, head_dim), or None if the cache has them already.
            layer: the engine's RadixAttention.
            sinks: (heads,), a logit of each head.

        Returns:
            (tokens, heads · head_dim of v).
        """
        given = [name for name, x in others.items() if x is not None and x is not False]
        if given:
            raise NotImplementedError(f"{', '.join(given)}: got what there is no kernel for")
        _refuse_layer(layer, self._has_codes)
        metadata = self.forward_metadata
        if save_kv_cache and k is not None:
            loc = KVWriteLoc.for_batch(forward_batch, swa_loc=metadata.window_loc)
            if self._has_codes:
                k, v = _codes(k, layer.k_scale), _codes(v, layer.v_scale)
            self.pool.set_kv_buffer(layer, loc, k, v)
        windowed = self._has_windows and self.pool.layers_mapping[layer.layer_id][1]
        step = metadata.window_step if windowed else metadata.step
        # The engine's window counts the keys before the query.
        window = (layer.sliding_window_size, 0) if layer.sliding_window_size > -1 else (-1, -1)
        options = Options(
            softmax_scale=layer.scaling, causal=True, window_size=window, softcap=layer.logit_cap,
            s_aux=sinks, batch_invariant=self._invariant,
        )  # fmt: skip
        k_pages, v_pages = (
            x.unflatten(0, (-1, self.page_size)) for x in self.pool.get_kv_buffer(layer.layer_id)
        )
        q = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        scales = paged.Scales(layer.k_scale, layer.v_scale) if self._has_codes else None
        return paged.attend(q, k_pages, v_pages, step, options, scales)[0].flatten(1)

    def forward_decode(self, *args: Any, **kwargs: Any) -> Tensor:
        """``forward_extend`` with one query of each sequence."""
        return self.forward_extend(*args, **kwargs)


def _codes(x: Tensor, scale: Tensor | float | None) -> Tensor:
    """Codes of new keys, (tokens, heads_k, head_dim). The pool would divide x in place, and what is
    larger than any code would become NaN there; here it becomes the largest."""
    if not isinstance(scale, Tensor):
        scale = x.new_full((), 1.0 if scale is None else scale, dtype=torch.float32)
    return encoded(x, scale.detach())


_MODES = "prompts, chunks of them, single tokens and mixes are served; no speculative decoding"


def _refuse(runner: Any) -> None:
    if runner.use_mla_backend:
        raise NotImplementedError("a model with latent attention (MLA): this backend has none")
    if runner.kv_cache_dtype not in (runner.dtype, FP8):
        raise NotImplementedError(paged.refuse_cache(runner.kv_cache_dtype))
    if runner.server_args.dcp_size > 1:
        raise NotImplementedError(
            f"dcp_size: got {runner.server_args.dcp_size}; caches that several GPUs share are not "
            "served with SGLang"
        )


def _refuse_layer(layer: Any, has_codes: bool) -> None:
    if has_codes and max(layer.qk_head_dim, layer.v_head_dim) > MAX_HEAD_DIM_OF_CODES:
        raise NotImplementedError(
            f"kv_cache_dtype: got codes with head dims {layer.qk_head_dim} and {layer.v_head_dim}; "
            f"codes are served up to {MAX_HEAD_DIM_OF_CODES}"
        )
    if layer.attn_type != AttentionType.DECODER or layer.is_cross_attention:
        raise NotImplementedError(
            f"attention of type {layer.attn_type}, cross attention {layer.is_cross_attention}: "
            "decoders alone are served"
        )
    refused = {
        "use_irope": layer.use_irope,
        "pos_encoding_mode": layer.pos_encoding_mode != "NONE",
        "logit_capping_method": layer.logit_cap > 0 and layer.logit_capping_method != "tanh",
        "xai_temperature_len": layer.xai_temperature_len > 0,
    }
    for name, is_set in refused.items():
        if is_set:
            raise NotImplementedError(f"{name}: got {getattr(layer, name)}; no kernel has that")
