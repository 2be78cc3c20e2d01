"""Codes of q, k and v with a descale for each sequence and KV head, on torch operations."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from flash_attn.call import FP8
from flash_attn.utils.kv_quantization import quantize_kv


def make_codes(q: Tensor, k: Tensor, v: Tensor, smooth_k: bool) -> tuple[Tensor, ...]:
    """As flash_attn.dispatch.encode.Codes: codes, descales (b, hk), mean of the keys."""
    mean = k.new_empty((k.shape[0], 0, *k.shape[2:])).float()
    if smooth_k and k.shape[1] > 0:
        mean = k.float().mean(1, keepdim=True)  # (b, 1, hk, d)
        k = k.float() - mean
    k_codes, v_codes, k_descale, v_descale = quantize_kv(k, v)
    groups = q.unflatten(2, (k.shape[2], -1)).flatten(3)  # (b, sq, hk, group * d)
    q_codes, _, q_descale, _ = quantize_kv(groups, groups[:, :0])
    return q_codes.view(q.shape), k_codes, v_codes, q_descale, k_descale, v_descale, mean


def make_query_codes(q: Tensor, cu_seqlens_q: Tensor, heads_kv: int) -> tuple[Tensor, Tensor]:
    """As flash_attn.dispatch.encode.make_query_codes."""
    codes = q.new_zeros(q.shape, dtype=FP8)
    descales = q.new_ones((cu_seqlens_q.shape[0] - 1, heads_kv), dtype=torch.float32)
    ends = cu_seqlens_q.tolist()
    for number, (begin, end) in enumerate(pairwise(ends)):
        rows = slice(begin, end)
        groups = q[rows].unflatten(1, (heads_kv, -1)).flatten(2)[None]  # (1, sq, hk, group * d)
        own, _, descale, _ = quantize_kv(groups, groups[:, :0])
        codes[rows] = own[0].view(q[rows].shape)
        descales[number] = descale[0]
    return codes, descales
