"""What serves a call on a GPU: the compiled library answers."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import torch

from flash_attn import _gpus as gpus
from flash_attn import backend
from flash_attn.call import FP8, UNCOUNTED

from .cpu import whole_matrix
from .explanation import Explanation
from .problem import Problem

_DTYPE_NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", FP8: "e4m3"}


def on_gpu(problem: Problem) -> Explanation:
    reason = backend.cuda_problem() if problem.gpu is None else _problem_of_named()
    if not reason and problem.gpu is None and not torch.cuda.is_available():
        reason = "no GPU was found"
    if reason:
        return problem.unserved(reason)
    if problem.dtype not in _DTYPE_NAMES:
        return problem.unserved("kernels serve fp16 and bf16 alone")
    if not backend.has_kernel(problem.operation):
        return problem.unserved(
            f"{problem.operation} has no CUDA kernel yet; {backend.describe_variants()}"
        )
    if not problem.counted:
        return problem.unserved("a length is negative, or more than kernels count to")
    if problem.codes and {"dropout", "max_logits"} & set(problem.extras):
        return problem.unserved("dropout, and largest logits, of codes have no CUDA kernel")
    if problem.latent and (problem.q.shape[-1] % 8 or problem.v.shape[-1] % 8):
        return problem.unserved("head dims of a latent cache that 8 does not divide have no kernel")
    if {"paged", "attn_probs"} <= set(problem.extras):
        return problem.unserved(
            f"attn_probs of pages have no CUDA kernel; {backend.describe_variants()}"
        )
    return _ask_library(problem)


def _problem_of_named() -> str:
    if backend.library is not None:
        return ""
    return f"the compiled library, which knows the plans, is not here: {backend.cuda_problem()}"


def _ask_library(problem: Problem) -> Explanation:
    """The selection that the compiled library would make, with the head dims it would see."""
    sm = gpus.numbers_of(problem.q, problem.gpu).sm
    multiple = 16 if problem.products else 8
    head_dim, head_dim_v = (-(-x.shape[-1] // multiple) * multiple for x in (problem.q, problem.v))
    request = (
        sm, _DTYPE_NAMES[problem.dtype], head_dim, head_dim_v,
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
        return problem.unserved(f"no compiled kernel fits on sm_{sm}", rejected)
    padded = head_dim != problem.q.shape[-1] or head_dim_v != problem.v.shape[-1]
    why = f"first row of the table that fits sm_{sm}"
    if (padded or problem.codes) and problem.odd_rows and variant["direction"] == "decode":
        why += f"; rows of the cache are read by {min(problem.multiple, 8)} bytes"
    elif padded:
        why += f"; head_dim {problem.q.shape[-1]} is padded to {head_dim} in a copy"
    explanation = Explanation(
        problem.operation, str(problem), backend="cuda", why=why, kernel=variant["name"],
        tile=(variant["block_m"], answer["block_n"]), splits=answer["splits"],
        rejected=(*(problem.way.rejected if problem.way else ()), *rejected), variant=variant,
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


def _size(problem: Problem) -> tuple:
    """What every plan counts."""
    _, sms, *machine = gpus.numbers_of(problem.q, problem.gpu)
    if problem.sm_margin:
        sms = backend.library.sms_left(sms, min(problem.sm_margin, UNCOUNTED))
    total_q = problem.q.shape[0] if problem.packed else -1
    total_k = problem.k.shape[0] if problem.packed and not problem.page_size else -1
    return (
        sms, *machine, problem.batch, problem.longest_q,
        problem.capacity, total_q, total_k, problem.q.shape[-2], problem.k.shape[-2],
        *_limits(problem),
    )  # fmt: skip


def _numbers(problem: Problem) -> tuple:
    """What the plan of a forward counts."""
    return (
        *_size(problem), min(problem.num_splits, UNCOUNTED), problem.page_size, problem.cached,
        problem.batch_invariant, problem.odd_rows, problem.used_k, "max_logits" in problem.extras,
    )  # fmt: skip


def _limits(problem: Problem) -> tuple[int, int]:
    """The mask's left and right width; -1: none."""
    left, right = (x if 0 <= x < UNCOUNTED else -1 for x in problem.window_size)
    return left, 0 if problem.causal else right


def _slow_on_gpu(
    problem: Problem, variant: dict[str, Any], sm: int, padded: bool
) -> tuple[str, ...]:
    slow = whole_matrix(problem) + (problem.way.slow if problem.way else ())
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


def _may_decode(problem: Problem) -> bool:
    """Whether a decode kernel may serve the call, or some of its sequences."""
    if problem.backward or problem.products or "max_logits" in problem.extras:
        return False
    if problem.cached:
        return True
    return "dropout" not in problem.extras and (problem.packed or not problem.batch_invariant)


def _ask_about_decode(problem: Problem, request: tuple) -> dict | None:
    """The selection among decode kernels; None where the forward kernel is faster."""
    answer = backend.library.explain_decode(*request, *_numbers(problem), 0, problem.contents)
    if answer is None:
        return None
    found = json.loads(answer)
    only_decoded = problem.cached or problem.latent
    return found if found["variant"] is not None or only_decoded else None
