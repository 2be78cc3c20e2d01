"""What ``flash_attn.engines.sglang`` needs of SGLang 0.5.23: names, signatures and meanings; and
what it is given: a model runner, pools, layers and batches."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, IntEnum, auto
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor


class AttentionType(Enum):
    DECODER = "decoder"
    ENCODER_ONLY = "encoder_only"


class ForwardMode(IntEnum):
    EXTEND = auto()
    DECODE = auto()
    MIXED = auto()
    IDLE = auto()
    TARGET_VERIFY = auto()

    def is_idle(self):
        return self == ForwardMode.IDLE

    def is_decode(self):
        return self == ForwardMode.DECODE


class AttentionBackend:
    def init_forward_metadata(self, forward_batch): ...

    def init_forward_metadata_out_graph(self, forward_batch, in_capture=False): ...

    def init_forward_metadata_in_graph(self, forward_batch): ...

    def init_cuda_graph_state(self, max_bs, max_num_tokens): ...

    def get_cuda_graph_seq_len_fill_value(self): ...

    def forward(self, q, k, v, layer, forward_batch, save_kv_cache=True, **kwargs):
        if forward_batch.forward_mode.is_idle():
            return q.new_empty(q.shape[0], layer.tp_q_head_num * layer.v_head_dim)
        serve = self.forward_extend
        if forward_batch.forward_mode.is_decode():
            serve = self.forward_decode
        return serve(q, k, v, layer, forward_batch, save_kv_cache=save_kv_cache, **kwargs)

    def forward_decode(self, q, k, v, layer, forward_batch, save_kv_cache=True, **kwargs): ...

    def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache=True, **kwargs): ...


@dataclass
class KVWriteLoc:
    loc: Tensor
    swa_loc: Tensor | None = None
    full_loc: Tensor | None = None
    physical: bool = False

    @classmethod
    def for_batch(cls, forward_batch, *, swa_loc=None, full_loc=None):
        physical = forward_batch.out_cache_loc_is_physical
        return cls(forward_batch.out_cache_loc, swa_loc, full_loc, physical)


class SWAKVPool:
    """A pool whose layers with a window have slots of their own."""


ATTENTION_BACKENDS: dict[str, Any] = {}


def register_attention_backend(name):
    def decorator(make):
        ATTENTION_BACKENDS[name] = make
        return make

    return decorator


_ATTENTION = "sglang.srt.layers.attention"
MODULES = {
    f"{_ATTENTION}.base_attn_backend": {"AttentionBackend": AttentionBackend},
    f"{_ATTENTION}.attention_registry": {
        "ATTENTION_BACKENDS": ATTENTION_BACKENDS,
        "register_attention_backend": register_attention_backend,
    },
    "sglang.srt.layers.radix_attention": {"AttentionType": AttentionType},
    "sglang.srt.mem_cache.memory_pool": {"KVWriteLoc": KVWriteLoc},
    "sglang.srt.mem_cache.swa_memory_pool": {"SWAKVPool": SWAKVPool},
    "sglang.srt.model_executor.forward_batch_info": {"ForwardMode": ForwardMode},
    "sglang.srt.arg_groups.choices": {
        "ATTENTION_BACKEND_CHOICES": ["triton"],
        "DETERMINISTIC_ATTENTION_BACKEND_CHOICES": ["triton"],
    },
    "patched": {},
}


# --- What the engine passes ----------------------------------------------------------------------


@dataclass
class Layer:
    """RadixAttention."""

    layer_id: int = 0
    tp_q_head_num: int = 4
    tp_k_head_num: int = 2
    qk_head_dim: int = 64
    v_head_dim: int = 64
    scaling: float = 64**-0.5
    logit_cap: float = 0.0
    sliding_window_size: int = -1
    is_cross_attention: bool = False
    use_irope: bool = False
    pos_encoding_mode: str = "NONE"
    logit_capping_method: str = "tanh"
    xai_temperature_len: int = -1
    attn_type: Any = None  # of the engine's own AttentionType
    k_scale: Any = None  # of codes: a parameter of one number, as some models a number, or None
    v_scale: Any = None


class Pool:
    """A pool of slots, (slots, heads, d) for each layer; page 0 is that of padding. Codes are
    stored as bytes."""

    def __init__(self, slots: int, layers: int, heads_kv: int, dim: int, dtype, device):
        shape = (layers, 2, slots, heads_kv, dim)
        self.dtype = dtype
        self.kv = torch.full(shape, float("nan"), device=device).to(dtype)
        if dtype == torch.float8_e4m3fn:
            self.kv = self.kv.view(torch.uint8)

    def get_kv_buffer(self, layer_id: int) -> tuple[Tensor, Tensor]:
        return tuple(self.kv[layer_id].view(self.dtype))

    def set_kv_buffer(self, layer, loc_info, cache_k, cache_v, k_scale=None, v_scale=None) -> None:
        scales = k_scale, v_scale
        for x, new, scale in zip(self.kv[layer.layer_id], (cache_k, cache_v), scales, strict=True):
            if new.dtype != self.dtype:
                new = (new if scale is None else new.div_(scale)).to(self.dtype)
            x[loc_info.loc] = new.view(x.dtype)


class WindowPool(Pool):
    """SWAKVPool: layer 1 has a window and slots of its own, in another order."""

    def __init__(self, *args):
        Pool.__init__(self, *args)
        self.layers_mapping = {0: (0, False), 1: (0, True)}
        self.mapping: Tensor | None = None  # (slots,): of a slot the one of layers with a window

    def translate_loc_from_full_to_swa(self, kv_indices):
        return self.mapping[kv_indices]

    def set_kv_buffer(self, layer, loc_info, cache_k, cache_v, k_scale=None, v_scale=None) -> None:
        loc = loc_info.swa_loc if self.layers_mapping[layer.layer_id][1] else loc_info.loc
        super().set_kv_buffer(layer, KVWriteLoc(loc), cache_k, cache_v, k_scale, v_scale)


def model_runner(pool: Pool, page_size: int, req_to_token: Tensor, **changed: Any):
    return SimpleNamespace(
        **{
            "page_size": page_size,
            "token_to_kv_pool": pool,
            "req_to_token_pool": SimpleNamespace(req_to_token=req_to_token),
            "use_mla_backend": False,
            "dtype": torch.bfloat16 if pool.dtype == torch.float8_e4m3fn else pool.dtype,
            "kv_cache_dtype": pool.dtype,
            "server_args": SimpleNamespace(enable_deterministic_inference=False, dcp_size=1),
            **changed,
        }
    )


@dataclass
class Batch:
    """ForwardBatch."""

    forward_mode: Any
    req_pool_indices: Tensor  # (requests,) int64: rows of req_to_token
    seq_lens: Tensor  # (requests,) int64, this step's tokens included
    out_cache_loc: Tensor  # (tokens,) int64
    extend_seq_lens: Tensor | None = None  # (requests,) int32
    out_cache_loc_is_physical: bool = False
    seq_lens_cpu: Tensor = field(init=False)
    extend_seq_lens_cpu: list[int] | None = field(init=False)

    def __post_init__(self):
        self.seq_lens_cpu = self.seq_lens.cpu()
        new = self.extend_seq_lens
        self.extend_seq_lens_cpu = None if new is None else new.tolist()

    @property
    def batch_size(self) -> int:
        return len(self.seq_lens)
