"""What a call may look like: every check that needs no tensor's contents, with its message.

The checks read shapes, strides, dtypes and devices only, so they also hold for fake tensors and
disappear into guards under ``torch.compile``. Messages name the argument, say what it got, and
what is accepted. Checks of contents (``cu_seqlens`` that decrease, a cache that overflows) need
the data: ``flash_attn.cpu`` makes them, and on a GPU, where looking is waiting, only
``FLASH_ATTN_CHECK=1`` does (``dispatch/content_checks.py``).

ValueError: a wrong shape, dtype, device, stride or number. TypeError: not a tensor at all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn import Parameter

from flash_attn import backend
from flash_attn.api.checks_scalars import (  # noqa: F401  all checks by one name
    LARGEST,
    finite,
    flag,
    flags,
    integer,
    max_logits,
    max_seqlen,
    num_splits,
    number,
    sm_margin,
    window,
    window_as_it_is,
)
from flash_attn.call import FP8, Gradients, Keys, Lengths, Options, Scoring, accumulation_dtype

MAX_HEAD_DIM = 512
MAX_HEAD_DIM_OF_CODES = 256  # of a cache in float8, on a GPU; the CPU backend takes all
LATENT_HEAD_DIMS = 64, 512  # the largest of q and k, and of v and qv, where there is a qv
MAX_DROPOUT_P = 1 - 2**-16  # sixteen random bits decide, and at least one value must be kept
_GPU_DTYPES = (torch.float16, torch.bfloat16)
_DTYPES = (*_GPU_DTYPES, torch.float32, torch.float64)
PLAIN = (Tensor, Parameter)  # and no class derived from them
_STRIDED, _INT32 = torch.strided, torch.int32


def tensor(x: Any, name: str) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: got {type(x).__name__}; a torch.Tensor is needed")


def bad_shape(x: Tensor, name: str, expected: str) -> ValueError:
    return ValueError(f"{name}: got shape {tuple(x.shape)}; {expected} is needed")


def laid_out(x: Tensor, name: str, layout: Layout) -> None:
    tensor(x, name)
    if x.layout is not _STRIDED or x.is_nested:
        raise _not_dense(x, name)
    if x.dim() != layout.rank:
        raise bad_shape(x, name, layout.text)


def _not_dense(x: Tensor, name: str) -> ValueError:
    if not x.is_nested:
        return ValueError(f"{name}: got layout {x.layout}; a dense tensor is needed")
    return ValueError(
        f"{name}: got a nested tensor; a dense one is needed: flash_attn_varlen_func takes "
        "sequences of different lengths, of a jagged tensor its values() and, as cu_seqlens, "
        "its offsets().int()"
    )


def like_q(x: Tensor, name: str, q: Tensor, traced: bool) -> None:
    """dtype and device of q, contiguous rows, an address that can be loaded from."""
    if x.dtype is not q.dtype:
        raise ValueError(f"{name}: got dtype {x.dtype}; it must be that of q, {q.dtype}")
    on_device_of(x, name, q)
    rows(x, name, traced)


def on_device_of(x: Tensor, name: str, q: Tensor) -> None:
    if x.device != q.device:
        raise ValueError(f"{name}: got device {x.device}; it must be that of q, {q.device}")


def unpadded(*tensors: Tensor) -> None:
    """Raises where a kernel on CUDA would need a head_dim that is padded."""
    for x in tensors:
        if x.is_cuda and x.shape[-1] % 8:
            raise ValueError(
                f"got head_dim {x.shape[-1]} (shape {tuple(x.shape)}); on CUDA the private "
                "functions take multiples of 8, the public ones pad"
            )


def without_gradients(what: str, **tensors: Tensor | None) -> None:
    """Raises where a call that has no gradient is asked for one. what: the message's subject."""
    for name, x in tensors.items():
        if isinstance(x, Tensor) and x.requires_grad and torch.is_grad_enabled():
            raise RuntimeError(
                f"{name}: requires_grad is set; {what} has no gradient: call it under "
                "torch.no_grad(), or with tensors that are detached"
            )


def unit_stride(x: Tensor, name: str) -> None:
    if x.stride()[-1] != 1 and x.shape[-1] > 1:
        raise ValueError(
            f"{name}: got strides {x.stride()}; the last one must be 1 (call .contiguous())"
        )


def known_device(q: Tensor, traced: bool) -> None:
    if q.is_cuda:
        if not traced and type(q) in PLAIN:
            backend.check_gpu(q.device)
    elif not (q.is_cpu or q.is_meta):
        raise ValueError(f"q: got device {q.device}; accepted are cpu and cuda")


def _dtype(q: Tensor) -> None:
    accepted = _GPU_DTYPES if q.is_cuda else _DTYPES
    if q.dtype not in accepted:
        names = ", ".join(str(dtype) for dtype in accepted)
        more = f", beside a KV cache of {FP8} too" if q.dtype is FP8 else ""
        raise ValueError(f"q: got dtype {q.dtype}; accepted on {q.device.type} are {names}{more}")


def rows(x: Tensor, name: str, traced: bool) -> None:
    """Checks that rows have no gaps and addresses are aligned: a GPU loads 16 bytes at a time.

    Head dims that are no multiple of 8 are padded into new tensors before a kernel sees them.
    """
    is_contiguous = not traced and x.is_contiguous()
    if not is_contiguous:
        unit_stride(x, name)
    if traced or type(x) not in PLAIN:  # the address is not known yet
        return
    try:
        address = x.data_ptr()
    except RuntimeError:  # wrapped by a transform of torch.func
        return
    if address % 16:
        _aligned(x, name, address)
    if not is_contiguous and x.is_cuda and x.shape[-1] % 8 == 0:
        _aligned_strides(x, name)


def _aligned(x: Tensor, name: str, address: int) -> None:
    size = x.itemsize
    if not x.is_cuda:
        if address % size:
            raise ValueError(f"{name}: got address {address:#x}; a multiple of {size} is needed")
    elif x.shape[-1] % 8 == 0:
        raise ValueError(
            f"{name}: got address {address:#x}; on CUDA a multiple of 16 bytes is needed "
            "(call .clone())"
        )


def _aligned_strides(x: Tensor, name: str) -> None:
    size = x.itemsize
    for length, stride in zip(x.shape[:-1], x.stride()):
        if length > 1 and stride * size % 16:
            raise ValueError(
                f"{name}: got strides {x.stride()} of {size}-byte elements; on CUDA every row must "
                "start at a multiple of 16 bytes (call .contiguous())"
            )


class Layout(NamedTuple):
    """The dimensions of a tensor, as a message names them, and how many they are; of a cache,
    whose tensors may hold codes."""

    text: str
    rank: int
    cached: bool = False


DENSE_Q = Layout("(batch, seqlen_q, heads, head_dim)", 4)
DENSE_KV = Layout("(batch, seqlen_k, heads_k, head_dim)", 4)
VARLEN_Q = Layout("(total_q, heads, head_dim)", 3)
VARLEN_KV = Layout("(total_k, heads_k, head_dim) or pages with block_table", 3)
CACHE = Layout("(batch_cache, seqlen_cache, heads_k, head_dim)", 4, cached=True)
PAGES = Layout("(num_blocks, page_size, heads_k, head_dim) with block_table", 4, cached=True)


def operands(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_layout: Layout,
    kv_layout: Layout,
    k_name: str = "k",
    v_name: str = "v",
    latent: bool = False,
) -> None:
    """The three tensors every call has; the layouts are those above. latent: a qv comes too."""
    laid_out(q, "q", q_layout)
    laid_out(k, k_name, kv_layout)
    laid_out(v, v_name, kv_layout)
    traced = is_compiling()
    known_device(q, traced)
    _dtype(q)
    rows(q, "q", traced)
    if k.dtype is FP8 or v.dtype is FP8:
        codes(k, k_name, v_name, q, traced, kv_layout)
        codes(v, v_name, k_name, q, traced, kv_layout)
    else:
        like_q(k, k_name, q, traced)
        like_q(v, v_name, q, traced)
    fitting(q, k, v, k_name, v_name, latent)


def fitting(
    q: Tensor, k: Tensor, v: Tensor, k_name: str, v_name: str, latent: bool = False
) -> None:
    """Checks what the shapes of every layout have: heads and head dims."""
    q_shape, k_shape, v_shape = q.shape, k.shape, v.shape
    if k_shape != v_shape and k_shape[:-1] != v_shape[:-1]:
        raise bad_shape(v, v_name, f"that of {k_name}, {tuple(k_shape)}, up to head_dim,")
    heads, heads_k = q_shape[-2], k_shape[-2]
    if heads < 1 and heads_k < 1:
        raise ValueError(f"q: got 0 heads (shape {tuple(q_shape)}); 1 or more are needed")
    if heads_k < 1 or heads % heads_k:
        raise ValueError(
            f"{k_name}: got {heads_k} heads; a divisor of the {heads} heads of q is needed"
        )
    if q_shape[-1] != k_shape[-1]:
        raise ValueError(
            f"{k_name}: got head_dim {k_shape[-1]} (shape {tuple(k_shape)}); it must be that of q, "
            f"{q_shape[-1]}"
        )
    most_k, most_v = LATENT_HEAD_DIMS if latent else (MAX_HEAD_DIM, MAX_HEAD_DIM)
    _head_dim(q_shape[-1], "q", 0 if latent else 1, most_k)
    _head_dim(v_shape[-1], v_name, 1, most_v)


def codes(x: Tensor, name: str, other: str, q: Tensor, traced: bool, layout: Layout) -> None:
    """Checks one of a cache's two tensors, where one or both hold codes; ``other``: the second."""
    if not layout.cached:
        raise ValueError(
            f"{name if x.dtype is FP8 else other}: got dtype {FP8}; it must be that of q, "
            f"{q.dtype}: codes are read from a KV cache, by flash_attn_with_kvcache or by "
            "flash_attn_varlen_func with block_table"
        )
    if x.dtype is not FP8:
        raise ValueError(f"{name}: got dtype {x.dtype}; it must be that of {other}, {FP8}")
    on_device_of(x, name, q)
    unit_stride(x, name)  # rows of codes may begin anywhere, and have any length


def _head_dim(head_dim: int, name: str, least: int, most: int) -> None:
    if not least <= head_dim <= most:
        raise ValueError(f"{name}: got head_dim {head_dim}; accepted are {least} to {most}")


def dense(q: Tensor, k: Tensor, v: Tensor, take: Callable[..., None] = operands) -> None:
    """q (b, sq, h, d), k and v (b, sk, hk, d). take: the check of the three by themselves."""
    take(q, k, v, DENSE_Q, DENSE_KV)
    if k.shape[0] != q.shape[0]:
        raise ValueError(f"k: got batch {k.shape[0]}; it must be that of q, {q.shape[0]}")


def qkv_packed(x: Tensor, name: str, n: int, rank: int) -> None:
    """A tensor (…, n, heads, head_dim) that holds q, k, v or k, v; rank counts all dimensions."""
    tensor(x, name)
    if x.layout is not _STRIDED or x.is_nested:
        raise _not_dense(x, name)
    if x.dim() != rank or x.shape[-3] != n:
        leading = "batch, seqlen" if rank == 5 else "total"
        raise bad_shape(x, name, f"({leading}, {n}, heads, head_dim)")


def varlen(
    q: Tensor, k: Tensor, v: Tensor, lengths: Lengths, keys: Keys,
    take: Callable[..., None] = operands,
) -> None:  # fmt: skip
    """q (total_q, h, d), k and v (total_k, hk, d) or pages (num_blocks, page_size, hk, d)."""
    take(q, k, v, VARLEN_Q, VARLEN_KV if keys.block_table is None else PAGES)
    cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k = lengths
    _int32(cu_seqlens_q, "cu_seqlens_q", q)
    _int32(cu_seqlens_k, "cu_seqlens_k", q)
    if cu_seqlens_q.dim() != 1 or cu_seqlens_q.shape[0] < 1:
        raise bad_shape(cu_seqlens_q, "cu_seqlens_q", "(batch + 1,)")
    if cu_seqlens_k.shape != cu_seqlens_q.shape:
        expected = f"that of cu_seqlens_q, {tuple(cu_seqlens_q.shape)},"
        raise bad_shape(cu_seqlens_k, "cu_seqlens_k", expected)
    _not_negative(max_seqlen_q, "max_seqlen_q")
    _not_negative(max_seqlen_k, "max_seqlen_k")
    if keys.block_table is not None:
        page_table(keys.block_table, k, "k", lengths.batch, q)
    if keys.seqused_k is not None:
        per_sequence(keys.seqused_k, "seqused_k", lengths.batch, q)
    if keys.leftpad_k is not None:
        per_sequence(keys.leftpad_k, "leftpad_k", lengths.batch, q)


def _not_negative(longest: int, name: str) -> None:
    if integer(longest, name) < 0:
        raise ValueError(f"{name}: got {longest}; 0 or more is needed")


def _int32(x: Tensor, name: str, q: Tensor) -> None:
    tensor(x, name)
    if x.dtype is not _INT32:
        hint = "" if x.is_floating_point() else " (call .int())"
        raise ValueError(f"{name}: got dtype {x.dtype}; torch.int32 is needed{hint}")
    on_device_of(x, name, q)
    if x.dim() > 0:
        unit_stride(x, name)


def per_sequence(x: Tensor, name: str, batch: int, q: Tensor) -> None:
    _int32(x, name, q)
    if x.dim() != 1 or x.shape[0] != batch:
        raise bad_shape(x, name, f"(batch,) = ({batch},)")


def page_table(block_table: Tensor, pages: Tensor, name: str, batch: int, q: Tensor) -> None:
    _int32(block_table, "block_table", q)
    if block_table.dim() != 2 or block_table.shape[0] != batch:
        raise bad_shape(block_table, "block_table", f"(batch, max_blocks) = ({batch}, max_blocks)")
    if pages.shape[1] < 1:
        raise bad_shape(pages, name, "a page_size of 1 or more")


def scoring(q: Tensor, batch: int, options: Options, look: bool = True) -> Scoring:
    """What happens to the scores of q (…, h, d), with defaults resolved; of options with ``flags``.

    look: at integers, too, which the library refuses where they need more than 64 bits.
    """
    scale, softcap, dropout_p = options.softmax_scale, options.softcap, options.dropout_p
    slopes, s_aux = options.alibi_slopes, options.s_aux
    if scale is None:
        scale = q.shape[-1] ** -0.5
    else:
        finite(scale, "softmax_scale")
    number(dropout_p, "dropout_p")
    number(softcap, "softcap")
    if not 0.0 <= dropout_p <= MAX_DROPOUT_P:
        raise ValueError(f"dropout_p: got {dropout_p}; 0 <= dropout_p <= 1 - 2**-16 is needed")
    if not 0.0 <= softcap <= LARGEST:
        raise ValueError(f"softcap: got {softcap}; 0 (off) or a positive number is needed")
    left, right = (window if look else window_as_it_is)(options.window_size)
    if slopes is not None:
        _alibi(slopes, batch, q.shape[-2], q)
    if s_aux is not None:
        s_aux = _sinks(s_aux, q)
    return Scoring(
        dropout_p=dropout_p, softmax_scale=scale, causal=options.causal, window_size_left=left,
        window_size_right=right, softcap=softcap, alibi_slopes=slopes, s_aux=s_aux,
    )  # fmt: skip


def _sinks(s_aux: Tensor, q: Tensor) -> Tensor:
    """s_aux as kernels read it."""
    tensor(s_aux, "s_aux")
    heads = q.shape[-2]
    if s_aux.dim() != 1 or s_aux.shape[0] != heads:
        raise bad_shape(s_aux, "s_aux", f"(heads,) = ({heads},)")
    if s_aux.dtype not in _DTYPES:
        raise ValueError(f"s_aux: got dtype {s_aux.dtype}; a floating dtype is needed")
    on_device_of(s_aux, "s_aux", q)
    return s_aux.to(accumulation_dtype(q.dtype)).contiguous()


def _alibi(alibi_slopes: Tensor, batch: int, heads: int, q: Tensor) -> None:
    tensor(alibi_slopes, "alibi_slopes")
    if alibi_slopes.dtype != torch.float32:
        raise ValueError(f"alibi_slopes: got dtype {alibi_slopes.dtype}; torch.float32 is needed")
    on_device_of(alibi_slopes, "alibi_slopes", q)
    shape = tuple(alibi_slopes.shape)
    if shape not in ((heads,), (batch, heads)):
        expected = f"(heads,) = ({heads},) or (batch, heads) = ({batch}, {heads})"
        raise bad_shape(alibi_slopes, "alibi_slopes", expected)
    if alibi_slopes.requires_grad and torch.is_grad_enabled():
        raise RuntimeError("alibi_slopes: requires_grad is set; slopes get no gradient")


def backward(tensors: Gradients, s_aux: Tensor | None) -> None:
    """What a backward takes beside q, k and v."""
    dout, q, k, v, out, lse, dq, dk, dv, dlse, ds_aux = tensors
    out_shape = (*q.shape[:-1], v.shape[-1])
    for name, x in (("dout", dout), ("out", out)):
        tensor(x, name)
        if tuple(x.shape) != out_shape:
            raise bad_shape(x, name, f"{out_shape}")
        if x.dtype != q.dtype:
            raise ValueError(f"{name}: got dtype {x.dtype}; it must be that of q, {q.dtype}")
        on_device_of(x, name, q)
    *batch, seqlen_q, heads, _ = q.shape
    lse_shape = (*batch, heads, seqlen_q)
    _accumulated(lse, "softmax_lse", lse_shape, q)
    if dlse is not None:
        _accumulated(dlse, "dlse", lse_shape, q)
    if ds_aux is not None:
        if s_aux is None:
            raise ValueError("ds_aux: got one without s_aux; it is the gradient of s_aux")
        _accumulated(ds_aux, "ds_aux", (heads,), q)
    for name, x, like in (("dq", dq, q), ("dk", dk, k), ("dv", dv, v)):
        if x is None:
            continue
        tensor(x, name)
        if x.shape != like.shape:
            raise bad_shape(x, name, f"that of {name[1:]}, {tuple(like.shape)},")
        like_q(x, name, q, is_compiling())


def _accumulated(x: Tensor, name: str, shape: tuple[int, ...], q: Tensor) -> None:
    """A tensor in the type in which the results for q are summed."""
    tensor(x, name)
    if tuple(x.shape) != shape:
        raise bad_shape(x, name, f"{shape}")
    dtype = accumulation_dtype(q.dtype)
    if x.dtype != dtype:
        raise ValueError(f"{name}: got dtype {x.dtype}; {dtype} is needed for q of {q.dtype}")
    on_device_of(x, name, q)


def rng_state(x: Tensor | None, q: Tensor, batch: int) -> None:
    """The state of a forward with dropout, as its backward needs it.

    It is [seed, offset]. If the call is a part of a larger one, three numbers for each sequence
    follow, which say where it begins in the whole: batch * heads + head of its first head, and its
    first query and key, which are multiples of 16.
    """
    if x is None:
        raise ValueError("rng_state: got None; with dropout the backward needs that of the forward")
    tensor(x, "rng_state")
    if x.dtype != torch.int64 or tuple(x.shape) not in ((2,), (2 + 3 * batch,)):
        raise ValueError(
            f"rng_state: got {x.dtype} of shape {tuple(x.shape)}; torch.int64 of shape (2,) is "
            f"needed, as the forward returns it, or ({2 + 3 * batch},) of a part of a larger call"
        )
    on_device_of(x, "rng_state", q)
