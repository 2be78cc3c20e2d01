"""Small GPU calls for compute-sanitizer, which slows a kernel a hundredfold.

Each length is odd, so that the last tile of every row and column is partly outside, and the varlen
batch has empty sequences, used lengths, left padding and rows behind the last sequence.
"""

from __future__ import annotations

import itertools

import torch

import flash_attn
from flash_attn.flash_attn_interface import _flash_attn_varlen_forward

LENGTHS = [(1, 1), (65, 129), (129, 65), (33, 0)]  # seqlen_q, seqlen_k
MASKS = [{}, {"causal": True}, {"window_size": (17, 5)}]
DTYPES = (torch.bfloat16, torch.float16)
# Of q and k, and of v: one pair for each size of kernel, some of them smaller than it.
HEAD_DIMS = ((24, 24), (64, 64), (80, 96), (128, 128), (192, 128), (136, 144), (256, 256))


def hooks(heads: int) -> list[dict]:
    """Keywords of the plain score level and of the full one."""
    slopes = torch.rand(heads)
    sinks = torch.randn(heads)
    return [
        {},
        {"softcap": 20.0, "alibi_slopes": slopes, "s_aux": sinks, "dropout_p": 0.2},
    ]


def dense(dtype: torch.dtype, head_dim: int, head_dim_v: int) -> None:
    for (seqlen_q, seqlen_k), mask, hook in itertools.product(LENGTHS, MASKS, hooks(4)):
        q = torch.randn(2, seqlen_q, 4, head_dim, dtype=dtype)
        k = torch.randn(2, seqlen_k, 2, head_dim, dtype=dtype)
        v = torch.randn(2, seqlen_k, 2, head_dim_v, dtype=dtype)
        out = flash_attn.flash_attn_func(q, k, v, **mask, **hook)
        assert torch.isfinite(out).all(), (dtype, head_dim, seqlen_q, seqlen_k, mask, hook)


def varlen(dtype: torch.dtype, head_dim: int, head_dim_v: int) -> None:
    ends_q = torch.tensor([0, 0, 70, 70, 171], dtype=torch.int32)
    ends_k = torch.tensor([0, 5, 138, 200, 201], dtype=torch.int32)
    used = torch.tensor([5, 130, 0, 1], dtype=torch.int32)
    leftpad = torch.tensor([0, 3, 0, 0], dtype=torch.int32)
    q = torch.randn(300, 4, head_dim, dtype=dtype)
    k = torch.randn(210, 2, head_dim, dtype=dtype)
    v = torch.randn(210, 2, head_dim_v, dtype=dtype)
    lengths = (ends_q, ends_k, 101, 133)
    for mask, hook in itertools.product(MASKS, hooks(4)):
        out = flash_attn.flash_attn_varlen_func(q, k, v, *lengths, **mask, **hook)
        assert torch.isfinite(out).all(), (dtype, head_dim, mask, hook)
    out, *_ = _flash_attn_varlen_forward(
        q, k, v, *lengths, 0.0, 0.1, True, seqused_k=used, leftpad_k=leftpad
    )
    assert not out[171:].any(), "rows behind the last sequence"


def probabilities(dtype: torch.dtype) -> None:
    q = torch.randn(2, 33, 4, 40, dtype=dtype)
    k, v = torch.randn(2, 2, 65, 2, 40, dtype=dtype)
    ends = torch.tensor([0, 5, 33], dtype=torch.int32)
    for mask, hook in itertools.product(MASKS, hooks(4)):
        options = {**mask, **hook, "return_attn_probs": True}
        _, _, s_dmask = flash_attn.flash_attn_func(q, k, v, **options)
        assert torch.isfinite(s_dmask).all(), (dtype, mask, hook)
        _, _, s_dmask = flash_attn.flash_attn_varlen_func(
            q[0], k[0, :33], v[0, :33], ends, ends, 28, 28, **options
        )
        assert torch.isfinite(s_dmask).all(), (dtype, mask, hook)


def main(device: str = "cuda") -> None:
    torch.set_default_device(device)
    torch.manual_seed(0)
    for dtype in DTYPES:
        for head_dims in HEAD_DIMS:
            dense(dtype, *head_dims)
            varlen(dtype, *head_dims)
        probabilities(dtype)
    print("all calls returned finite values")


if __name__ == "__main__":
    main()
