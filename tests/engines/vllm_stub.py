"""What ``flash_attn.engines.vllm`` needs of vLLM 0.33: names, signatures and meanings, in torch."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from enum import Enum
from types import SimpleNamespace
from typing import ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from flash_attn.cpu.fp8 import encoded

M = TypeVar("M")
ranks = threading.local()  # of decode context parallelism: `group` of the rank that runs


class AttentionType(str, Enum):
    DECODER = "decoder"
    ENCODER = "encoder"


class AttentionCGSupport(Enum):
    """Of which batches full CUDA graphs can be captured."""

    ALWAYS = 3
    NEVER = 0


class AttentionMetadata:
    pass


class AttentionBackend(ABC):
    supported_dtypes: ClassVar = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar = ["auto", "float16", "bfloat16"]
    forward_includes_kv_cache_update = True

    @staticmethod
    @abstractmethod
    def get_name(): ...

    @staticmethod
    @abstractmethod
    def get_impl_cls(): ...

    @staticmethod
    @abstractmethod
    def get_builder_cls(): ...

    @classmethod
    def supports_head_size(cls, head_size):
        return True

    @classmethod
    def supports_compute_capability(cls, capability):
        return True

    @classmethod
    def supports_sink(cls):
        return False

    @classmethod
    def supports_sliding_window(cls):
        return False

    @classmethod
    def supports_batch_invariance(cls):
        return False

    @classmethod
    def supports_combination(
        cls, head_size, dtype, kv_cache_dtype, block_size, use_mla, has_sink, use_sparse,
        use_mm_prefix, device_capability,
    ):  # fmt: skip
        """Why all of these together are not served, or None."""
        return None


class AttentionMetadataBuilder(ABC, Generic[M]):
    _cudagraph_support = AttentionCGSupport.NEVER

    @abstractmethod
    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        self.kv_cache_spec, self.layer_names = kv_cache_spec, layer_names
        self.vllm_config, self.device = vllm_config, device

    @abstractmethod
    def build(self, common_prefix_len, common_attn_metadata, fast_build=False): ...

    def build_for_cudagraph_capture(self, common_attn_metadata):
        return self.build(0, common_attn_metadata)


class AttentionImpl(ABC, Generic[M]):
    can_return_lse_for_decode = False
    supports_dcp = False

    def __new__(cls, *args, **kwargs):
        self = super().__new__(cls)
        self.dcp_world_size, self.dcp_rank = get_dcp_world_size_and_rank(True)
        return self

    @abstractmethod
    def __init__(
        self, num_heads, head_size, scale, num_kv_heads=None, alibi_slopes=None,
        sliding_window=None, kv_cache_dtype="auto", logits_soft_cap=None, attn_type="decoder",
        kv_sharing_target_layer_name=None,
    ): ...  # fmt: skip

    @abstractmethod
    def forward(
        self, layer, query, key, value, kv_cache, attn_metadata, output, output_scale=None,
        output_block_scale=None,
    ): ...  # fmt: skip


@dataclass
class CommonAttentionMetadata:
    """A step, of all layers. Padding: sequences without tokens at the end, rows after them."""

    query_start_loc: Tensor  # (requests + 1,) int32
    query_start_loc_cpu: Tensor
    seq_lens: Tensor  # (requests,) int32, this step's tokens included
    num_reqs: int
    num_actual_tokens: int  # with those of padding
    max_query_len: int  # both may be bounds
    max_seq_len: int
    block_table_tensor: Tensor  # (requests, blocks) int32; anything lies past those in use
    slot_mapping: Tensor  # (tokens,) int64: block * block_size + row; -1 is padding
    causal: bool | Tensor = True


class AttentionBackendEnum(Enum):
    FLASH_ATTN = "theirs"
    CUSTOM = None

    def is_overridden(self):
        return self in overrides

    def get_path(self):
        return overrides[self]


overrides: dict[AttentionBackendEnum, str] = {}


def register_backend(backend, class_path=None, is_mamba=False):
    overrides[backend] = class_path


def reshape_and_cache_flash(
    key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype, k_scale, v_scale
):
    """Writes rows of key and value (tokens, heads, d) to their slots, as many as there are; codes
    of them, as bytes, to caches of uint8."""
    if key_cache.dtype == torch.uint8:
        assert kv_cache_dtype in ("fp8", "fp8_e4m3")
        key, value = (
            encoded(x, scale).view(torch.uint8) for x, scale in ((key, k_scale), (value, v_scale))
        )
    kept = slot_mapping >= 0
    slots, page = slot_mapping[kept], key_cache.shape[1]
    at = slots // page, slots % page
    key_cache[at] = key[: len(slot_mapping)][kept]
    value_cache[at] = value[: len(slot_mapping)][kept]


@dataclass
class Group:
    """The ranks of decode context parallelism, threads here."""

    world_size: int
    rank_in_group: int
    parts: list = field(repr=False)
    barrier: threading.Barrier = field(repr=False)

    def exchange(self, x: Tensor) -> list[Tensor]:
        self.parts[self.rank_in_group] = x
        self.barrier.wait()
        everyone = list(self.parts)
        self.barrier.wait()
        return everyone

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        return torch.cat(self.exchange(x), dim)


def get_dcp_group():
    return ranks.group


def get_dcp_world_size_and_rank(is_sharded):
    group = getattr(ranks, "group", None)
    return (1, 0) if group is None else (group.world_size, group.rank_in_group)


def get_dcp_local_seq_lens(seq_lens, dcp_size=1, dcp_rank=None, cp_kv_cache_interleave_size=1):
    """How many of each sequence's tokens this rank has: runs of `interleave`, by turns."""
    positions = torch.arange(int(seq_lens.max()))
    mine = positions // cp_kv_cache_interleave_size % dcp_size == dcp_rank
    return (mine & (positions < seq_lens[:, None])).sum(-1).int()


def cp_lse_ag_out_rs(
    cp_attn_out, cp_attn_lse, cp_group, ctx=None, return_lse=False, is_lse_base_on_e=True,
    seq_lens=None, query_start_loc=None,
):  # fmt: skip
    """Merges parts, (tokens, heads of all ranks, d) and (tokens, heads of all ranks), and keeps
    this rank's heads."""
    outs = torch.stack(cp_group.exchange(cp_attn_out)).double()
    lses = torch.stack(cp_group.exchange(cp_attn_lse)).double()
    lse = lses.logsumexp(0)
    weights = (lses - lse).exp().nan_to_num(0.0)  # of rows without a key
    heads = slice(
        cp_group.rank_in_group * cp_attn_out.shape[1] // cp_group.world_size,
        (cp_group.rank_in_group + 1) * cp_attn_out.shape[1] // cp_group.world_size,
    )
    out = (weights[..., None] * outs).sum(0)[:, heads].to(cp_attn_out.dtype)
    return out, lse[:, heads].float()


CONFIG = SimpleNamespace(
    scheduler_config=SimpleNamespace(max_num_seqs=16),
    parallel_config=SimpleNamespace(cp_kv_cache_interleave_size=4, dcp_comm_backend="ag_rs"),
)
SPEC = SimpleNamespace(dcp_sharded=True)
LAYER = SimpleNamespace(_k_scale=torch.tensor(1.0), _v_scale=torch.tensor(1.0))


def get_current_vllm_config_or_none():
    return CONFIG


_STATE = "vllm.distributed.parallel_state"
MODULES = {
    "vllm.envs": {"VLLM_BATCH_INVARIANT": False},
    "vllm._custom_ops": {"reshape_and_cache_flash": reshape_and_cache_flash},
    "vllm.config": {"get_current_vllm_config_or_none": get_current_vllm_config_or_none},
    _STATE: {
        "get_dcp_group": get_dcp_group,
        "get_dcp_world_size_and_rank": get_dcp_world_size_and_rank,
    },
    "vllm.v1.attention.backend": {
        c.__name__: c
        for c in (
            AttentionBackend, AttentionCGSupport, AttentionImpl, AttentionMetadata,
            AttentionMetadataBuilder, AttentionType, CommonAttentionMetadata,
        )
    },
    "vllm.v1.attention.backends.utils": {"get_dcp_local_seq_lens": get_dcp_local_seq_lens},
    "vllm.v1.attention.backends.registry": {
        "AttentionBackendEnum": AttentionBackendEnum,
        "register_backend": register_backend,
    },
    "vllm.v1.attention.ops.dcp": {
        "cp_lse_ag_out_rs": cp_lse_ag_out_rs,
        "dcp_a2a_lse_reduce": cp_lse_ag_out_rs,
    },
    "patched": {
        "vllm._custom_ops.reshape_and_cache_flash": reshape_and_cache_flash,
        f"{_STATE}.get_dcp_group": get_dcp_group,
        f"{_STATE}.get_dcp_world_size_and_rank": get_dcp_world_size_and_rank,
        "vllm.v1.attention.ops.dcp.cp_lse_ag_out_rs": cp_lse_ag_out_rs,
    },
}  # fmt: skip
