"""What programs that CI cannot install take from this package: names, and the calls they make.

Read off the releases named. A call is how many arguments are positional, and its keywords.
"""

from __future__ import annotations

from typing import NamedTuple


class Use(NamedTuple):
    name: str  # module:attribute
    positional: int | None = None  # None: imported, called by way of something else
    keywords: str = ""


INTERFACE = "flash_attn.flash_attn_interface:"
LENGTHS = "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k"
OF_MOBA = f"q k v {LENGTHS} softmax_scale causal dropout_p"
ROTARY_STEP = "rotary_cos rotary_sin cache_seqlens rotary_interleaved"

USES: dict[str, list[Use]] = {
    "diffusers 0.42.1: attention_dispatch": [
        Use(
            "flash_attn:flash_attn_func", 0,
            "q k v dropout_p softmax_scale causal window_size return_attn_probs",
        ),
        Use(
            "flash_attn:flash_attn_varlen_func", 0,
            f"q k v {LENGTHS} dropout_p softmax_scale causal window_size return_attn_probs",
        ),
        Use(f"{INTERFACE}_wrapped_flash_attn_forward", 11),
        Use(f"{INTERFACE}_wrapped_flash_attn_backward", 18),
    ],
    "xformers 0.0.35: ops.fmha.flash": [
        Use(f"{INTERFACE}flash_attn_gpu"),
        Use("flash_attn_2_cuda:fwd", 13),
        Use("flash_attn_2_cuda:varlen_fwd", 21),
        Use("flash_attn_2_cuda:bwd", 19),
        Use("flash_attn_2_cuda:varlen_bwd", 24),
    ],
    "fla-core 0.6.0: ops.moba": [
        Use("flash_attn:flash_attn_varlen_func", 7, "causal"),
        Use(f"{INTERFACE}_flash_attn_varlen_forward", 0, OF_MOBA),
        Use(
            f"{INTERFACE}_flash_attn_varlen_backward", 0,
            f"dout out softmax_lse dq dk dv {OF_MOBA} window_size_left window_size_right softcap "
            "alibi_slopes deterministic",
        ),
    ],
    "flash-linear-attention 0.6.0: layers": [
        Use("flash_attn:flash_attn_func", 3, "causal window_size"),
        Use("flash_attn:flash_attn_varlen_func", 3, f"{LENGTHS} causal window_size"),
    ],
    "transformer-engine 2.x: dot_product_attention": [
        Use("flash_attn_2_cuda:varlen_bwd"),
        Use(
            f"{INTERFACE}flash_attn_func", 4,
            "softmax_scale causal window_size alibi_slopes deterministic",
        ),
        Use(
            f"{INTERFACE}flash_attn_varlen_func", 8,
            "softmax_scale causal window_size alibi_slopes deterministic block_table",
        ),
        Use(f"{INTERFACE}_flash_attn_forward"),
        Use(f"{INTERFACE}_flash_attn_backward"),
        Use(f"{INTERFACE}_flash_attn_varlen_forward"),
        Use(f"{INTERFACE}_flash_attn_varlen_backward"),
    ],
    "megatron-core 0.16.1: transformer.attention, rope_utils": [
        Use("flash_attn:__version__"),
        Use("flash_attn:flash_attn_varlen_func", 7, "softmax_scale causal block_table"),
        Use("flash_attn:flash_attn_with_kvcache", 0, f"q k_cache v_cache k v {ROTARY_STEP}"),
        Use(
            "flash_attn:flash_attn_with_kvcache", 0,
            "q k_cache v_cache cache_seqlens causal block_table num_splits",
        ),
        Use("flash_attn.layers.rotary:apply_rotary_emb", 4),
    ],
    "mamba-ssm 2.3.2: modules.mha": [
        Use("flash_attn:flash_attn_with_kvcache", 5, f"{ROTARY_STEP} softmax_scale causal"),
        Use("flash_attn:flash_attn_with_kvcache", 5, "cache_seqlens softmax_scale causal"),
        Use("flash_attn.layers.rotary:RotaryEmbedding", 1, "base interleaved device"),
    ],
    "verl 0.9.1": [
        Use("flash_attn:flash_attn_varlen_func", 0, f"q k v {LENGTHS} dropout_p softmax_scale"),
        Use("flash_attn.ops.triton.cross_entropy:cross_entropy_loss", 2, "inplace_backward"),
        Use("flash_attn.bert_padding:unpad_input", 1, "attention_mask"),
        Use("flash_attn.bert_padding:pad_input", 0, "hidden_states indices batch seqlen"),
        Use("flash_attn.bert_padding:index_first_axis"),
        Use("flash_attn.bert_padding:rearrange"),
    ],
    "unsloth 2026.10.9": [
        Use(
            "flash_attn:flash_attn_with_kvcache", 3,
            "cache_seqlens cache_leftpad softmax_scale softcap window_size",
        ),
        Use(f"{INTERFACE}flash_attn_gpu"),
    ],
}  # fmt: skip

#: The versions that they take, both ends included; "" is no end.
GATES: dict[str, tuple[str, str]] = {
    "transformers": ("2.3.3", ""),
    "diffusers": ("2.6.3", ""),
    "xformers": ("2.7.1", "2.8.4"),
    "transformer-engine": ("2.1.1", "2.8.3"),
    "transformer-engine, on Blackwell": ("2.7.3", "2.8.3"),
    "megatron-core, dynamic batching": ("2.7.3", ""),
}
