"""Small GPU calls for compute-sanitizer, which slows a kernel a hundredfold.

Each length is odd, so that the last tile of every row and column is partly outside.
"""

from __future__ import annotations

import itertools

import torch

import flash_attn

LENGTHS = [(1, 1), (65, 129), (129, 65)]  # seqlen_q, seqlen_k
MASKS = [{}, {"causal": True}, {"window_size": (17, 5)}]


def main() -> None:
    torch.manual_seed(0)
    dims = (40, 64, 128)
    for dtype, head_dim in itertools.product((torch.bfloat16, torch.float16), dims):
        for (seqlen_q, seqlen_k), mask in itertools.product(LENGTHS, MASKS):
            q = torch.randn(2, seqlen_q, 4, head_dim, device="cuda", dtype=dtype)
            k, v = torch.randn(2, 2, seqlen_k, 2, head_dim, device="cuda", dtype=dtype)
            out = flash_attn.flash_attn_func(q, k, v, **mask)
            torch.cuda.synchronize()
            assert torch.isfinite(out).all(), (dtype, head_dim, seqlen_q, seqlen_k, mask)
    print("all calls returned finite values")


if __name__ == "__main__":
    main()
