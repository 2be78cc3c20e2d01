"""One decoding step after another: rotary, append and attention in one call, over a paged cache.

python examples/kv_cache.py
"""

import torch

from flash_attn import flash_attn_func, flash_attn_with_kvcache
from flash_attn.layers.rotary import apply_rotary_emb

heads, heads_kv, head_dim, page = 8, 2, 64, 16
theta = 10000.0 ** -(torch.arange(0, head_dim, 2) / head_dim)
angles = torch.outer(torch.arange(256), theta)
cos, sin = angles.cos(), angles.sin()  # (positions, head_dim / 2)

# 32 pages for two sequences, in no order: sequence b keeps its tokens in pages block_table[b].
k_cache = torch.zeros(32, page, heads_kv, head_dim)
v_cache = torch.zeros_like(k_cache)
block_table = torch.randperm(32, dtype=torch.int32).view(2, 16)
used = torch.zeros(2, dtype=torch.int32)

total = 60
q = torch.randn(2, total, heads, head_dim)
k, v = torch.randn(2, 2, total, heads_kv, head_dim)

steps = []
for rows in [slice(0, 40), *(slice(i, i + 1) for i in range(40, total))]:  # a prompt, then tokens
    out = flash_attn_with_kvcache(
        q[:, rows],
        k_cache,
        v_cache,
        k[:, rows],
        v[:, rows],
        rotary_cos=cos,
        rotary_sin=sin,
        rotary_interleaved=False,
        cache_seqlens=used,
        block_table=block_table,
        causal=True,
    )
    used += rows.stop - rows.start
    steps.append(out)

rotated_q, rotated_k = (apply_rotary_emb(t, cos, sin) for t in (q, k))
at_once = flash_attn_func(rotated_q, rotated_k, v, causal=True)
difference = (torch.cat(steps, dim=1) - at_once).abs().max().item()
print(f"{total} tokens step by step and at once differ by {difference:.1e}")
assert difference < 1e-5
