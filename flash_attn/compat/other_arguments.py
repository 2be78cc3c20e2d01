"""Arguments of other attention functions, and what to do here.

The one table of them: ``keywords.py`` answers an unknown keyword from it, and docs/porting.md
prints it.
"""

from __future__ import annotations

from typing import NamedTuple


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
_CODES = (
    "codes are taken by `flash_attn_func` and `flash_attn_varlen_func`, of packed tensors their "
    "slices; codes of a KV cache alone by `flash_attn_with_kvcache` as well"
)

# What to do, or (the argument that does the same, and more to say of it), of each library's.
_BY_LIBRARY: dict[str, dict[str, str | tuple[str, ...]]] = {
    "FlashAttention-3": {
        "qv": "`flash_attn_with_kvcache` takes a latent cache with it, `flash_attn_varlen_func` "
        "one in pages; elsewhere `torch.cat([q, qv], -1)` and `torch.cat([k, v], -1)` as q and k, "
        "of at most 512 channels",
        "q_descale k_descale v_descale": _CODES,
        "attention_chunk": "`flash_attn_varlen_func` with each chunk as a sequence of its own; "
        "`flash_attn_interface` of `flash-attn-3` takes it",
        "seqused_q": "pack the rows that are in use alone, and let `cu_seqlens_q` say where they "
        "end",
        "seqused_k": "`cache_seqlens` of `flash_attn_with_kvcache`; of packed queries "
        "`flash_attn_interface._flash_attn_varlen_forward` takes `seqused_k`",
        "page_table": ("block_table",),
        "leftpad_k": ("cache_leftpad",),
        "cu_seqlens_k_new": "new keys have one length in a call; write those of different lengths "
        "into the pages, then call `flash_attn_varlen_func` with `block_table`",
        "rotary_seqlens": _POSITIONS,
        "pack_gqa": _CHOSEN,
        "num_splits": f"{_CHOSEN}; `flash_attn_with_kvcache` takes it",
        "scheduler_metadata": "leave it out: nothing is prepared before a call",
        "sm_margin": "leave it out: a call takes all SMs; the functions of flash-attn-3 honour it",
    },
    "FlashAttention-4": {
        "learnable_sink": ("s_aux",),
        "mask_mod aux_tensors block_sparse_tensors": _FLEX,
    },
    "torch: `scaled_dot_product_attention`": {
        "query": ("q", "`q`, (batch, seqlen, heads, head_dim): transpose heads and seqlen"),
        "key": ("k", "`k`, `v`, likewise"),
        "value": ("v", "`k`, `v`, likewise"),
        "attn_mask": _NO_MASK,
        "is_causal": (
            "causal",
            "`causal`; where there are fewer queries than keys the last query sees all of them, in "
            "torch's the first sees one",
        ),
        "scale": ("softmax_scale",),
        "enable_gqa": "leave it out: `k` and `v` may have fewer heads than `q` in any call",
    },
    "torch: `varlen_attn`": {
        "cu_seq_q": ("cu_seqlens_q",),
        "cu_seq_k": ("cu_seqlens_k",),
        "max_q": ("max_seqlen_q",),
        "max_k": ("max_seqlen_k",),
        "return_aux": ("return_lse",),
    },
    "torch: `MultiheadAttention`": {
        "key_padding_mask": _PADDING,
        "need_weights": ("return_attn_probs",),
    },
    "torch: `flex_attention`": {"score_mod block_mask": _FLEX, "kernel_options": _CHOSEN},
    "xformers: `memory_efficient_attention`": {
        "attn_bias": _NO_MASK,
        "p": ("dropout_p",),
        "op": f"{_CHOSEN}; `flash_attn.explain` says what runs",
        "output_dtype": "leave it out: the output has the dtype of `q`",
    },
    "transformers": {
        "attention_mask": _PADDING,
        "dropout": ("dropout_p",),
        "sliding_window": (
            "window_size",
            "`window_size=(sliding_window - 1, 0)` with `causal=True`",
        ),
        "cache_position position_ids": _POSITIONS,
        "past_key_values": "`flash_attn_with_kvcache` takes a cache as `k_cache` and `v_cache`",
        "sinks": ("s_aux",),
    },
    "FlashInfer, vLLM": {
        "sm_scale": ("softmax_scale",),
        "logits_soft_cap": ("softcap",),
        "window_left": ("window_size", "`window_size=(window_left, -1)`"),
        "block_tables": ("block_table",),
    },
    "various": {
        "cu_seqlens": ("cu_seqlens_q", "`cu_seqlens_q` and `cu_seqlens_k`"),
        "max_seqlen": ("max_seqlen_q", "`max_seqlen_q` and `max_seqlen_k`"),
        "k_new v_new": "`flash_attn_with_kvcache` takes new keys and values as `k` and `v`",
        "return_softmax": "`return_lse` for the log-sum-exp, `return_attn_probs` for probabilities",
        "alibi": ("alibi_slopes",),
        "window": ("window_size",),
        "sink": ("s_aux",),
        "soft_cap": ("softcap",),
        "mask bias": _NO_MASK,
    },
}

#: What each name means, in the order of the page.
ARGUMENTS: dict[str, Meant] = {
    name: Meant(of, *(("", meant) if isinstance(meant, str) else meant))
    for of, arguments in _BY_LIBRARY.items()
    for names, meant in arguments.items()
    for name in names.split()
}
