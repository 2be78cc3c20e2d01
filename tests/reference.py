"""Naive attention: the full score matrix, one line per rule of the contract.

`attention_ref` computes in float64 and is what results are compared with.  `standard_attention`
is the attention everybody writes in plain torch operations, in the dtype of its inputs; its
distance from the reference sets the accuracy bar.  Neither shares code with the package.

Layouts are those of the public functions: q (b, sq, h, d), k (b, sk, hk, d), v (b, sk, hk, dv).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from reference_dropout import rate
from torch import Tensor

MINUS_INF = float("-inf")


def visible_mask(
    seqlen_q: int, seqlen_k: int, causal: bool, window: tuple[int, int], device=None, chunk: int = 0
) -> Tensor:
    """Which keys each query may see, (sq, sk) bool, aligned to the bottom-right corner.

    chunk: of how many positions; 0 is no chunks.
    """
    left, right = window
    if causal:
        right = 0
    # (sq, 1): the key that lies on query i's diagonal.
    diagonal = torch.arange(seqlen_q, device=device)[:, None] + seqlen_k - seqlen_q
    key = torch.arange(seqlen_k, device=device)[None, :]
    mask = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=device)
    if left >= 0:
        mask &= key >= diagonal - left
    if right >= 0:
        mask &= key <= diagonal + right
    if chunk:
        mask &= key // chunk == diagonal.div(chunk, rounding_mode="floor")
    return mask


def random_slopes(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Of the last dimension's heads every second one favours what is far: less, or scores of some
    hundred keys grow beyond what half precision tells apart."""
    largest = torch.tensor([-0.03, 0.3]).repeat(-(-shape[-1] // 2))[: shape[-1]]
    return torch.rand(shape, generator=generator) * largest


def alibi_bias(slopes: Tensor, seqlen_q: int, seqlen_k: int) -> Tensor:
    """-slope * |i + sk - sq - j|; slopes (h,) or (b, h) -> (1 or b, h, sq, sk)."""
    i = torch.arange(seqlen_q, device=slopes.device)[:, None]
    j = torch.arange(seqlen_k, device=slopes.device)[None, :]
    distance = (i + seqlen_k - seqlen_q - j).abs().to(slopes.dtype)
    slopes = slopes if slopes.dim() == 2 else slopes[None]
    return -slopes[:, :, None, None] * distance


def repeat_heads(x: Tensor, heads_q: int) -> Tensor:
    """(b, s, hk, d) -> (b, s, h, d): query head a uses key head a // (h // hk)."""
    return x.repeat_interleave(heads_q // x.shape[2], dim=2)


def with_sink(scores: Tensor, mask: Tensor, s_aux: Tensor | None) -> tuple[Tensor, Tensor]:
    """Masked scores and one more column, the sink (b, h, sq, sk + 1); rows with anything in them.

    The sink is -inf when there is none, so a row without a single key and an empty key sequence
    need no case of their own: their columns are set to 0, and row_used (b, h, sq, 1) tells.
    """
    b, h, seqlen_q, _ = scores.shape
    sink = scores.new_full((h,), MINUS_INF) if s_aux is None else s_aux.to(scores.dtype)
    sink = sink[None, :, None, None].expand(b, h, seqlen_q, 1)
    columns = torch.cat([scores.masked_fill(~mask, MINUS_INF), sink], dim=-1)
    # Not `isfinite`: a NaN or +inf score has to reach the result.
    row_used = (columns != MINUS_INF).any(-1, keepdim=True)
    return torch.where(row_used, columns, torch.zeros_like(columns)), row_used


def softmax_with_sink(scores: Tensor, mask: Tensor, s_aux: Tensor | None) -> tuple[Tensor, Tensor]:
    """Probabilities (b, h, sq, sk) and log-sum-exp (b, h, sq) of masked scores."""
    columns, row_used = with_sink(scores, mask, s_aux)
    lse = torch.logsumexp(columns, dim=-1)
    probs = torch.exp(columns - lse[..., None])[..., :-1]
    probs = torch.where(mask & row_used, probs, torch.zeros_like(probs))
    lse = torch.where(row_used[..., 0], lse, torch.full_like(lse, MINUS_INF))
    return probs, lse


def scores_ref(
    q: Tensor, k: Tensor, softmax_scale: float | None, softcap: float, alibi_slopes: Tensor | None
) -> Tensor:
    """Scores as they enter the softmax, but for masks, (b, h, sq, sk), in the inputs' dtype."""
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    scores = torch.einsum("bihd,bjhd->bhij", q, repeat_heads(k, q.shape[2])) * scale
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    if alibi_slopes is not None:
        scores = scores + alibi_bias(alibi_slopes.to(q.dtype), q.shape[1], k.shape[1])
    return scores


def max_logits_ref(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    **_,
) -> tuple[Tensor, Tensor, None]:
    """The largest logit of each row, (b, h, sq), float64, in the place of attention_ref's lse."""
    scores = scores_ref(q.double(), k.double(), softmax_scale, softcap, alibi_slopes)
    mask = visible_mask(q.shape[1], k.shape[1], causal, window_size, q.device)
    nothing = scores.new_full((*scores.shape[:-1], 1), MINUS_INF)
    columns = torch.cat([scores.masked_fill(~mask, MINUS_INF), nothing], dim=-1)
    out = q.new_zeros(*q.shape[:-1], v.shape[-1], dtype=torch.float64)
    return out, columns.amax(-1), None


def attention_ref(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    s_aux: Tensor | None = None,
    dropout_p: float = 0.0,
    keep_mask: Tensor | None = None,
    chunk: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """out (b, sq, h, dv), lse (b, h, sq), probabilities before dropout (b, h, sq, sk), float64.

    keep_mask (b, h, sq, sk) is True where dropout keeps the entry.
    """
    q, k, v = q.double(), k.double(), v.double()
    scores = scores_ref(q, k, softmax_scale, softcap, alibi_slopes)
    v = repeat_heads(v, q.shape[2])
    mask = visible_mask(q.shape[1], k.shape[1], causal, window_size, q.device, chunk)
    probs, lse = softmax_with_sink(scores, mask, s_aux)
    dropped = probs
    if dropout_p > 0:
        dropped = torch.where(keep_mask, probs / (1 - rate(dropout_p)), torch.zeros_like(probs))
    return torch.einsum("bhij,bjhd->bihd", dropped, v), lse, probs


def rounded_matmul(a: Tensor, b: Tensor) -> Tensor:
    """a @ b, summed in float32 at least and rounded to their dtype, as torch does on every device;
    on processors without products of half precision its own is 20 times slower than this."""
    if a.is_cpu and a.dtype in (torch.float16, torch.bfloat16):
        return torch.matmul(a.float(), b.float()).to(a.dtype)
    return torch.matmul(a, b)


def standard_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    s_aux: Tensor | None = None,
    dropout_p: float = 0.0,
    keep_mask: Tensor | None = None,
    chunk: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """The same three values with every tensor in q's dtype, the lse at least float32.

    torch.softmax computes in float32 inside and keeps its result in the dtype, for its backward
    too: that is what users who write attention by hand get.
    """
    dtype = q.dtype
    seqlen_q, heads, seqlen_k = q.shape[1], q.shape[2], k.shape[1]
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    k, v = repeat_heads(k, heads), repeat_heads(v, heads)
    scores = rounded_matmul(q.transpose(1, 2), k.permute(0, 2, 3, 1)) * scale
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    if alibi_slopes is not None:
        scores = scores + alibi_bias(alibi_slopes, seqlen_q, seqlen_k).to(dtype)
    mask = visible_mask(seqlen_q, seqlen_k, causal, window_size, q.device, chunk)
    columns, row_used = with_sink(scores, mask, s_aux)
    probs = torch.softmax(columns, dim=-1)[..., :-1]
    probs = torch.where(mask & row_used, probs, torch.zeros_like(probs))
    lse = torch.logsumexp(columns.to(torch.promote_types(dtype, torch.float32)), dim=-1)
    lse = torch.where(row_used[..., 0], lse, torch.full_like(lse, MINUS_INF))
    dropped = probs
    if dropout_p > 0:
        dropped = torch.where(keep_mask, probs / (1 - rate(dropout_p)), torch.zeros_like(probs))
    return rounded_matmul(dropped, v.transpose(1, 2)).transpose(1, 2), lse, probs


def varlen_ref(
    attention: Callable,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: list[int],
    cu_seqlens_k: list[int],
    *,
    seqused_k: list[int] | None = None,
    leftpad_k: list[int] | None = None,
    alibi_slopes: Tensor | None = None,
    keep_mask: Tensor | None = None,
    **kwargs,
) -> tuple[Tensor, Tensor]:
    """out (total_q, h, dv) and lse (h, total_q), one sequence at a time with `attention`.

    Rows before cu_seqlens_q[0] and past cu_seqlens_q[-1] get out 0 and lse -inf.  Both lengths in
    seqused_k and the packed ones count the left padding.  keep_mask is (b, h, max_sq, max_sk),
    alibi_slopes (h,) or (b, h).
    """
    outs, lses = [], []
    for b in range(len(cu_seqlens_q) - 1):
        rows = slice(cu_seqlens_q[b], cu_seqlens_q[b + 1])
        begin, end = cu_seqlens_k[b], cu_seqlens_k[b + 1]
        end = begin + seqused_k[b] if seqused_k is not None else end
        begin = begin + leftpad_k[b] if leftpad_k is not None else begin
        slopes = alibi_slopes
        if slopes is not None and slopes.dim() == 2:
            slopes = slopes[b]
        seqlen_q, seqlen_k = rows.stop - rows.start, max(end - begin, 0)
        keys = slice(begin, begin + seqlen_k)
        keep = None if keep_mask is None else keep_mask[b, None, :, :seqlen_q, :seqlen_k]
        out, lse, _ = attention(
            q[None, rows],
            k[None, keys],
            v[None, keys],
            alibi_slopes=slopes,
            keep_mask=keep,
            **kwargs,
        )
        outs.append(out[0])
        lses.append(lse[0])
    dtype = outs[0].dtype if outs else q.dtype
    lse_dtype = lses[0].dtype if lses else torch.float32

    def nothing(rows: int) -> tuple[Tensor, Tensor]:
        zeros = torch.zeros(rows, q.shape[1], v.shape[-1], dtype=dtype, device=q.device)
        return zeros, torch.full((q.shape[1], rows), MINUS_INF, dtype=lse_dtype, device=q.device)

    (before, lse_before), (after, lse_after) = (
        nothing(cu_seqlens_q[0]),
        nothing(q.shape[0] - cu_seqlens_q[-1]),
    )
    lse = torch.cat([lse_before, *lses, lse_after], dim=-1)
    return torch.cat([before, *outs, after]), lse


def gradients(
    function: Callable[..., tuple[Tensor, Tensor]],
    inputs: dict[str, Tensor],
    dout: Tensor,
    dlse: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Run `function(**inputs)` -> (out, lse) and autograd: out, lse, {name: gradient}.

    With `dtype` the inputs are first converted (the reference wants float64).  Minus infinities in
    lse carry no gradient.
    """
    leaves = {name: x.detach().to(dtype or x.dtype).requires_grad_() for name, x in inputs.items()}
    out, lse = function(**leaves)
    loss = (out * dout.to(out.dtype)).sum()
    if dlse is not None:
        finite = torch.where(lse == MINUS_INF, torch.zeros_like(lse), lse)
        loss = loss + (finite * dlse.to(lse.dtype)).sum()
    if not loss.requires_grad:
        return out.detach(), lse.detach(), {n: torch.zeros_like(x) for n, x in leaves.items()}
    grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    named = {
        name: torch.zeros_like(x) if g is None else g
        for (name, x), g in zip(leaves.items(), grads, strict=True)
    }
    return out.detach(), lse.detach(), named
