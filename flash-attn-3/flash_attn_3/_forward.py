"""One forward, however its rows and keys lie: which function of ``flash_attn`` computes it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from flash_attn.api import checks, checks_fp8, checks_kvcache, checks_latent
from flash_attn.call import Cache, Keys, Lengths, Options
from flash_attn.compat.tensors import into
from flash_attn.dispatch import calls, private
from flash_attn_3 import _chunks, _contents, _names, _rows
from flash_attn_3._asked import Asked, refuse


def forward(
    asked: Asked, options: Options, is_cache: bool = False, table: str = "page_table"
) -> tuple[Tensor, Tensor]:
    """out and log-sum-exp.

    Arguments:
        options: what FlashAttention-3 has no argument for: dropout_p, alibi_slopes, deterministic,
            batch_invariant, s_aux. The others are taken from asked.
        is_cache: k and v are a cache, though perhaps nothing else says so.
        table: what the caller calls the page table.

    Returns:
        out (b, sq, h, dv), or (total_q, h, dv) with cu_seqlens_q, dtype of q; lse (b, h, sq), or
        (h, total_q), float32 (float64 for float64 inputs).

    Raises:
        NotImplementedError: what ``refuse`` names; a backward through a cache.
        TypeError, ValueError: what ``flash_attn`` raises for such tensors.
    """
    if torch.compiler.is_compiling():
        return _forward(asked, options, is_cache)
    try:
        return _forward(asked, options, is_cache)
    except (TypeError, ValueError) as error:
        told = _names.renamed(error, asked, is_cache, table)
        if told is error:
            raise
        raise told from None


def _forward(asked: Asked, options: Options, is_cache: bool) -> tuple[Tensor, Tensor]:
    if asked.qv is not None and not (is_cache or asked.has_cache):
        checks_latent.refuse_gradients(q=asked.q, k=asked.k, v=asked.v, qv=asked.qv)
    is_cache = is_cache or asked.has_cache or asked.qv is not None
    refuse(asked)
    asked = asked._replace(attention_chunk=_chunks.checked(asked.attention_chunk))
    options = options._replace(
        softmax_scale=asked.softmax_scale,
        causal=asked.causal,
        window_size=(asked.window_size_left, asked.window_size_right),
        softcap=asked.softcap,
        return_lse=True,
        sm_margin=checks.sm_margin(asked.sm_margin),
    )
    out, lse = _served(asked, options, is_cache)
    return into(asked.out, out), lse


def _served(asked: Asked, options: Options, is_cache: bool) -> tuple[Tensor, Tensor]:
    checks.tensor(asked.q, "q")
    checks.tensor(asked.k, "k_cache" if is_cache else "k")
    checks.tensor(asked.v, "v_cache" if is_cache else "v")
    if asked.seqlens_rotary is not None and asked.rotary_cos is asked.rotary_sin is None:
        raise ValueError("rotary_seqlens: got one without rotary_cos and rotary_sin")
    if asked.cu_seqlens_k is not None:
        return _packed(asked, options)
    packed = asked.cu_seqlens_q is not None
    if asked.seqused_q is not None and not (packed or is_cache):
        return _packed(asked, options)
    packed_new = asked.k_new is not None and asked.cu_seqlens_k_new is not None
    coded = is_cache and checks_fp8.are_codes(asked.q)
    one_by_one = is_cache and options.batch_invariant  # of which the operation of caches has none
    if packed or packed_new or coded or one_by_one or asked.seqused_q is not None:
        return _cache_of_rows(asked, options)
    if not is_cache:
        checks.num_splits(asked.num_splits)  # which changes nothing here
        if asked.attention_chunk:
            checks.dense(asked.q, asked.k, asked.v, _operands(asked))
            seqlen_q, seqlen_k = asked.q.shape[1], asked.k.shape[1]
            before = not options.causal and seqlen_q > seqlen_k
            if _chunks.hides_keys(asked.attention_chunk, seqlen_k, before):
                return _packed(asked, options)
        return calls.attend(asked.q, asked.k, asked.v, options, given=asked.of_codes)
    return _cache(asked, options)


def _operands(asked: Asked) -> Callable[..., None]:
    """The check of q, k and v."""
    if asked.qv is not None:
        return checks_latent.operands
    return checks_fp8.operands if checks_fp8.are_codes(asked.q) else checks.operands


def _cache(asked: Asked, options: Options) -> tuple[Tensor, Tensor]:
    """Queries and new keys of one length, beside a cache."""
    chunk = asked.attention_chunk
    if chunk:
        checks.laid_out(asked.q, "q", checks.DENSE_Q)
        several = asked.q.shape[1] > 1
        if _chunks.hides_keys(chunk, _capacity(asked), several and not options.causal):
            if several:
                return _cache_of_rows(asked, options)
            asked = asked._replace(leftpad_k=_beginning(asked, chunk))
    if asked.seqlens_rotary is not None:
        asked = _turned(asked, options)
    cache = Cache(
        asked.k, asked.v, asked.k_new, asked.v_new, asked.rotary_cos, asked.rotary_sin,
        asked.seqused_k, asked.kv_batch_idx, asked.leftpad_k, asked.page_table,
    )  # fmt: skip
    return calls.kvcache(
        asked.q, cache, options, asked.rotary_interleaved, asked.num_splits, asked.k_descale,
        asked.v_descale, asked.qv,
    )  # fmt: skip


def _capacity(asked: Asked) -> int:
    """Keys that a cache has room for, of each sequence."""
    checks.laid_out(asked.k, "k_cache", checks.CACHE if asked.page_table is None else checks.PAGES)
    return asked.k.shape[1] * (1 if asked.page_table is None else asked.page_table.shape[-1])


def _old(asked: Asked, batch: int) -> Tensor:
    """(batch,) int32: keys of each sequence before the append, -1 for one that is left out."""
    old = asked.seqused_k
    if not isinstance(old, Tensor) or old.dim() == 0:
        old = _capacity(asked) if old is None else checks.integer(old, "cache_seqlens")
        return torch.full((batch,), old, dtype=torch.int32, device=asked.q.device)
    checks.per_sequence(old, "cache_seqlens", batch, asked.q)
    _contents.cache_lengths(old)
    return old


def _beginning(asked: Asked, chunk: int) -> Tensor:
    """The left padding that hides the chunks before that of the one row of each sequence."""
    batch, new = asked.q.shape[0], 0 if asked.k_new is None else asked.k_new.shape[1]
    if asked.leftpad_k is not None:
        checks.per_sequence(asked.leftpad_k, "cache_leftpad", batch, asked.q)
    return _chunks.beginning(_old(asked, batch) + new, asked.leftpad_k, chunk)


def _flat(x: Tensor, name: str, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """x (rows, heads, head_dim) and its cu_seqlens, of a dense or of a packed tensor."""
    if cu_seqlens is not None:
        return x, cu_seqlens
    if x.dim() != 4:
        raise ValueError(
            f"{name}: got shape {tuple(x.shape)}; (batch, seqlen, heads, head_dim) is needed "
            "without cu_seqlens"
        )
    return x.flatten(0, 1), _rows.ends(x.shape[0], x.shape[1], x)


def _packed(asked: Asked, options: Options) -> tuple[Tensor, Tensor]:
    """Keys that lie one after the other, or in pages with the lengths of cu_seqlens_k."""
    for name in ("k_new", "v_new", "rotary_cos", "rotary_sin", "kv_batch_idx"):
        if getattr(asked, name) is not None:
            raise ValueError(
                f"{name}: got one with cu_seqlens_k; a cache has page_table or rows of its own, "
                "and cache_seqlens"
            )
    q, cu_q = _flat(asked.q, "q", asked.cu_seqlens_q)
    k, v, cu_k, longest_k = asked.k, asked.v, asked.cu_seqlens_k, asked.max_seqlen_k
    if cu_k is None:
        longest_k = k.shape[1] if k.dim() == 4 else None
        k, cu_k = _flat(k, "k", None)
        v, _ = _flat(v, "v", None)
    if longest_k is None:
        table = asked.page_table
        longest_k = k.shape[0] if table is None else table.shape[-1] * k.shape[1]
    lengths = Lengths(cu_q, cu_k, _longest_q(asked), longest_k)
    keys = Keys(asked.page_table, asked.leftpad_k, asked.seqused_k)
    return _of_rows(asked, q, k, v, options, lengths, keys)


def _longest_q(asked: Asked) -> int | Tensor:
    if asked.cu_seqlens_q is None:
        return asked.q.shape[1]
    return asked.q.shape[0] if asked.max_seqlen_q is None else asked.max_seqlen_q


def _cache_of_rows(asked: Asked, options: Options) -> tuple[Tensor, Tensor]:
    """Queries or new keys of different lengths, beside a cache, whose rows are pages here."""
    q, cu_q = _flat(asked.q, "q", asked.cu_seqlens_q)
    batch, k, v, pad = cu_q.shape[0] - 1, asked.k, asked.v, asked.leftpad_k
    _operands(asked)(q, k, v, checks.VARLEN_Q, checks.PAGES, "k_cache", "v_cache")
    if asked.qv is not None:
        checks_latent.queries(asked.qv, asked.q, v, "v_cache")
        checks_latent.refuse(options.dropout_p, options.return_attn_probs, False)
    table = asked.page_table
    if table is None:
        table = _rows.as_pages(k, batch, asked.kv_batch_idx)
    elif asked.kv_batch_idx is not None:
        raise ValueError("cache_batch_idx: got one with page_table; pages need none")
    checks.page_table(table, k, "k_cache", batch, q)
    used = _old(asked, batch)
    if asked.k_new is not None or asked.v_new is not None:
        q, used = _with_new_keys(asked, options, q, cu_q, table, used)
    elif asked.rotary_cos is not None or asked.rotary_sin is not None:
        raise ValueError("rotary_cos: got a table without k; rotary turns the new keys and q")
    if pad is not None:
        checks.per_sequence(pad, "cache_leftpad", batch, q)
        pad = torch.where(used > 0, pad, 0)
    q, qv, cache, options = checks_kvcache.without_gradient(q, asked.qv, Cache(k, v), options)
    longest = table.shape[1] * k.shape[1]
    if asked.max_seqlen_k is not None and asked.k_new is None:
        longest = asked.max_seqlen_k
    lengths = Lengths(cu_q, cu_q, _longest_q(asked), longest)
    keys = Keys(table, pad, used.clamp(min=0))
    asked = asked._replace(qv=qv)
    return _of_rows(asked, q, cache.k_cache, cache.v_cache, options, lengths, keys)


def _with_new_keys(
    asked: Asked, options: Options, q: Tensor, cu_q: Tensor, table: Tensor, old: Tensor
) -> tuple[Tensor, Tensor]:
    """Appends them; returns q, turned if they are, and how many keys there are now."""
    k_new, v_new, cos, sin = asked.k_new, asked.v_new, asked.rotary_cos, asked.rotary_sin
    if k_new is None or v_new is None:
        raise ValueError("k, v: got one of them; they are appended together or not at all")
    if asked.seqused_k is None:
        raise ValueError("cache_seqlens: got None; with new keys it says where they go")
    k_new, cu_new = _flat(k_new, "k", asked.cu_seqlens_k_new)
    v_new, _ = _flat(v_new, "v", asked.cu_seqlens_k_new)
    checks._int32(cu_new, "cu_seqlens_k_new", q)
    if cu_new.shape != cu_q.shape:
        raise checks.bad_shape(cu_new, "cu_seqlens_k_new", f"(batch + 1,) = {tuple(cu_q.shape)}")
    for name, x, cache in (("k", k_new, asked.k), ("v", v_new, asked.v)):
        checks.like_q(x, name, q, torch.compiler.is_compiling())
        if x.dim() != 3 or x.shape[1:] != cache.shape[2:] or x.shape[0] != k_new.shape[0]:
            heads, head_dim = cache.shape[2:]
            raise checks.bad_shape(x, name, f"(total_new, {heads}, {head_dim})")
        checks_kvcache._no_overlap(cache, name)
    cache = Cache(asked.k, asked.v, k_new, v_new, cos, sin)
    q, _, cache, _ = checks_kvcache.without_gradient(q, None, cache, options)
    k_new, v_new = cache.k, cache.v
    given = (asked.k_descale, asked.v_descale)
    descales = checks_fp8.descales(*given, asked.k, asked.v, q, old.shape[0])
    if cos is not None or sin is not None:
        needed = 0 if asked.seqlens_rotary is not None else table.shape[1] * asked.k.shape[1]
        checks_kvcache._rotary(q, cache, needed, look=True)
        asked = asked._replace(rotary_cos=cache.rotary_cos, rotary_sin=cache.rotary_sin)
        q, k_new = _turned_rows(asked, options, (q, cu_q), (k_new, cu_new), old)
    with torch.no_grad():
        caches, new = (cache.k_cache, cache.v_cache), (k_new, v_new)
        _rows.append(caches, new, cu_new, old, table, descales)
    return q, torch.where(old < 0, 0, old + cu_new.diff())


def _turned(asked: Asked, options: Options) -> Asked:
    """q and the new keys, of one length, turned at positions of their own before the call."""
    if asked.k_new is not None:
        checks.laid_out(asked.k_new, "k", checks.DENSE_KV)
    cache = Cache(asked.k, asked.v, asked.k_new, asked.v_new, asked.rotary_cos, asked.rotary_sin)
    checks_kvcache._rotary(asked.q, cache, 0, look=True)
    rows = (_flat(x, name, None) for x, name in ((asked.q, "q"), (asked.k_new, "k")))
    q, k_new = _turned_rows(asked, options, *rows, _old(asked, asked.q.shape[0]))
    return asked._replace(
        q=q.view(asked.q.shape), k_new=k_new.view(asked.k_new.shape), rotary_cos=None,
        rotary_sin=None,
    )  # fmt: skip


def _turned_rows(
    asked: Asked, options: Options, q: tuple[Tensor, Tensor], k: tuple[Tensor, Tensor], old: Tensor
) -> tuple[Tensor, Tensor]:
    """Rows and their cu_seqlens; where masks do not depend on positions, all of q are at one."""
    start = old
    if asked.seqlens_rotary is not None:
        start = asked.seqlens_rotary
        checks.per_sequence(start, "rotary_seqlens", old.shape[0], q[0])
        _contents.first_positions(start, old)
        start = torch.where(old < 0, old, start)
    turn = (start, asked.rotary_cos, asked.rotary_sin, asked.rotary_interleaved)
    left, right = options.window_size
    together = not (options.causal or left >= 0 or right >= 0)
    return _rows.turned(*q, *turn, together), _rows.turned(*k, *turn)


def _of_rows(
    asked: Asked, q: Tensor, k: Tensor, v: Tensor, options: Options, lengths: Lengths, keys: Keys
) -> tuple[Tensor, Tensor]:
    num_splits = checks.num_splits(asked.num_splits)
    sequences, given, coded = lengths.batch, asked.of_codes, checks_fp8.are_codes(q)
    if coded:
        checks_fp8.all_descales(given, q, k, v, sequences)
    else:
        checks_fp8.of_cache(given, k, v, q, sequences)
    shape = asked.q.shape[:2] if asked.cu_seqlens_q is None else None
    dense = shape is not None and asked.cu_seqlens_k is keys.block_table is None
    lengths, keys, options = _chunks.as_sequences(
        q, k, v, lengths, keys, options, asked.seqused_q, asked.attention_chunk,
        aligned=dense and shape[1] <= asked.k.shape[1], take=_operands(asked),
    )  # fmt: skip
    if asked.qv is not None:
        qv, _ = _flat(asked.qv, "qv", asked.cu_seqlens_q)
        out, lse = calls.latent(q, k, v, qv, checks.flags(options), lengths, keys, num_splits)
    elif dense and not coded and all(x is None for x in keys):  # which pads head dims as well
        out, lse = calls.attend(q, k, v, options, lengths)
    else:
        parts = lengths.batch // max(sequences, 1)
        descales = (_rows.of_parts(x, parts) for x in given[:3])
        given = checks_fp8.given_of(*descales, *given[3:])
        out, lse, _, _ = private.forward(q, k, v, options, lengths, keys, num_splits, given=given)
    if shape is not None:
        out, lse = out.unflatten(0, shape), lse.unflatten(1, shape).transpose(0, 1).contiguous()
    return out, lse
