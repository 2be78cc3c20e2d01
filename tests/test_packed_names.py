"""What is wrong with a packed call is said in the names of its own arguments."""

from __future__ import annotations

import re

import pytest
import torch
from bad_input import int32

from flash_attn import (
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from flash_attn.modules.mha import FlashCrossAttention, FlashSelfAttention

HALF = torch.bfloat16


def zeros(device: str, *shape: int, dtype=HALF) -> torch.Tensor:
    return torch.zeros(*shape, device=device, dtype=dtype)


def qkv(device, shape=(2, 6, 3, 4, 32), dtype=HALF, **options):
    return flash_attn_qkvpacked_func(zeros(device, *shape, dtype=dtype), **options)


def kv(device, shape=(2, 6, 2, 2, 32), dtype=HALF, **options):
    q = zeros(device, 2, 6, 4, 32)
    return flash_attn_kvpacked_func(q, zeros(device, *shape, dtype=dtype), **options)


def packed_qkv(device, ends=(0, 4, 12), longest=8, shape=(12, 3, 4, 32)):
    ends = int32(device, *ends) if isinstance(ends, tuple) else ends
    return flash_attn_varlen_qkvpacked_func(zeros(device, *shape), ends, longest)


def packed_kv(device, ends=(0, 4, 12), shape=(12, 2, 2, 32)):
    ends = int32(device, *ends)
    q = zeros(device, 12, 4, 32)
    return flash_attn_varlen_kvpacked_func(q, zeros(device, *shape), ends, ends, 8, 8)


def last_stride_two(device):
    return flash_attn_qkvpacked_func(zeros(device, 2, 6, 3, 4, 64)[..., ::2])


def nested(device):
    rows = [zeros(device, n, 3, 4, 32) for n in (2, 5)]
    return flash_attn_qkvpacked_func(torch.nested.nested_tensor(rows))


def jagged(device):
    rows = [zeros(device, n, 3, 4, 32) for n in (2, 5)]
    return flash_attn_qkvpacked_func(torch.nested.nested_tensor(rows, layout=torch.jagged))


CASES = [
    (lambda d: qkv(d, dtype=torch.int32), ValueError, "qkv: got dtype torch.int32; accepted on"),
    (lambda d: qkv(d, (2, 6, 3, 4, 513)), ValueError, "qkv: got head_dim 513; accepted are 1"),
    (lambda d: qkv(d, (2, 6, 3, 4, 0)), ValueError, "qkv: got head_dim 0; accepted are 1"),
    (
        lambda d: qkv(d, (2, 6, 3, 0, 32)),
        ValueError,
        "qkv: got 0 heads (shape (2, 6, 3, 0, 32)); 1 or more are needed",
    ),
    (lambda d: qkv(d, causal=2), TypeError, "causal: got 2; True or False"),
    (last_stride_two, ValueError, "qkv: got strides (4608, 768, 256, 64, 2); the last one must"),
    (nested, ValueError, "qkv: got a nested tensor; a dense one is needed: flash_attn_varlen_"),
    (jagged, ValueError, "qkv: got a nested tensor; a dense one is needed: flash_attn_varlen_"),
    (lambda d: kv(d, (2, 6, 2, 3, 32)), ValueError, "kv: got 3 heads; a divisor of the 4 heads"),
    (lambda d: kv(d, (2, 6, 2, 0, 32)), ValueError, "kv: got 0 heads; a divisor of the 4 heads"),
    (lambda d: kv(d, dtype=torch.float32), ValueError, "kv: got dtype torch.float32; it must be"),
    (lambda d: kv(d, (3, 6, 2, 2, 32)), ValueError, "kv: got batch 3; it must be that of q, 2"),
    (
        lambda d: kv(d, (2, 6, 2, 2, 16)),
        ValueError,
        "kv: got head_dim 16 (shape (2, 6, 2, 2, 16)); it must be that of q, 32",
    ),
    (
        lambda d: packed_qkv(d, int32(d, 0, 12).long()),
        ValueError,
        "cu_seqlens: got dtype torch.int64; torch.int32 is needed",
    ),
    (
        lambda d: packed_qkv(d, int32(d, 0, 12)[None]),
        ValueError,
        "cu_seqlens: got shape (1, 2); (batch + 1,) is needed",
    ),
    (lambda d: packed_qkv(d, [0, 12]), TypeError, "cu_seqlens: got list; a torch.Tensor"),
    (lambda d: packed_qkv(d, longest=None), TypeError, "max_seqlen: got None; an int or"),
    (lambda d: packed_qkv(d, longest=True), TypeError, "max_seqlen: got True; an int or"),
    (lambda d: packed_qkv(d, longest=-1), ValueError, "max_seqlen: got -1; 0 or more"),
    (lambda d: packed_kv(d, shape=(12, 2, 2, 16)), ValueError, "kv: got head_dim 16 (shape (12, 2"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "error", "says"), CASES, ids=[says for *_, says in CASES])
def test_names_of_its_own(device, call, error, says):
    with pytest.raises(error) as raised:
        call(device)
    assert str(raised.value).startswith(says)
    assert raised.value.__context__ is None or raised.value.__suppress_context__


CONTENTS = [
    ((0, 4, 13), 9, "cu_seqlens[-1]: got 13; at most 12 is needed"),
    ((0, 8, 4), 8, "cu_seqlens[2]: got 4 after 8"),
    (
        (0, 4, 12),
        7,
        "max_seqlen: got 7; the longest sequence or more is needed, and cu_seqlens has one of 8",
    ),
]


@pytest.mark.parametrize(("ends", "longest", "says"), CONTENTS)
def test_contents(ends, longest, says):
    with pytest.raises(ValueError, match=f"^{re.escape(says)}"):
        packed_qkv("cpu", ends, longest)


def test_names_that_it_has_stay():
    """kv comes with a cu_seqlens and a longest sequence of its own."""
    with pytest.raises(ValueError, match=r"^cu_seqlens_q\[-1\]: got 13"):
        packed_kv("cpu", (0, 4, 13))


@pytest.mark.parametrize("packed", [(12, 3, 4, 32), (12, 4, 32)])
def test_layers(packed):
    x, ends = zeros("cpu", *packed), int32("cpu", 0, 12)
    call = (FlashSelfAttention(), x) if x.dim() == 4 else (FlashCrossAttention(), x, x[:, :2, None])
    layer, *tensors = call
    with pytest.raises(ValueError, match=r"^max_seqlen: got None; cu_seqlens comes with"):
        layer(*tensors, cu_seqlens=ends)
