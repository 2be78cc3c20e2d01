"""Tiny models of `transformers` with random weights, and inputs for them."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers")

VOCABULARY = 99
LENGTHS = (13, 5, 9)
SIZES = dict(
    hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, vocab_size=VOCABULARY, max_position_embeddings=128,
    pad_token_id=0, bos_token_id=1, eos_token_id=None,
)  # fmt: skip
WITHOUT_HEAD_DIM = {name: size for name, size in SIZES.items() if name != "head_dim"}
QWEN2_5_VL = "transformers.models.qwen2_5_vl.modeling_qwen2_5_vl"
LOCAL_AND_GLOBAL = ["sliding_attention", "full_attention"]


@dataclass(frozen=True)
class Family:
    config: Callable[[], transformers.PretrainedConfig]
    model: str = "AutoModelForCausalLM"
    packs: bool = True  # positions tell packed sequences apart; learned ones come from the mask
    listed: bool = True  # it names this package among the implementations that it takes

    def build(
        self, implementation: str, dtype: torch.dtype, device: str, weights: dict | None = None
    ) -> torch.nn.Module:
        """A model with these weights, or with random ones."""
        torch.manual_seed(0)
        module, _, name = self.model.rpartition(".")
        cls = getattr(importlib.import_module(module or "transformers"), name)
        make = cls.from_config if name.startswith("Auto") else cls._from_config
        first = implementation if self.listed else "eager"
        model = make(self.config(), dtype=dtype, attn_implementation=first)
        model.config._attn_implementation = implementation
        if weights is None:
            for parameter in model.parameters():
                # As they come, scores are so small that all keys of a query weigh the same.
                parameter.data.copy_(torch.randn_like(parameter) * 0.3 + (parameter == 1))
        else:
            model.load_state_dict(weights)
        return model.to(device).eval()


FAMILIES = {
    "llama": Family(lambda: transformers.LlamaConfig(**SIZES)),
    "mistral": Family(lambda: transformers.MistralConfig(**SIZES, sliding_window=7)),
    "qwen3": Family(lambda: transformers.Qwen3Config(**SIZES)),
    "gemma2": Family(
        lambda: transformers.Gemma2Config(
            **SIZES, sliding_window=5, attn_logit_softcapping=2.0, query_pre_attn_scalar=16
        )
    ),
    "gemma3": Family(
        lambda: transformers.Gemma3TextConfig(
            **SIZES | {"head_dim": 256, "num_attention_heads": 2, "num_key_value_heads": 1},
            sliding_window=7, query_pre_attn_scalar=256, layer_types=LOCAL_AND_GLOBAL,
        )
    ),
    # Head dim 512 in layers that see all keys.
    "gemma4": Family(
        lambda: transformers.Gemma4TextConfig(
            **SIZES | {"head_dim": 256, "num_attention_heads": 2, "num_key_value_heads": 1},
            global_head_dim=512, num_global_key_value_heads=1, sliding_window=7,
            layer_types=LOCAL_AND_GLOBAL, hidden_size_per_layer_input=0, enable_moe_block=False,
        )
    ),
    "phi3": Family(lambda: transformers.Phi3Config(**WITHOUT_HEAD_DIM, sliding_window=7)),
    "cohere2": Family(
        lambda: transformers.Cohere2Config(
            **SIZES, sliding_window=7, layer_types=LOCAL_AND_GLOBAL
        )
    ),
    "gpt_oss": Family(
        # Its own YaRN makes scores 1.8 times as large: of a gradient a sixth would be rounding. The
        # gradient of a router of two is one number, and its error anything.
        lambda: transformers.GptOssConfig(
            **SIZES, sliding_window=6, num_local_experts=8, num_experts_per_tok=8,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        ),
        listed=False,
    ),
    "falcon": Family(
        lambda: transformers.FalconConfig(
            **WITHOUT_HEAD_DIM, multi_query=True, new_decoder_architecture=False, alibi=False
        )
    ),
    "opt": Family(
        lambda: transformers.OPTConfig(
            **WITHOUT_HEAD_DIM, ffn_dim=64, word_embed_proj_dim=64, dropout=0.0
        ),
        packs=False,
    ),
    # q and k have 192 channels, v has 128.
    "deepseek_v3": Family(
        lambda: transformers.DeepseekV3Config(
            **WITHOUT_HEAD_DIM | {"num_key_value_heads": 4},
            moe_intermediate_size=32, q_lora_rank=32, kv_lora_rank=16, qk_nope_head_dim=128,
            qk_rope_head_dim=64, v_head_dim=128, n_routed_experts=2, num_experts_per_tok=2,
            n_group=1, topk_group=1, first_k_dense_replace=1,
        )
    ),
}  # fmt: skip
ENCODERS = {
    "modernbert": Family(
        lambda: transformers.ModernBertConfig(
            **WITHOUT_HEAD_DIM, cls_token_id=1, sep_token_id=2, local_attention=8,
            global_attn_every_n_layers=2, reference_compile=False,
        ),
        "AutoModelForMaskedLM",
    ),
    "whisper": Family(
        lambda: transformers.WhisperConfig(
            vocab_size=VOCABULARY, num_mel_bins=8, d_model=64, max_source_positions=24,
            max_target_positions=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
            decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, pad_token_id=0,
            bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
        ),
        "WhisperForConditionalGeneration",
    ),
    "qwen2_5_vl": Family(
        lambda: transformers.Qwen2_5_VLConfig().vision_config.__class__(
            depth=2, hidden_size=64, intermediate_size=64, num_heads=4, out_hidden_size=64,
            patch_size=2, spatial_merge_size=2, temporal_patch_size=1, window_size=8,
            fullatt_block_indexes=[1],
        ),
        f"{QWEN2_5_VL}.Qwen2_5_VisionTransformerPretrainedModel",
    ),
}  # fmt: skip


def batch(device: str, side: str = "right") -> dict[str, Tensor]:
    """Token ids and mask (b, s) of sequences of LENGTHS, padded on this side."""
    longest = max(LENGTHS)
    mask = torch.zeros(len(LENGTHS), longest, dtype=torch.long)
    for row, length in zip(mask, LENGTHS, strict=True):
        row[longest - length if side == "left" else 0 : None if side == "left" else length] = 1
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCABULARY, mask.shape, generator=generator) * mask
    return {"input_ids": ids.to(device), "attention_mask": mask.to(device)}
