"""S_dmask: the softmax probabilities, negative where dropped.  For tests only: the one place that
fills a full score matrix, apart from the main loops."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from . import tiling
from .scores import Scores, tile_keep
from .tiled_forward import Place, score_tile


def probabilities(q: Tensor, k: Tensor, lse: Tensor, s_dmask: Tensor, scores: Scores) -> None:
    """q (b, sq, h, d), k (b, sk, hk, d), lse (b, h, sq); writes s_dmask (b, h, sq, sk)."""
    batch, seqlen_q, heads, _ = q.shape
    seqlen_k, kv_heads = k.shape[1:3]
    if 0 in s_dmask.shape:
        return
    group, shift, dtype = heads // kv_heads, seqlen_k - seqlen_q, lse.dtype
    kf = tiling.keys_first(k, dtype).transpose(1, 2)
    lse = lse.masked_fill(lse == -math.inf, 0.0)
    keys = range(seqlen_k)
    for rows in tiling.row_tiles(seqlen_q, group):
        here = slice(rows.start, rows.stop)
        place = Place(rows, keys, shift, kv_heads, group)
        q_tile = tiling.stacked_rows(q[:, here], kv_heads, dtype, scores.query_scale)
        p, _ = score_tile(q_tile, kf, scores, place)
        p.sub_(tiling.stacked_column(lse[:, :, here], kv_heads)).exp_()
        p = p.view(batch, kv_heads, len(rows), group, seqlen_k)
        if scores.dropout is not None:
            p = torch.where(tile_keep(scores.dropout, group, rows, keys).bool(), p, -p)
        s_dmask[:, :, here] = p.transpose(2, 3).flatten(1, 2)
