"""The feature matrix of docs/features.md, from what is there: `--check` or `--write`.

The CPU column asks the CPU backend: each feature is a small call that works or raises
NotImplementedError. The GPU columns come from the variant table, from the ops that csrc/api
registers for CUDA, and from the options that it refuses by name.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from build_tools.page_table import DOCS, Table

ROOT = Path(__file__).resolve().parent.parent
YES, NO, CONVERTED = "yes", "–", "as 16 bits"
FAMILIES = {"sm80": "GPU, sm80 kernels (Ampere and newer)", "sm90": "GPU, sm90 kernels (Hopper)"}

# The family whose kernels a GPU runs where its own family has none.
OLDER = {"sm90": "sm80"}


@dataclass(frozen=True)
class Feature:
    """name: the row's label. probe: a CPU call that uses it. op: the op that has to exist on CUDA.

    scores: "plain", or "full" for a kernel with score mods. cached_bits: of the keys that it
    must read; dtypes: of the queries. refused: the name under which csrc/api refuses it. latent: of
    a latent cache. converts: what has no such kernel is converted to 16 bits.
    """

    name: str
    probe: Callable[[], object]
    op: str = "_flash_attn_forward"
    scores: str = "plain"
    cached_bits: int = 16
    dtypes: tuple[str, ...] = ("bf16", "fp16")
    refused: str = ""
    latent: bool = False
    converts: bool = False

    @property
    def direction(self) -> str:
        if self.latent:
            return "latent"
        if "kvcache" in self.op:
            return "decode"
        return "bwd" if "backward" in self.op else "fwd"


class Kernels:
    """What csrc holds, read from its text; nothing needs to be built."""

    def __init__(self):
        spec = importlib.util.spec_from_file_location("variants", ROOT / "csrc/variants.py")
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # dataclasses look their module up
        spec.loader.exec_module(module)
        self.variants = module.VARIANTS
        api = "\n".join(path.read_text() for path in sorted((ROOT / "csrc/api").glob("*.cpp")))
        self.ops = set(re.findall(r'serve<.+>\(library, "(\w+)"', api))
        self.refused = set(re.findall(r'kNotImplemented, "(\w+)', api))

    def cell(self, feature: Feature, family: str) -> str:
        rows = self.rows_of(feature, family)
        if feature.op not in self.ops or feature.refused in self.refused:
            return NO
        if not rows and feature.converts:
            return CONVERTED
        if not rows:
            older = OLDER.get(family)
            served = older is not None and self.cell(feature, older) != NO
            # Calls against a cache that the plan does not decode run the forward.
            forward = feature.direction == "decode" and self.has_forward(feature, family)
            return f"by {older}" + ", or the forward" * forward if served else NO
        dtypes = ", ".join(dict.fromkeys(v.dtype for v in rows))
        d, dv = max((v.head_dim, v.head_dim_v) for v in rows)
        wider = [v for v in self.rows_of(feature, OLDER.get(family)) if v.head_dim > d]
        more = f"; above by {OLDER[family]}" if wider else f"; else {CONVERTED}" * feature.converts
        return f"{dtypes}; d ≤ {d}" + f"/{dv}" * (d != dv) + more

    def has_forward(self, feature: Feature, family: str) -> bool:
        return any(
            (v.arch, v.direction, v.cached_bits) == (family, "fwd", feature.cached_bits)
            and v.dtype in feature.dtypes
            for v in self.variants
        )

    def rows_of(self, feature: Feature, family: str | None) -> list:
        return [
            v
            for v in self.variants
            if v.arch == family
            and v.direction == feature.direction
            and v.cached_bits == feature.cached_bits
            and v.dtype in feature.dtypes
            and feature.scores in ("plain", v.scores)
        ]


def _features() -> list[Feature]:
    import torch

    import flash_attn as fa

    def tensors(*shape: int, count: int = 3, dtype=torch.float32, grad: bool = False):
        return [torch.randn(shape, dtype=dtype).requires_grad_(grad) for _ in range(count)]

    def coded(*tensors):
        return [x.to(torch.float8_e4m3fn) for x in tensors]

    def dense(grad: bool = False, heads_kv: int = 2, codes: bool = False, **options):
        (q,) = tensors(1, 4, 2, 16, count=1, grad=grad)
        k, v = tensors(1, 4, heads_kv, 16, count=2, grad=grad)
        if codes:
            q, k, v = coded(q, k, v)
        out = fa.flash_attn_func(q, k, v, **options)
        if grad:
            sum(t.float().sum() for t in (out if isinstance(out, tuple) else (out,))).backward()

    def varlen(grad: bool = False):
        cu_seqlens = torch.tensor([0, 3, 4], dtype=torch.int32)
        q, k, v = tensors(4, 2, 16, grad=grad)
        out = fa.flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, 3, 3)
        if grad:
            out.sum().backward()

    def pages(codes: bool = False):
        cu_seqlens = torch.tensor([0, 3, 4], dtype=torch.int32)
        (q,) = tensors(4, 2, 16, count=1)
        k, v = tensors(4, 8, 2, 16, count=2)
        if codes:
            k, v = coded(k, v)
        table = torch.arange(4, dtype=torch.int32).view(2, 2)
        fa.flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, 3, 3, block_table=table)

    def cache(
        rotary: bool = False, paged: bool = False, append: bool = True, codes: bool = False,
        **options,
    ):  # fmt: skip
        q, k, v = tensors(2, 1, 2, 16)
        k_cache, v_cache = tensors(4, 8, 2, 16, count=2)
        if codes:
            k_cache, v_cache = coded(k_cache, v_cache)
        if append:
            options |= {"k": k, "v": v}
        if rotary:
            cos, sin = tensors(16, 8, count=2)
            options |= {"rotary_cos": cos, "rotary_sin": sin}
        if paged:
            options["block_table"] = torch.arange(4, dtype=torch.int32).view(2, 2)
        else:
            options["cache_batch_idx"] = torch.tensor([3, 0], dtype=torch.int32)
        used = torch.tensor([3, 5], dtype=torch.int32)
        fa.flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=used, **options)

    def latent():
        (q,), (qv,) = (tensors(2, 1, 2, columns, count=1) for columns in (16, 40))
        (k_cache,), (v_cache,) = (tensors(2, 8, 1, columns, count=1) for columns in (16, 40))
        fa.flash_attn_with_kvcache(q, k_cache, v_cache, qv=qv, cache_seqlens=3)

    kv = {"op": "_flash_attn_with_kvcache"}
    full = {"scores": "full"}
    slopes = torch.ones(2)
    return [
        Feature("forward", dense),
        Feature("backward", lambda: dense(grad=True), op="_flash_attn_backward"),
        Feature("packed sequences (varlen), forward", varlen, op="_flash_attn_varlen_forward"),
        Feature(
            "packed sequences (varlen), backward",
            lambda: varlen(grad=True),
            op="_flash_attn_varlen_backward",
        ),
        Feature("causal, bottom-right aligned", lambda: dense(causal=True)),
        Feature("sliding window", lambda: dense(window_size=(1, 1))),
        Feature("grouped and multi-query heads", lambda: dense(heads_kv=1)),
        Feature("log-sum-exp returned", lambda: dense(return_lse=True)),
        Feature(
            "log-sum-exp differentiable",
            lambda: dense(grad=True, return_lse=True),
            op="_flash_attn_backward",
        ),
        Feature("largest logits returned", lambda: dense(return_max_logits=True), **full),
        Feature("softcap", lambda: dense(softcap=5.0), **full),
        Feature("ALiBi", lambda: dense(alibi_slopes=slopes), **full),
        Feature("attention sinks", lambda: dense(s_aux=slopes)),
        Feature("dropout", lambda: dense(dropout_p=0.5), **full),
        Feature(
            "probabilities returned (tests)",
            lambda: dense(return_attn_probs=True),
            refused="return_attn_probs",
        ),
        Feature("chunks of prompts, keys in pages", pages, op="_flash_attn_varlen_forward"),
        Feature("KV cache", lambda: cache(append=False), **kv),
        Feature("KV cache: append in the call", cache, **kv),
        Feature("KV cache: rotary in the call", lambda: cache(rotary=True), **kv),
        Feature("KV cache: pages of any size", lambda: cache(paged=True), **kv),
        Feature("KV cache: codes of 8 bits (fp8)", lambda: cache(codes=True), cached_bits=8, **kv),
        Feature("KV cache: latent rows (MLA)", latent, latent=True, **kv),
        Feature(
            "chunks of prompts, pages of codes (fp8)",
            lambda: pages(codes=True),
            op="_flash_attn_varlen_forward",
            cached_bits=8,
        ),
        Feature(
            "queries, keys and values of codes (fp8)",
            lambda: dense(codes=True, fp8_products=True),
            op="_flash_attn_fp8_forward",
            cached_bits=8,
            dtypes=("e4m3",),
            converts=True,
        ),
    ]


def _cpu_cell(feature: Feature) -> str:
    try:
        feature.probe()
    except NotImplementedError:
        return NO
    return YES


def _cpu_range() -> str:
    """Dtypes and the largest head dimension that the CPU forward takes."""
    import torch

    from flash_attn import flash_attn_func

    def works(dtype=torch.float32, head_dim: int = 16) -> bool:
        try:
            flash_attn_func(*torch.zeros(3, 1, 1, 1, head_dim, dtype=dtype))
        except (ValueError, TypeError, NotImplementedError):
            return False
        return True

    names = {"bf16": torch.bfloat16, "fp16": torch.float16}
    names |= {"fp32": torch.float32, "fp64": torch.float64}
    largest = max(d for d in range(64, 1025, 64) if works(head_dim=d))
    return f"{', '.join(n for n, dtype in names.items() if works(dtype))}; d ≤ {largest}"


def matrix() -> str:
    kernels = Kernels()
    families = [f for f in FAMILIES if any(v.arch == f for v in kernels.variants)]
    lines = [
        f"| | CPU ({_cpu_range()}) | " + " | ".join(FAMILIES[f] for f in families) + " |",
        "|---" * (2 + len(families)) + "|",
    ]
    for feature in _features():
        cells = [_cpu_cell(feature), *(kernels.cell(feature, f) for f in families)]
        lines.append(f"| {feature.name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


TABLE = Table("feature_matrix", DOCS / "features.md", "feature matrix", matrix)

if __name__ == "__main__":
    sys.exit(TABLE.main(sys.argv[1:]))
