"""``flash_attn.explain(...)``: what a call would run on, and why nothing else; runs nothing."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flash_attn import _gpus, backend
from flash_attn._explanation import Explanation
from flash_attn.api import checks, checks_fp8, checks_latent
from flash_attn.call import FP8, Descale, MaxLogits, Window

_DTYPE_NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16"}
_UNCOUNTED = 2**30  # what kernels count to, and the width of a window that is none


@dataclass(frozen=True)
class _Problem:
    """A call, reduced to what decides which code serves it."""

    operation: str
    q: Tensor
    k: Tensor
    v: Tensor
    causal: bool
    window_size: tuple[int, int]
    extras: tuple[str, ...]  # the names of the options that are in use
    batch: int
    longest_q: int  # queries that a sequence can have
    capacity: int  # keys that a sequence can have
    cached: bool
    num_splits: int
    batch_invariant: bool
    softcap: float
    deterministic: bool
    left_padded: bool  # the keys of a cache
    used_k: bool  # a tensor says how many keys are in use
    codes: int  # 1: a cache holds codes of 8 bits; 2: with descales of rows
    latent: bool  # a cache of latent rows, with a qv
    notes: tuple[str, ...] = ()  # of what the call does beside attention
    gpu: str | None = None  # the name of one to ask about in place of q's device

    @property
    def packed(self) -> bool:
        return "varlen" in self.operation

    @property
    def backward(self) -> bool:
        return self.operation.endswith("backward")

    @property
    def page_size(self) -> int:
        """0: keys are not in pages. 1 also where Hopper's boxes of more rows do not suit them: with
        left padding, or strides by which rows cannot be numbered."""
        if "paged" not in self.extras:
            return 0
        boxes = not self.left_padded and self.numbered
        return self.k.shape[1] if boxes else 1

    @property
    def numbered(self) -> bool:
        """Whether the rows of all batch entries, or pages, of k and v can be numbered."""

        def of(x: Tensor) -> bool:
            entry, row = x.stride()[:2]
            if x.shape[0] <= 1 or entry == 0:
                return True
            whole = row > 0 and entry % row == 0
            return whole and (x.shape[0] - 1) * (entry // row) + x.shape[1] < 2**31

        return of(self.k) and of(self.v)

    @property
    def odd_rows(self) -> bool:
        """Whether a cache has odd rows. Decode reads such a cache as it is."""
        in_cache = self.cached or "paged" in self.extras
        if self.codes:
            return self.multiple < 16
        return in_cache and bool(self.k.shape[-1] % 8 or self.v.shape[-1] % 8)

    @property
    def contents(self) -> int:
        """Of a cache, as the library's functions count them."""
        return 3 if self.latent else self.codes

    @property
    def multiple(self) -> int:
        """Bytes of which all rows of the cache are multiples; odd ones are read by up to 8."""
        tensors = (self.k, self.v)
        apart = [s for x in tensors for n, s in zip(x.shape[:-1], x.stride()) if n > 1]
        elements = math.gcd(*(x.shape[-1] for x in tensors), *apart)
        return (elements & -elements) * self.k.itemsize

    @property
    def counted(self) -> bool:
        """Whether kernels can count what there is."""
        counts = (self.batch, self.longest_q, self.capacity, *self.q.shape, *self.k.shape)
        return all(0 <= n < _UNCOUNTED for n in counts)

    @property
    def needs_full_scores(self) -> bool:
        # Sinks join a row when it is finished, at either score level; the library knows which
        # plain kernels keep largest logits.
        return bool(set(self.extras) - {"paged", "attn_probs", "sinks", "max_logits"})

    def __str__(self) -> str:
        q, k, v = self.q, self.k, self.v
        parts = [
            f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}",
            f"{str(q.dtype).removeprefix('torch.')} on {self.gpu or q.device}",
        ]
        if self.causal:
            parts.append("causal")
        left, right = self.window_size
        if left >= 0 or right >= 0:
            parts.append(f"window ({left}, {right})")
        return ", ".join([*parts, *self.extras, *self.notes])


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    s_aux: Tensor | None = None,
    batch_invariant: bool = False,
    return_lse: bool = False,
    return_softmax_lse: bool = False,
    return_max_logits: MaxLogits = False,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | Tensor | None = None,
    max_seqlen_k: int | Tensor | None = None,
    block_table: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    num_splits: int = 0,
    kvcache: bool = False,
    new_keys: int = 0,
    rotary: bool = False,
    backward: bool = False,
    gpu: str | None = None,
    k_descale: Descale = None,
    v_descale: Descale = None,
    q_descale: Descale = None,
    out_dtype: torch.dtype | None = None,
    fp8_products: bool = False,
    qv: Tensor | None = None,
) -> Explanation:
    """Says which backend, kernel, tile and splits a call would use, and why.

    Nothing is computed; fake and meta tensors do as well as real ones, and neither a GPU nor the
    compiled library is needed (but for ``gpu``, the library). ``print`` the result.

    Arguments:
        q, k, v: as in ``flash_attn_func``. With cu_seqlens_q, those of
            ``flash_attn_varlen_func``; with kvcache=True or cache_seqlens, the q, k_cache and
            v_cache of ``flash_attn_with_kvcache``.
        kvcache: the call is ``flash_attn_with_kvcache``; new_keys is how many it appends to each
            sequence, and rotary whether it rotates them. :func:`explain_call` takes the tensors.
        backward: explain the backward of the call in place of its forward.
        gpu: the GPU to ask about, whatever q's device: "H200", "H100", "A100", "L40S", "RTX 4090",
            "RTX 5090" or "GB10". None: that of q, or the CPU.

    The others are those of the call.

    Raises:
        TypeError, ValueError: what the call itself would raise for q, k and v; another ``gpu``.
        NotImplementedError: q in float8_e4m3fn.
    """
    _gpus.check(gpu)
    if qv is not None:
        if not (kvcache or cache_seqlens is not None):
            checks_latent.in_pages(block_table)
        checks_latent.refuse(dropout_p, return_attn_probs, return_max_logits)
    given = checks_fp8.given_of(q_descale, k_descale, v_descale, out_dtype, fp8_products)
    if checks_fp8.are_codes(q):
        raise NotImplementedError(f"q: got {FP8}; explain knows of codes in a KV cache alone")
    in_use = {
        "dropout": dropout_p > 0,
        "softcap": softcap != 0,
        "alibi": alibi_slopes is not None,
        "sinks": s_aux is not None,
        "attn_probs": return_attn_probs,
        "max_logits": return_max_logits is not False,
        "paged": block_table is not None,
        "scale <= 0": softmax_scale is not None and softmax_scale <= 0,
    }
    cached = bool(kvcache) or cache_seqlens is not None
    new_keys = checks.integer(new_keys, "new_keys")
    operation = _check(q, k, v, qv, cu_seqlens_q, block_table, cached)
    batch = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
    checks_fp8.of_cache(given, k, v, q, batch)
    codes = int(k.dtype is FP8)
    notes = ("cache of float8_e4m3fn",) * codes
    if any(isinstance(x, Tensor) and x.ndim == 3 for x in (k_descale, v_descale)):
        codes, notes = 2, (*notes, "descales of rows")
    notes += ("latent cache",) * (qv is not None)
    problem = _Problem(
        operation=operation.replace("forward", "backward") if backward else operation,
        q=q, k=k, v=v, causal=causal, window_size=checks.window(window_size),
        extras=tuple(name for name, used in in_use.items() if used),
        batch=batch,
        longest_q=_length(q, cu_seqlens_q, max_seqlen_q),
        capacity=_capacity(k, cu_seqlens_q, max_seqlen_k, block_table),
        cached=cached,
        num_splits=checks.num_splits(num_splits),
        batch_invariant=bool(batch_invariant),
        softcap=softcap,
        deterministic=bool(deterministic),
        left_padded=cache_leftpad is not None,
        used_k=cache_seqlens is not None or cache_leftpad is not None or block_table is not None,
        codes=codes,
        latent=qv is not None,
        notes=notes + (f"append {new_keys}",) * bool(new_keys) + ("rotary",) * rotary,
        gpu=gpu,
    )  # fmt: skip
    if backward and (cached or block_table is not None):
        return _none(problem, "there is no backward of a cache or of pages")
    return _on_gpu(problem) if gpu or q.device.type == "cuda" else _on_cpu(problem)


def _length(x: Tensor, cu_seqlens: Tensor | None, longest: int | Tensor | None) -> int:
    """What a call takes for the longest sequence of (batch, seqlen, …), or of a packed x."""
    if cu_seqlens is None:
        return x.shape[1]
    known = longest is not None and not isinstance(longest, Tensor)
    return checks.integer(longest, "max_seqlen") if known else x.shape[0]


def _capacity(k: Tensor, cu_seqlens_q, max_seqlen_k, block_table: Tensor | None) -> int:
    if block_table is not None:
        return k.shape[1] * block_table.shape[1]
    return _length(k, cu_seqlens_q, max_seqlen_k)


def _check(q, k, v, qv, cu_seqlens_q, block_table, kvcache: bool) -> str:
    """The name of the operation; q, k and v have been checked as it would."""
    if cu_seqlens_q is None and not kvcache and qv is None:
        checks.dense(q, k, v)
        return "_flash_attn_forward"
    q_layout, kv_layout = (
        (checks.DENSE_Q, checks.CACHE) if kvcache else (checks.VARLEN_Q, checks.VARLEN_KV)
    )
    take = checks.operands if qv is None else checks_latent.operands
    take(q, k, v, q_layout, kv_layout if block_table is None else checks.PAGES)
    if qv is not None:
        checks_latent.queries(qv, q, v, "v_cache" if kvcache else "v")
    return "_flash_attn_with_kvcache" if kvcache else "_flash_attn_varlen_forward"


def _on_cpu(problem: _Problem) -> Explanation:
    slow: tuple[str, ...] = ()
    by_torch = "torch's own CPU flash attention"
    tiled = "tiled online softmax on torch operations"
    obstacles = _obstacles_to_torch(problem)
    if obstacles:
        kernel, why = tiled, f"the CPU backend serves every option; {by_torch} does not"
        rejected = [(by_torch, f"has no {obstacle}") for obstacle in obstacles]
        slow = (f"torch's kernel, several times as fast, has no {' and no '.join(obstacles)}",)
    else:
        kernel, why = by_torch, "it expresses the call exactly, block of rows by block of rows"
        if "paged" in problem.extras:
            why += "; sequences with an absent page run the tiled path"
        rejected = [(tiled, "is slower")]
    rejected.append(("CUDA kernels", f"q is on {problem.q.device}"))
    return Explanation(
        problem.operation, str(problem), backend="cpu", why=why, kernel=kernel,
        rejected=tuple(rejected), slow=slow + _whole_matrix(problem),
    )  # fmt: skip


def _whole_matrix(problem: _Problem) -> tuple[str, ...]:
    asked = "attn_probs" in problem.extras and not problem.backward
    return ("return_attn_probs forms the whole matrix",) * asked


def _obstacles_to_torch(problem: _Problem) -> list[str]:
    """What of the call torch's kernel cannot express."""
    from flash_attn.cpu import options  # here: `import flash_attn` leaves the CPU backend out

    q, v = problem.q, problem.v
    obstacles = options.beyond_torch(problem.extras, q)
    asked = "max_logits" in problem.extras and not problem.backward
    obstacles += ["max_logits"] * asked
    if problem.latent:
        obstacles += ["keys of more columns than values"] * bool(q.shape[-1])
    elif not options.torch_takes(q, v):
        obstacles.append(f"head_dim {v.shape[-1]} of v beside {q.shape[-1]} of q")
    return obstacles


def _none(problem: _Problem, why: str, rejected=()) -> Explanation:
    return Explanation(
        problem.operation, str(problem), backend="none", why=why, rejected=tuple(rejected)
    )


def _on_gpu(problem: _Problem) -> Explanation:
    reason = backend.cuda_problem() if problem.gpu is None else _problem_of_named()
    if not reason and problem.gpu is None and not torch.cuda.is_available():
        reason = "no GPU was found"
    if reason:
        return _none(problem, reason)
    if problem.q.dtype not in _DTYPE_NAMES:
        return _none(problem, "kernels serve fp16 and bf16 alone")
    if not backend.has_kernel(problem.operation):
        return _none(
            problem, f"{problem.operation} has no CUDA kernel yet; {backend.describe_variants()}"
        )
    if not problem.counted:
        return _none(problem, "a length is negative, or more than kernels count to")
    if problem.codes and {"dropout", "max_logits"} & set(problem.extras):
        return _none(problem, "dropout, and largest logits, of codes have no CUDA kernel")
    if problem.latent and (problem.q.shape[-1] % 8 or problem.v.shape[-1] % 8):
        return _none(problem, "head dims of a latent cache that 8 does not divide have no kernel")
    if {"paged", "attn_probs"} <= set(problem.extras):
        return _none(
            problem, f"attn_probs of pages have no CUDA kernel; {backend.describe_variants()}"
        )
    return _ask_library(problem)


def _problem_of_named() -> str:
    if backend.library is not None:
        return ""
    return f"the compiled library, which knows the plans, is not here: {backend.cuda_problem()}"


def _ask_library(problem: _Problem) -> Explanation:
    """The selection that the compiled library would make, with the head dims it would see."""
    sm = _gpus.numbers_of(problem.q, problem.gpu).sm
    head_dim, head_dim_v = (-(-x.shape[-1] // 8) * 8 for x in (problem.q, problem.v))
    request = (
        sm, _DTYPE_NAMES[problem.q.dtype], head_dim, head_dim_v,
        problem.needs_full_scores,
    )  # fmt: skip
    # Hopper's loads cannot end with a row of such strides.
    strided = problem.cached and not problem.page_size and not problem.numbered
    of_loads = (min(sm, 80) if strided else sm, *request[1:])
    of_decode = of_loads if problem.latent else request
    few = _ask_about_decode(problem, of_decode) if _may_decode(problem) else None
    answer = few
    if problem.backward:
        answer = json.loads(
            backend.library.explain_backward(
                *request, problem.softcap, *_size(problem), problem.deterministic
            )
        )
    elif few is None or few["few_queries"] > 0:
        beside = 0 if few is None else few["few_queries"]
        answer = json.loads(
            backend.library.explain_forward(*of_loads, *_numbers(problem), beside, problem.contents)
        )
    rejected = [(row["name"], row["why"]) for row in answer["rejected"]]
    variant = answer["variant"]
    if variant is None:
        return _none(problem, f"no compiled kernel fits on sm_{sm}", rejected)
    padded = head_dim != problem.q.shape[-1] or head_dim_v != problem.v.shape[-1]
    why = f"first row of the table that fits sm_{sm}"
    if (padded or problem.codes) and problem.odd_rows and variant["direction"] == "decode":
        why += f"; rows of the cache are read by {min(problem.multiple, 8)} bytes"
    elif padded:
        why += f"; head_dim {problem.q.shape[-1]} is padded to {head_dim} in a copy"
    explanation = Explanation(
        problem.operation, str(problem), backend="cuda", why=why, kernel=variant["name"],
        tile=(variant["block_m"], answer["block_n"]), splits=answer["splits"],
        rejected=tuple(rejected), variant=variant,
        slow=_slow_on_gpu(problem, variant, sm, padded), **_planned(answer.get("plan")),
    )  # fmt: skip
    if answer is few or few is None:
        return explanation
    return replace(
        explanation, splits=few["splits"], few_queries=few["few_queries"],
        few_kernel=few["variant"]["name"],
    )  # fmt: skip


def _planned(plan: dict[str, Any] | None) -> dict[str, Any]:
    """What an explanation says of a plan."""
    if plan is None:
        return {}
    choices = sorted(((c["text"], c["us"]) for c in plan["choices"]), key=lambda c: c[1])
    return {"plan": plan["text"], "microseconds": plan["us"], "choices": tuple(choices)}


def _size(problem: _Problem) -> tuple:
    """What every plan counts."""
    _, *machine = _gpus.numbers_of(problem.q, problem.gpu)
    total_q = problem.q.shape[0] if problem.packed else -1
    total_k = problem.k.shape[0] if problem.packed and not problem.page_size else -1
    return (
        *machine, problem.batch, problem.longest_q,
        problem.capacity, total_q, total_k, problem.q.shape[-2], problem.k.shape[-2],
        *_limits(problem),
    )  # fmt: skip


def _numbers(problem: _Problem) -> tuple:
    """What the plan of a forward counts."""
    return (
        *_size(problem), min(problem.num_splits, _UNCOUNTED), problem.page_size, problem.cached,
        problem.batch_invariant, problem.odd_rows, problem.used_k, "max_logits" in problem.extras,
    )  # fmt: skip


def _limits(problem: _Problem) -> tuple[int, int]:
    """The mask's left and right width; -1: none."""
    left, right = (x if 0 <= x < _UNCOUNTED else -1 for x in problem.window_size)
    return left, 0 if problem.causal else right


def _slow_on_gpu(
    problem: _Problem, variant: dict[str, Any], sm: int, padded: bool
) -> tuple[str, ...]:
    slow = _whole_matrix(problem)
    if (padded or problem.codes) and problem.odd_rows and variant["direction"] == "decode":
        which = "rows are" if problem.codes else "a head_dim that is no multiple of 8 is"
        slow += (f"{which} read by {min(problem.multiple, 8)} bytes at a time, not by 16",)
    elif padded:
        what = "the whole cache" if problem.odd_rows else "q, k and v"
        slow += (f"each call copies {what}: a head_dim that is a multiple of 8 is taken as it is",)
    newer = [
        row
        for row in backend.compiled_variants()
        if row.get("arch") == 90 and row["direction"] == variant["direction"]
    ]
    if sm == 90 and newer and variant.get("arch") != 90:
        slow += (f"none of the {len(newer)} kernels for Hopper serves it",)
    return slow


def _may_decode(problem: _Problem) -> bool:
    """Whether a decode kernel may serve the call, or some of its sequences."""
    if problem.backward or "max_logits" in problem.extras:
        return False
    if problem.cached:
        return True
    return "dropout" not in problem.extras and (problem.packed or not problem.batch_invariant)


def _ask_about_decode(problem: _Problem, request: tuple) -> dict | None:
    """The selection among decode kernels; None where the forward kernel is faster."""
    answer = backend.library.explain_decode(*request, *_numbers(problem), 0, problem.contents)
    if answer is None:
        return None
    found = json.loads(answer)
    only_decoded = problem.cached or problem.latent
    return found if found["variant"] is not None or only_decoded else None


def trace(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> None:
    """One line for FLASH_ATTN_LOG=1, once per distinct call."""
    choice = explain(q, k, v, **options)
    line = f"{choice.operation}: {choice.call} -> {choice.backend}: {choice.kernel}"
    backend.trace(line + "".join(f"; slow: {reason}" for reason in choice.slow))
