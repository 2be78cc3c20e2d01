"""Arguments of other attention functions, and what to do here.

The one table of them: ``keywords.py`` answers an unknown keyword from it, and docs/porting.md
prints it.
"""

from __future__ import annotations

from typing import NamedTuple

FA3 = "FlashAttention-3"
FA4 = "FlashAttention-4"
SDPA = "torch: `scaled_dot_product_attention`"
VARLEN = "torch: `varlen_attn`"
MODULE = "torch: `MultiheadAttention`"
FLEX = "torch: `flex_attention`"
XFORMERS = "xformers: `memory_efficient_attention`"
TRANSFORMERS = "transformers"
SERVING = "FlashInfer, vLLM"
VARIOUS = "various"


class Meant(NamedTuple):
    """What an argument of another library is here."""

    of: str  # whose it is
    name: str = ""  # the argument that does the same, where one does
    use: str = ""  # else, or with more to say of it: what to do

    def here(self) -> str:
        """As Markdown."""
        return self.use or f"`{self.name}`"


_NO_MASK = (
    "there is no mask tensor: `causal` and `window_size` say which keys are seen, `alibi_slopes` "
    "adds to scores, and `flash_attn_varlen_func` leaves out padding; for any other mask or bias "
    "`torch.nn.attention.flex_attention`"
)
_PADDING = (
    "`flash_attn.bert_padding.unpad_input` takes a padding mask, and `flash_attn_varlen_func` what "
    "that returns: rows without padding"
)
_FLEX = (
    "`torch.nn.attention.flex_attention`; what many write for it is here: `causal`, `window_size`, "
    "`softcap`, `alibi_slopes`, and `flash_attn_varlen_func` for documents"
)
_CHOSEN = "leave it out: it is chosen inside"
_POSITIONS = (
    "positions are `cache_seqlens` and what follows; for others turn q and k by "
    "`flash_attn.layers.rotary.apply_rotary_emb` before the call"
)
_NO_FP8 = "there is no FP8: convert q, k and v to float16 or bfloat16"
_NEW = "`flash_attn_with_kvcache` takes new keys and values as `k` and `v`"

#: By name, in the order of the page.
ARGUMENTS: dict[str, Meant] = {
    "qv": Meant(
        FA3,
        use="`torch.cat([q, qv], -1)` and `torch.cat([k, v], -1)` as q and k, of at most 256 "
        "channels, with `softmax_scale`",
    ),
    "q_descale": Meant(FA3, use=_NO_FP8),
    "k_descale": Meant(FA3, use=_NO_FP8),
    "v_descale": Meant(FA3, use=_NO_FP8),
    "attention_chunk": Meant(
        FA3, use="`flash_attn_varlen_func` with each chunk as a sequence of its own"
    ),
    "seqused_q": Meant(
        FA3, use="pack the rows that are in use alone, and let `cu_seqlens_q` say where they end"
    ),
    "seqused_k": Meant(
        FA3,
        use="`cache_seqlens` of `flash_attn_with_kvcache`; of packed queries "
        "`flash_attn_interface._flash_attn_varlen_forward` takes `seqused_k`",
    ),
    "page_table": Meant(FA3, "block_table"),
    "leftpad_k": Meant(FA3, "cache_leftpad"),
    "cu_seqlens_k_new": Meant(
        FA3,
        use="new keys have one length in a call; write those of different lengths into the pages, "
        "then call `flash_attn_varlen_func` with `block_table`",
    ),
    "rotary_seqlens": Meant(FA3, use=_POSITIONS),
    "pack_gqa": Meant(FA3, use=_CHOSEN),
    "num_splits": Meant(FA3, use=f"{_CHOSEN}; `flash_attn_with_kvcache` takes it"),
    "scheduler_metadata": Meant(FA3, use="leave it out: nothing is prepared before a call"),
    "sm_margin": Meant(FA3, use="leave it out: a call takes all multiprocessors"),
    "learnable_sink": Meant(FA4, "s_aux"),
    "mask_mod": Meant(FA4, use=_FLEX),
    "aux_tensors": Meant(FA4, use=_FLEX),
    "block_sparse_tensors": Meant(FA4, use=_FLEX),
    "query": Meant(SDPA, "q", "`q`, (batch, seqlen, heads, head_dim): transpose heads and seqlen"),
    "key": Meant(SDPA, "k", "`k`, `v`, likewise"),
    "value": Meant(SDPA, "v", "`k`, `v`, likewise"),
    "attn_mask": Meant(SDPA, use=_NO_MASK),
    "is_causal": Meant(
        SDPA,
        "causal",
        "`causal`; where there are fewer queries than keys the last query sees all of them, in "
        "torch's the first sees one",
    ),
    "scale": Meant(SDPA, "softmax_scale"),
    "enable_gqa": Meant(
        SDPA, use="leave it out: `k` and `v` may have fewer heads than `q` in any call"
    ),
    "cu_seq_q": Meant(VARLEN, "cu_seqlens_q"),
    "cu_seq_k": Meant(VARLEN, "cu_seqlens_k"),
    "max_q": Meant(VARLEN, "max_seqlen_q"),
    "max_k": Meant(VARLEN, "max_seqlen_k"),
    "return_aux": Meant(VARLEN, "return_lse"),
    "key_padding_mask": Meant(MODULE, use=_PADDING),
    "need_weights": Meant(MODULE, "return_attn_probs"),
    "score_mod": Meant(FLEX, use=_FLEX),
    "block_mask": Meant(FLEX, use=_FLEX),
    "kernel_options": Meant(FLEX, use=_CHOSEN),
    "attn_bias": Meant(XFORMERS, use=_NO_MASK),
    "p": Meant(XFORMERS, "dropout_p"),
    "op": Meant(XFORMERS, use=f"{_CHOSEN}; `flash_attn.explain` says what runs"),
    "output_dtype": Meant(XFORMERS, use="leave it out: the output has the dtype of `q`"),
    "attention_mask": Meant(TRANSFORMERS, use=_PADDING),
    "dropout": Meant(TRANSFORMERS, "dropout_p"),
    "sliding_window": Meant(
        TRANSFORMERS, "window_size", "`window_size=(sliding_window - 1, 0)` with `causal=True`"
    ),
    "cache_position": Meant(TRANSFORMERS, use=_POSITIONS),
    "position_ids": Meant(TRANSFORMERS, use=_POSITIONS),
    "past_key_values": Meant(
        TRANSFORMERS, use="`flash_attn_with_kvcache` takes a cache as `k_cache` and `v_cache`"
    ),
    "sinks": Meant(TRANSFORMERS, "s_aux"),
    "sm_scale": Meant(SERVING, "softmax_scale"),
    "logits_soft_cap": Meant(SERVING, "softcap"),
    "window_left": Meant(SERVING, "window_size", "`window_size=(window_left, -1)`"),
    "block_tables": Meant(SERVING, "block_table"),
    "cu_seqlens": Meant(VARIOUS, "cu_seqlens_q", "`cu_seqlens_q` and `cu_seqlens_k`"),
    "max_seqlen": Meant(VARIOUS, "max_seqlen_q", "`max_seqlen_q` and `max_seqlen_k`"),
    "k_new": Meant(VARIOUS, use=_NEW),
    "v_new": Meant(VARIOUS, use=_NEW),
    "return_softmax": Meant(
        VARIOUS, use="`return_lse` for the log-sum-exp, `return_attn_probs` for probabilities"
    ),
    "alibi": Meant(VARIOUS, "alibi_slopes"),
    "window": Meant(VARIOUS, "window_size"),
    "sink": Meant(VARIOUS, "s_aux"),
    "soft_cap": Meant(VARIOUS, "softcap"),
    "mask": Meant(VARIOUS, use=_NO_MASK),
    "bias": Meant(VARIOUS, use=_NO_MASK),
}
