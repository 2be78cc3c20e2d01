"""What a caller asks becomes one operation: check, resolve defaults, draw dropout's state, call.

The public functions differ in how they take q, k and v; from here on they are the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.compiler import is_compiling

from flash_attn import backend
from flash_attn.api import (
    checks,
    checks_fp8,
    checks_kvcache,
    checks_latent,
    leading_zero,
    packed_names,
)
from flash_attn.api.checks_fp8 import NO_CODES, OfCodes
from flash_attn.call import (
    Backward,
    Cache,
    CodedForward,
    Descale,
    Descales,
    Forward,
    Keys,
    Lengths,
    Options,
    Scoring,
)
from flash_attn.dispatch import autograd, direct, fp8, ops, run

NO_KEYS = Keys()


def resolved(
    lengths: Lengths, q: Tensor, k: Tensor, block_table: Tensor | None, exact: bool = False
) -> Lengths:
    """With max_seqlen_q and max_seqlen_k as ints; k is packed, or pages for block_table."""
    longest_q, longest_k = lengths.max_seqlen_q, lengths.max_seqlen_k
    if type(longest_q) is not int or type(longest_k) is not int:
        keys = k.shape[0] if block_table is None else block_table.shape[-1] * k.shape[1]
        longest_q = checks.max_seqlen(longest_q, "max_seqlen_q", q.shape[0], exact)
        longest_k = checks.max_seqlen(longest_k, "max_seqlen_k", keys, exact)
        lengths = Lengths(lengths.cu_seqlens_q, lengths.cu_seqlens_k, longest_q, longest_k)
    if is_compiling():
        # While tracing, nothing is known of a number that comes out of a tensor: the program makes
        # these checks when it runs.
        torch._check(longest_q >= 0)
        torch._check(longest_k >= 0)
    return lengths


def _on_gpu(q: Tensor) -> bool:
    return q.is_cuda


def _has_to_pad(q: Tensor, v: Tensor) -> bool:
    return _on_gpu(q) and (q.shape[-1] % 8 != 0 or v.shape[-1] % 8 != 0)


def _padded(*tensors: Tensor | None) -> list[Tensor | None]:
    """Zeros up to a head_dim that is a multiple of 8: CUDA kernels move 16 bytes at a time."""
    return [None if x is None else F.pad(x, (0, -x.shape[-1] % 8)) for x in tensors]


def library_looks(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether to leave a first look at these tensors to the compiled library.

    It looks at all that it is given, and in Python the same takes 3 µs. Not where head dims differ
    or are padded: it would see what they were padded to. Not while a compiler traces.
    """
    if not direct.is_on():
        return False
    if not (type(q) in checks.PLAIN and type(k) in checks.PLAIN and type(v) in checks.PLAIN):
        return False
    try:
        d, d_k, d_v = q.shape[-1], k.shape[-1], v.shape[-1]
    except (IndexError, RuntimeError):  # a scalar, or a kind of tensor that has no shape
        return False
    return _on_gpu(q) and d == d_k and d % 8 == 0 < d and d_v % 8 == 0 < d_v


def checked(
    q: Tensor, k: Tensor, v: Tensor, options: Options, lengths: Lengths | None, keys: Keys,
    look: bool = True, take: Callable[..., None] = checks.operands,
) -> tuple[Scoring, Lengths | None]:  # fmt: skip
    """What an operation takes, of a dense call or, with lengths, of a varlen one.

    look: at the tensors that the library would look at as well.
    take: the check of q, k and v by themselves.
    """
    if lengths is None:
        if look:
            checks.dense(q, k, v, take)
        return checks.scoring(q, q.shape[0], options, look), None
    lengths = resolved(lengths, q, k, keys.block_table, exact=options.return_attn_probs)
    if look:
        checks.varlen(q, k, v, lengths, keys, take)
    return checks.scoring(q, lengths.batch, options, look), lengths


def attend(
    q: Tensor, k: Tensor, v: Tensor, options: Options, lengths: Lengths | None = None,
    block_table: Tensor | None = None, packed: Tensor | None = None, given: OfCodes = NO_CODES,
    qv: Tensor | None = None,
):  # fmt: skip
    """What the public functions return, but for those of a cache.

    packed: the kv or qkv that k and v, or all three, are slices of.
    """
    keys = NO_KEYS if block_table is None else Keys(block_table)
    if qv is not None:
        options = checks.flags(options)
        out, lse = latent(q, k, v, qv, options, lengths, keys, given=given)
        return (out, lse) if options.return_lse or options.return_softmax_lse else out
    if checks_fp8.are_codes(q):
        if packed is not None:
            raise checks_fp8.packed_codes(packed)
        return _attend_codes(q, k, v, options, lengths, keys, given)
    if is_compiling():
        return _attend(q, k, v, options, lengths, keys, given, look=True)
    look = not library_looks(q, k, v)
    try:
        return _attend(q, k, v, options, lengths, keys, given, look)
    except Exception as error:
        told = error if look else _what_is_wrong(error, _look, q, k, v, options, lengths, keys)
        if packed is not None:
            told = packed_names.renamed(told, packed)
        if told is error:
            raise
        raise told from None


def _look(
    q: Tensor, k: Tensor, v: Tensor, options: Options, lengths: Lengths | None, keys: Keys
) -> None:
    checked(q, k, v, checks.flags(options), lengths, keys)


def _what_is_wrong(error: Exception, check: Callable[..., Any], *call: Any) -> Exception:
    """The error that ``check`` has for a call, in the words of every backend; ``error`` if none."""
    try:
        check(*call)
    except Exception as told:
        return told
    return error


def _attend(
    q: Tensor, k: Tensor, v: Tensor, options: Options, lengths: Lengths | None, keys: Keys,
    given: OfCodes, look: bool,
):  # fmt: skip
    options = checks.flags(options)
    scoring, lengths = checked(q, k, v, options, lengths, keys, look)
    descales = checks_fp8.NO_DESCALES
    if given is not NO_CODES:
        batch = q.shape[0] if lengths is None else lengths.batch
        descales = checks_fp8.of_cache(given, k, v, q, batch, keys.block_table is not None)
    if backend.LOG:
        packed = {} if lengths is None else lengths._asdict()
        _log(q, k, v, options, given, block_table=keys.block_table, **packed)
        if lengths is not None and not is_compiling():
            leading_zero.log(q, k, lengths, paged=keys.block_table is not None)
    head_dim_v = None
    if look and _has_to_pad(q, v):
        head_dim_v = v.shape[-1]
        if keys.block_table is None:
            q, k, v = _padded(q, k, v)
        else:  # the pages stay as they are
            (q,) = _padded(q)
    call = Forward(
        q, k, v, scoring, lengths, keys, return_softmax=options.return_attn_probs,
        batch_invariant=options.batch_invariant, deterministic=options.deterministic,
        return_max_logits=options.return_max_logits is not False,
        max_logits_of_heads=options.return_max_logits is True, descales=descales,
        sm_margin=options.sm_margin,
    )  # fmt: skip
    coded = fp8.with_codes_of_queries(call) if given.fp8_products else None
    out, lse, score_output, _ = (
        forward(call) if coded is None else (*fp8.forward(coded), None, None)
    )
    if head_dim_v is not None:
        out = out.narrow(-1, 0, head_dim_v)
    if options.return_attn_probs:
        return out, lse, score_output
    with_lse = options.return_lse or options.return_softmax_lse
    if options.return_max_logits is not False:
        return (out, lse, score_output) if with_lse else (out, score_output)
    return (out, lse) if with_lse else out


def _attend_codes(
    q: Tensor, k: Tensor, v: Tensor, options: Options, lengths: Lengths | None, keys: Keys,
    given: OfCodes,
):  # fmt: skip
    options = checks.flags(options)
    out, lse = attend_codes(q, k, v, options, lengths, keys, given)
    return (out, lse) if options.return_lse or options.return_softmax_lse else out


def attend_codes(
    q: Tensor, k: Tensor, v: Tensor, options: Options, lengths: Lengths | None, keys: Keys,
    given: OfCodes, num_splits: int = 0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """out, softmax_lse of codes; of options with ``flags``."""
    scoring, lengths = checked(q, k, v, options, lengths, keys, take=checks_fp8.operands)
    checks_fp8.options(options, keys, (q, k, v, options.s_aux))
    batch = q.shape[0] if lengths is None else lengths.batch
    if backend.LOG:
        packed = {} if lengths is None else lengths._asdict()
        _log(q, k, v, options, given, block_table=keys.block_table, **packed)
    call = CodedForward(
        q, k, v, scoring, lengths, keys, options.batch_invariant, num_splits,
        checks_fp8.all_descales(given, q, k, v, batch), checks_fp8.fp16_out(given.out_dtype),
        given.fp8_products, options.sm_margin,
    )  # fmt: skip
    out, lse = fp8.forward(call)
    columns = v.shape[-1]
    return out if out.shape[-1] == columns else out.narrow(-1, 0, columns), lse


def latent(
    q: Tensor, k: Tensor, v: Tensor, qv: Tensor, options: Options, lengths: Lengths | None,
    keys: Keys, num_splits: int = 0, given: OfCodes = NO_CODES,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """out, softmax_lse of packed queries against latent pages; of options with ``flags``."""
    checks_latent.in_pages(keys.block_table)
    checks_latent.refuse(options.dropout_p, options.return_attn_probs, options.return_max_logits)
    checks.laid_out(q, "q", checks.VARLEN_Q)
    checks.laid_out(v, "v", checks.PAGES)
    options = checks_latent.scaled(options, q, v)
    scoring, lengths = checked(q, k, v, options, lengths, keys, take=checks_latent.operands)
    checks_latent.queries(qv, q, v, "v")
    checks_latent.refuse_gradients(q=q, k=k, v=v, qv=qv)
    if given is not NO_CODES:
        checks_fp8.of_cache(given, k, v, q, lengths.batch)
    if backend.LOG:
        packed = {**lengths._asdict(), "num_splits": num_splits}
        _log(q, k, v, options, given, block_table=keys.block_table, qv=qv, **packed)
    call = Forward(
        q, k, v, scoring, lengths, keys, batch_invariant=options.batch_invariant,
        num_splits=num_splits, qv=qv, sm_margin=options.sm_margin,
    )  # fmt: skip
    out, lse, _, _ = forward(call)
    return out, lse


def forward(call: Forward) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """The operation, recorded by autograd; a call with dropout that has no state yet gets one.

    score_output (S_dmask, or the largest logits of rows or heads) and rng_state have no elements,
    or are None, in a call without them.
    """
    q, k, v, scoring, lengths, keys, return_softmax, rng_state, *_ = call
    *in_order, s_aux = scoring
    if rng_state is None and scoring.dropout_p > 0:
        rng_state = autograd.draw_rng_state(q.device)
    # What equals its default is left out: a name costs a third of a microsecond.
    named: dict[str, Any] = {}
    if s_aux is not None:
        named["s_aux"] = s_aux
    if rng_state is not None:
        named["rng_state"] = rng_state
    if call.batch_invariant:
        named["batch_invariant"] = True
    if call.deterministic:
        named["deterministic"] = True
    if call.return_max_logits:
        named["return_max_logits"] = True
    if call.max_logits_of_heads:
        named["max_logits_of_heads"] = True
    if call.num_splits:
        named["num_splits"] = call.num_splits
    if call.descales is not checks_fp8.NO_DESCALES:
        named |= _in_use(call.descales)
    if call.qv is not None:
        named["qv"] = call.qv
    if call.sm_margin:
        named["sm_margin"] = call.sm_margin
    inputs = q, k, v, s_aux
    if lengths is None:
        return run.forward(ops.forward, inputs, (q, k, v, *in_order, return_softmax), named)
    paged = () if keys is NO_KEYS else keys
    args = (q, k, v, *lengths, *in_order, return_softmax, *paged)
    return run.forward(ops.varlen_forward, inputs, args, named)


def _in_use(descales: Descales) -> dict[str, Any]:
    """The descales as keyword arguments, without what equals its default."""
    k_descale, v_descale, k_descale_all, v_descale_all = descales
    named: dict[str, Any] = {}
    if k_descale is not None:
        named["k_descale"] = k_descale
    if v_descale is not None:
        named["v_descale"] = v_descale
    if k_descale_all != 1.0:
        named["k_descale_all"] = k_descale_all
    if v_descale_all != 1.0:
        named["v_descale_all"] = v_descale_all
    return named


def backward(call: Backward) -> Tensor:
    """The operation, unrecorded by autograd: softmax_d; it writes the gradients in call.tensors."""
    tensors, scoring, lengths, keys, deterministic, rng_state, sm_margin = call
    *in_order, dlse, ds_aux = tensors
    *scores, s_aux = scoring
    named: dict[str, Any] = {}
    if dlse is not None:
        named["dlse"] = dlse
    if s_aux is not None:
        named["s_aux"] = s_aux
    if ds_aux is not None:
        named["ds_aux"] = ds_aux
    if sm_margin:
        named["sm_margin"] = sm_margin
    if keys.seqused_k is not None:
        named["seqused_k"] = keys.seqused_k
    if lengths is None:
        args = (*in_order, *scores, deterministic, rng_state)
        return run.writing(ops.backward, *args, **named)
    args = (*in_order, *lengths, *scores, deterministic, rng_state)
    return run.writing(ops.varlen_backward, *args, **named)


def kvcache(
    q: Tensor, cache: Cache, options: Options, rotary_interleaved: bool, num_splits: Any,
    k_descale: Descale = None, v_descale: Descale = None, qv: Tensor | None = None,
):  # fmt: skip
    call = (q, cache, options, rotary_interleaved, num_splits, k_descale, v_descale, qv)
    if qv is not None or is_compiling() or not library_looks(q, cache.k_cache, cache.v_cache):
        return _kvcache(*call, look=True)
    try:
        return _kvcache(*call, look=False)
    except Exception as error:
        told = _what_is_wrong(error, _look_at_cache, q, cache, options)
        if told is error:
            raise
        raise told from None


def _look_at_cache(q: Tensor, cache: Cache, options: Options) -> None:
    checks_kvcache.kvcache(q, cache)
    checks.scoring(q, q.shape[0], checks.flags(options))


def _kvcache(
    q: Tensor, cache: Cache, options: Options, rotary_interleaved: bool, num_splits: Any,
    k_descale: Descale, v_descale: Descale, qv: Tensor | None, look: bool,
):  # fmt: skip
    options = checks.flags(options)
    if rotary_interleaved is not True and rotary_interleaved is not False:
        rotary_interleaved = checks.flag(rotary_interleaved, "rotary_interleaved")
    if qv is None:
        cache = checks_kvcache.kvcache(q, cache, look)
    else:
        cache = checks_kvcache.kvcache(q, cache, take=checks_latent.operands)
        checks_latent.queries(qv, q, cache.v_cache, "v_cache")
        asked = options.dropout_p, options.return_attn_probs, options.return_max_logits
        checks_latent.refuse(*asked)
        options = checks_latent.scaled(options, q, cache.v_cache)
    caches = cache.k_cache, cache.v_cache
    descales = checks_fp8.descales(k_descale, v_descale, *caches, q, q.shape[0])
    num_splits = checks.num_splits(num_splits)
    q, qv, cache, options = checks_kvcache.without_gradient(q, qv, cache, options)
    scoring = checks.scoring(q, q.shape[0], options, look)
    if backend.LOG:
        _log(
            q, cache.k_cache, cache.v_cache, options, block_table=cache.block_table,
            num_splits=num_splits, kvcache=True, new_keys=cache.new,
            rotary=cache.rotary_cos is not None, qv=qv,
        )  # fmt: skip
    cache = _as_kernels_read(cache, q)
    padded = look and _has_to_pad(q, cache.v_cache)
    if padded:  # what comes with the call; the cache stays as it is
        q, k, v = _padded(q, cache.k, cache.v)
        cache = cache._replace(k=k, v=v)
    _, softmax_scale, causal, left, right, softcap, slopes, s_aux = scoring
    named = {} if s_aux is None else {"s_aux": s_aux}
    if descales is not checks_fp8.NO_DESCALES:
        named |= _in_use(descales)
    if qv is not None:
        named["qv"] = qv
    if options.sm_margin:
        named["sm_margin"] = options.sm_margin
    out, lse = run.writing(
        ops.with_kvcache, q, *cache, softmax_scale, causal, left, right, softcap,
        rotary_interleaved, slopes, num_splits, **named,
    )  # fmt: skip
    if padded:
        out = out.narrow(-1, 0, cache.v_cache.shape[-1])
    return (out, lse) if options.return_lse or options.return_softmax_lse else out


def _as_kernels_read(cache: Cache, q: Tensor) -> Cache:
    """With a length for each sequence, and rotary tables of q's dtype."""
    lengths, cos, sin = cache.cache_seqlens, cache.rotary_cos, cache.rotary_sin
    if lengths is not None and not isinstance(lengths, Tensor):
        lengths = torch.full((q.shape[0],), lengths, dtype=torch.int32, device=q.device)
        cache = cache._replace(cache_seqlens=lengths)
    if cos is not None and (cos.dtype != q.dtype or sin.dtype != q.dtype):
        cache = cache._replace(rotary_cos=cos.to(q.dtype), rotary_sin=sin.to(q.dtype))
    return cache


def _log(
    q: Tensor, k: Tensor, v: Tensor, options: Options, given: OfCodes = NO_CODES, **rest
) -> None:
    if is_compiling():
        return  # a print would break the graph
    from flash_attn._explain import trace

    trace(q, k, v, **options._asdict(), **{**given._asdict(), **rest})
