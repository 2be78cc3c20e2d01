"""Sequences of different lengths without padding: pack, attend, unpack.

python examples/varlen.py
"""

import torch

from flash_attn import flash_attn_func, flash_attn_varlen_func
from flash_attn.bert_padding import pad_input, unpad_input

lengths = torch.tensor([5, 900, 0, 130])
batch, seqlen, heads, head_dim = 4, 900, 4, 64
used = torch.arange(seqlen) < lengths[:, None]  # (batch, seqlen)
q, k, v = torch.randn(3, batch, seqlen, heads, head_dim)

q_packed, indices, cu_seqlens, max_seqlen, _ = unpad_input(q, used)
k_packed, v_packed = (unpad_input(t, used)[0] for t in (k, v))
print(f"{batch * seqlen} padded tokens, {len(q_packed)} packed; cu_seqlens {cu_seqlens.tolist()}")

out_packed = flash_attn_varlen_func(
    q_packed, k_packed, v_packed, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, causal=True
)  # (total, heads, head_dim)
out = pad_input(out_packed, indices, batch, seqlen)  # (batch, seqlen, heads, head_dim)

# A causal query never sees the padding behind it, so the padded call agrees where tokens are used.
padded = flash_attn_func(q, k, v, causal=True)
difference = (out - padded)[used].abs().max().item()
print(f"largest difference from the padded call: {difference:.1e}")
assert difference < 1e-5
