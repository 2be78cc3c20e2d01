"""A client as type checkers see it: the calls of the documentation, and such as must be refused.

``test_typed.py`` runs mypy and pyright over it. Both refuse the lines that are marked as wrong, and
accept all others; what they take a result for, it is.
"""
# pyright: strict

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import assert_type

from flash_attn import (
    explain,
    explain_call,
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)
from flash_attn.bert_padding import pad_input, unpad_input
from flash_attn.distributed import (
    Layout,
    all_to_all_attention,
    dense_layout,
    gather_attention,
    merge_attention,
    mesh_attention,
    ring_attention,
    shard_sequence,
    unshard_sequence,
)
from flash_attn.flash_attn_interface import FlashAttnFunc
from flash_attn.layers.rotary import RotaryEmbedding, apply_rotary_emb
from flash_attn.losses.cross_entropy import CrossEntropyLoss
from flash_attn.modules.mha import MHA
from flash_attn.ops.rms_norm import RMSNorm, rms_norm

Two = tuple[Tensor, Tensor]
Three = tuple[Tensor, Tensor, Tensor]


class Attention(nn.Module):
    """A layer of a model."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(dim, 3 * dim)
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(2)
        return flash_attn_func(q, k, v, causal=True, softmax_scale=0.1, softcap=30).flatten(2)


def dense(q: Tensor, k: Tensor, v: Tensor, flag: bool) -> Tensor:
    assert_type(flash_attn_func(q, k, v), Tensor)
    assert_type(flash_attn_func(q, k, v, 0.0, None, True), Tensor)
    assert_type(flash_attn_func(q, k, v, return_lse=False, return_attn_probs=False), Tensor)
    assert_type(flash_attn_func(q, k, v, return_lse=True), Two)
    assert_type(flash_attn_func(q, k, v, return_softmax_lse=True), Two)
    assert_type(flash_attn_func(q, k, v, return_lse=True, return_softmax_lse=True), Two)
    assert_type(flash_attn_func(q, k, v, return_attn_probs=True), Three)
    assert_type(flash_attn_func(q, k, v, return_attn_probs=True, return_lse=True), Three)
    by_position = flash_attn_func(q, k, v, 0.0, None, False, (-1, -1), 0.0, None, False, True)
    assert_type(by_position, Three)
    assert_type(flash_attn_func(q, k, v, return_max_logits=True), Two)
    assert_type(flash_attn_func(q, k, v, return_max_logits="row"), Two)
    assert_type(flash_attn_func(q, k, v, return_lse=True, return_max_logits=True), Three)
    assert_type(flash_attn_func(q, k, v, return_softmax_lse=True, return_max_logits="row"), Three)
    either = flash_attn_func(q, k, v, return_lse=flag)
    return either if isinstance(either, Tensor) else either[0]


def packed_in_one(q: Tensor, kv: Tensor, qkv: Tensor) -> Tensor:
    assert_type(flash_attn_kvpacked_func(q, kv, causal=True), Tensor)
    assert_type(flash_attn_kvpacked_func(q, kv, return_lse=True), Two)
    out, lse, probs = flash_attn_qkvpacked_func(qkv, 0.1, return_attn_probs=True)
    return flash_attn_qkvpacked_func(qkv) + out * lse.mean() + probs.mean()


def options(q: Tensor, s_aux: Tensor, slopes: Tensor) -> list[Tensor]:
    return [
        flash_attn_func(q, q, q, window_size=(128, 0), s_aux=s_aux, alibi_slopes=slopes),
        flash_attn_func(q, q, q, window_size=[128, 0], deterministic=True),
        flash_attn_func(q, q, q, window_size=torch.tensor([128, 0])),
        flash_attn_func(q, q, q, window_size=np.array([128, 0]), batch_invariant=True),
        flash_attn_func(q, q, q, window_size=(np.int64(128), torch.tensor(0))),
    ]


def sequences(q: Tensor, kv: Tensor, qkv: Tensor, ends: Tensor, longest: Tensor) -> Tensor:
    assert_type(flash_attn_varlen_func(q, q, q, ends, ends, 4, longest, causal=True), Tensor)
    assert_type(flash_attn_varlen_func(q, q, q, ends, ends, 4, 4, return_softmax_lse=True), Two)
    assert_type(flash_attn_varlen_kvpacked_func(q, kv, ends, ends, 4, 4), Tensor)
    assert_type(flash_attn_varlen_kvpacked_func(q, kv, ends, ends, 4, 4, return_lse=True), Two)
    assert_type(flash_attn_varlen_qkvpacked_func(qkv, ends, 4, window_size=[3, 0]), Tensor)
    assert_type(flash_attn_varlen_qkvpacked_func(qkv, ends, 4, return_attn_probs=True), Three)
    return flash_attn_varlen_func(
        q, q, q, cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen_q=4, max_seqlen_k=longest
    )


def pages(q: Tensor, k: Tensor, ends: Tensor, table: Tensor) -> Tensor:
    paged = flash_attn_varlen_func(q, k, k, ends, ends, 4, 4, block_table=table, return_lse=True)
    assert_type(paged, Two)
    return flash_attn_varlen_func(q, k, k, ends, ends, 4, 4, 0.0, None, True, block_table=table)


def padded(x: Tensor, mask: Tensor) -> Tensor:
    qkv, indices, cu_seqlens, max_seqlen, _ = unpad_input(x, mask)
    out = flash_attn_varlen_qkvpacked_func(qkv, cu_seqlens, max_seqlen)
    return pad_input(out, indices, x.shape[0], x.shape[1])


def generation(q: Tensor, cache: Tensor, lengths: Tensor) -> Tensor:
    assert_type(flash_attn_with_kvcache(q, cache, cache, return_softmax_lse=True), Two)
    assert_type(flash_attn_with_kvcache(q, cache, cache, return_lse=True, num_splits=4), Two)
    step = flash_attn_with_kvcache(q, cache, cache, q, q, cache_seqlens=lengths, causal=True)
    return step + flash_attn_with_kvcache(q, cache, cache, cache_seqlens=3)


def parallel(q: Tensor, mesh: DeviceMesh, group: dist.ProcessGroup) -> Tensor:
    layout: Layout = dense_layout(4096, 4)
    mine = shard_sequence(q, layout, 0)
    assert_type(ring_attention(mine, mine, mine, layout, group, causal=True), Tensor)
    assert_type(ring_attention(mine, mine, mine, layout, return_lse=True), Two)
    assert_type(ring_attention(mine, mine, mine, layout, return_max_logits=True), Two)
    assert_type(gather_attention(mine, mine, mine, layout, window_size=[64, 0]), Tensor)
    assert_type(gather_attention(mine, mine, mine, layout, return_lse=True), Two)
    assert_type(all_to_all_attention(mine, mine, mine, layout, group), Tensor)
    assert_type(all_to_all_attention(mine, mine, mine, layout, return_lse=True), Two)
    out, lse = mesh_attention(mine, mine, mine, layout, mesh, return_lse=True)
    merge_attention(out, lse, out, lse)
    return unshard_sequence(mesh_attention(mine, mine, mine, layout, mesh), layout)


def modules(x: Tensor, weight: Tensor, angles: Tensor, labels: Tensor) -> Tensor:
    attention = MHA(512, 8, causal=True, use_flash_attn=True, window_size=[128, 0])
    assert_type(attention.head_dim, int)
    assert_type(attention.out_proj, nn.Linear)
    assert_type(RotaryEmbedding(64, device="cpu").base, float)
    normed = RMSNorm(weight.shape[0]).forward(rms_norm(x, weight, 1e-6))
    CrossEntropyLoss(label_smoothing=0.1).forward(normed.flatten(0, 2), labels)
    return apply_rotary_emb(normed, angles.cos(), angles.sin(), interleaved=True)


def explanations(q: Tensor) -> list[str | None]:
    choices = explain(q, q, q, window_size=[3, 0]), explain_call(flash_attn_func, q, q, q)
    return [choice.kernel for choice in choices]


def passed_on(q: Tensor, **kwargs: Any) -> Any:
    return FlashAttnFunc.apply(q, q, q), flash_attn_func(q, q, q, **kwargs)


def wrong(q: Tensor, ends: Tensor, layout: Layout) -> None:
    flash_attn_func(q, q)  # wrong: no v
    flash_attn_func(q, q, q, is_causal=True)  # wrong: another library's name
    flash_attn_func(q, q, q, causal="yes")  # wrong: no bool
    flash_attn_func(q, q, q, window_size=128)  # wrong: one integer
    flash_attn_func(q, q, q, window_size=(0.5, 0.5))  # wrong: no integers
    flash_attn_func(q, q, q, window_size="ab")  # wrong: no integers
    flash_attn_func(q, q, q, softmax_scale="0.1")  # wrong: no number
    flash_attn_func(q, q, [1.0])  # wrong: no tensor
    flash_attn_func(q, q, q, return_lse=True).flatten(2)  # wrong: a tuple
    out, lse = flash_attn_func(q, q, q, return_attn_probs=True)  # wrong: three
    flash_attn_func(q, q, q, return_lse=True)[2]  # wrong: two
    flash_attn_varlen_func(q, q, q, ends, ends)  # wrong: no max_seqlen
    flash_attn_varlen_qkvpacked_func(q, cu_seqlens_q=ends, max_seqlen_q=7)  # wrong: others' names
    flash_attn_qkvpacked_func(q, q, q)  # wrong: three tensors
    flash_attn_with_kvcache(q, q, q, dropout_p=0.1)  # wrong: no dropout
    flash_attn_with_kvcache(q, q, q, cache_seqlens=[3, 4])  # wrong: no tensor
    ring_attention(q, q, q)  # wrong: no layout
    flash_attn_func(q, q, q, return_max_logits="rows")  # wrong: no such value
    flash_attn_func(q, q, q, return_max_logits=True).sum()  # wrong: a tuple
    gather_attention(q, q, q, layout, None, 0.1)  # wrong: by keyword alone
    all_to_all_attention(q, q, q, layout, gradient_dtype=torch.float32)  # wrong: not there
    ring_attention(q, q, q, layout, return_lse=True).sum()  # wrong: a tuple
    MHA(512, 8, window_size=7)  # wrong: one integer
    unpad_input(q)  # wrong: no mask

    print(out, lse)

    from flash_attn.flash_attn_interface import nothing  # wrong: no such name # noqa: F401
    from flash_attn.ops.layer_norm import no_norm  # wrong: no such name # noqa: F401
