"""Attention in parts, merged by their log-sum-exp: what ring attention and split caches do.

Each part sees some of the keys and returns its output and its LSE, the log of its softmax
denominator. The whole is their average with weights exp(lse_part - lse_whole). A sink, a logit that
joins the denominator and has no value, is one more part with output 0.

    python examples/merge_lse.py
"""

import torch

from flash_attn import flash_attn_func


def merge(outs, lses):
    """Outputs (batch, seqlen, heads, head_dim) and LSEs (batch, heads, seqlen) of disjoint keys."""
    lse = torch.logsumexp(torch.stack(lses), dim=0)
    weights = [torch.exp(part - lse).transpose(1, 2).unsqueeze(-1) for part in lses]
    return sum(w * out for w, out in zip(weights, outs, strict=True)), lse


q, k, v = torch.randn(3, 1, 256, 4, 64).unbind()
parts = [
    flash_attn_func(q, k_part, v_part, return_lse=True)
    for k_part, v_part in zip(k.chunk(4, dim=1), v.chunk(4, dim=1), strict=True)
]
merged, merged_lse = merge(*zip(*parts, strict=True))
whole, lse = flash_attn_func(q, k, v, return_lse=True)
print(f"4 parts merged: out differs by {(merged - whole).abs().max().item():.1e}")
assert torch.allclose(merged, whole, atol=1e-5)
assert torch.allclose(merged_lse, lse, atol=1e-5)

sinks = torch.randn(4)  # one logit per head
sink_lse = sinks.view(1, 4, 1).expand_as(lse)
merged, _ = merge([whole, torch.zeros_like(whole)], [lse, sink_lse])
with_sinks = flash_attn_func(q, k, v, s_aux=sinks)
print(f"a sink as a part: out differs by {(merged - with_sinks).abs().max().item():.1e}")
assert torch.allclose(merged, with_sinks, atol=1e-5)
