"""Codes of q, k and v with a descale for each sequence and KV head, on torch operations."""

from __future__ import annotations

from torch import Tensor

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
