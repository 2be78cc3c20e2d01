"""One attention problem as a dataclass, and how its inputs are made.

A `Case` says everything about a dense call; `make_inputs` turns it into tensors whose layout is
non-contiguous on purpose and whose surroundings are NaN, so that a kernel that reads one element
too many shows it.  `pairwise` picks lists in which every two option values meet, not the full
product.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, fields, replace

import reference_dropout
import torch
import torch.nn.functional as F
from reference import random_slopes
from torch import Tensor

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
NO_WINDOW = (-1, -1)
SEED, OFFSET = 0x1234_5678_9ABC, 0x2_0000_0003


@dataclass(frozen=True)
class Case:
    dtype: torch.dtype = BF16
    b: int = 2
    sq: int = 113
    sk: int = 113
    h: int = 4
    hk: int = 2
    d: int = 64
    dv: int | None = None  # None: d
    causal: bool = False
    window: tuple[int, int] = NO_WINDOW
    scale: float | None = None
    softcap: float = 0.0
    alibi: str | None = None  # "h" or "bh", the shape of the slopes
    dropout_p: float = 0.0
    sinks: bool = False
    layout: str = "poisoned"  # contiguous | transposed | packed | poisoned
    kind: str = "normal"  # normal | low_rank | outliers | large | constant | growing
    seed: int = 0

    @property
    def value_dim(self) -> int:
        return self.d if self.dv is None else self.dv

    @property
    def features(self) -> set[str]:
        """Names of what the call needs beyond plain half-precision attention up to d = 128."""
        wanted = {
            "softcap": self.softcap > 0,
            "alibi": self.alibi is not None,
            "dropout": self.dropout_p > 0,
            "sinks": self.sinks,
            "head_dim_256": max(self.d, self.value_dim) > 128,
            "head_dim_v": self.value_dim != self.d,
            "fp32": self.dtype == FP32,
            "fp64": self.dtype == FP64,
        }
        return {name for name, needed in wanted.items() if needed}

    def scoring(self, slopes: Tensor | None) -> tuple:
        """What the forward operations take about scores, in their order."""
        scale = self.d**-0.5 if self.scale is None else self.scale
        return (self.dropout_p, scale, self.causal, *self.window, self.softcap, slopes)

    def mask_kwargs(self) -> dict:
        return {"causal": self.causal, "window_size": self.window}

    def reference_kwargs(self, x) -> dict:
        """What the references take beside tensors that have gradients; x: the call's inputs."""
        return {
            "softmax_scale": self.scale, "softcap": self.softcap, "alibi_slopes": x.alibi_slopes,
            "dropout_p": self.dropout_p, "keep_mask": x.keep_mask, **self.mask_kwargs(),
        }  # fmt: skip

    def __str__(self) -> str:
        """Only what differs from the defaults, so that test ids stay readable."""
        parts = [
            str(self.dtype).removeprefix("torch."),
            f"s{self.sq}x{self.sk}",
            f"h{self.h}x{self.hk}",
        ]
        parts.append(f"d{self.d}" if self.dv is None else f"d{self.d}x{self.dv}")
        for f in fields(self):
            if f.name in {"dtype", "sq", "sk", "h", "hk", "d", "dv", "layout"}:
                continue
            value = getattr(self, f.name)
            if value == f.default:
                continue
            text = "_".join(map(str, value)) if isinstance(value, tuple) else str(value)
            parts.append(f.name if value is True else f"{f.name}{text}")
        return "-".join([*parts, self.layout])


@dataclass
class Inputs:
    q: Tensor  # (b, sq, h, d)
    k: Tensor  # (b, sk, hk, d)
    v: Tensor  # (b, sk, hk, dv)
    dout: Tensor  # (b, sq, h, dv)
    dlse: Tensor  # (b, h, sq) float32
    alibi_slopes: Tensor | None  # (h,) or (b, h) float32
    s_aux: Tensor | None  # (h,) float32
    keep_mask: Tensor | None  # (b, h, sq, sk) bool

    def scores_kwargs(self) -> dict:
        return {"alibi_slopes": self.alibi_slopes, "s_aux": self.s_aux}


def poisoned(x: Tensor, around: int = 8, fill: float = float("nan")) -> Tensor:
    """The same values as a slice of a larger tensor full of `fill`, last stride one.

    Margins of 8 elements keep rows 16-byte aligned, as a GPU call may ask.
    """
    margins = [1] * (x.dim() - 1) + [around]
    shape = [n + 2 * m for n, m in zip(x.shape, margins, strict=True)]
    buffer = torch.full(shape, fill, dtype=x.dtype, device=x.device)
    view = buffer[tuple(slice(m, m + n) for n, m in zip(x.shape, margins, strict=True))]
    view.copy_(x)
    return view


def transposed(x: Tensor) -> Tensor:
    """(b, s, h, d) stored as (b, h, s, d)."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def packed(tensors: list[Tensor]) -> list[Tensor]:
    """Slices along the head axis of one buffer (b, s, sum of heads, d)."""
    return list(torch.cat(tensors, dim=2).split([x.shape[2] for x in tensors], dim=2))


def values(kind: str, shape: tuple[int, ...], role: str, gen: torch.Generator) -> Tensor:
    """Float64 values (b, s, h, d) of one tensor; role is "q", "k" or "v"."""
    x = torch.randn(shape, generator=gen, dtype=FP64)
    b, s, h, d = shape
    if kind == "low_rank":
        left = torch.randn((b, s, h, 2), generator=gen, dtype=FP64)
        x = left @ torch.randn((b, 1, 2, d), generator=gen, dtype=FP64)
    elif kind == "outliers":
        x[..., :: max(d // 3, 1)] *= 50  # the same channels in q, k and v
    elif kind == "large" and role != "v":
        x *= 30  # logits with a standard deviation of about 900
    elif kind == "growing" and role != "v":
        x *= torch.linspace(0, 3, s, dtype=FP64)[:, None, None]  # first logits near 0, last up to 9
    elif kind == "constant":
        x = torch.full(shape, {"q": 0.75, "k": 0.5, "v": -1.3}[role], dtype=FP64)
    return x


def arrange(case: Case, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The layout of the case; `packed` is as packed as the shapes allow."""
    if case.layout == "contiguous":
        return q, k, v
    if case.layout == "transposed":
        return transposed(q), transposed(k), transposed(v)
    if case.layout == "packed" and case.value_dim == case.d:
        if case.sq == case.sk:
            return tuple(packed([q, k, v]))
        return poisoned(q), *packed([k, v])
    return poisoned(q), poisoned(k), poisoned(v)


def make_inputs(case: Case, device="cpu") -> Inputs:
    gen = torch.Generator().manual_seed(1000 + case.seed)
    q_shape = (case.b, case.sq, case.h, case.d)
    k_shape = (case.b, case.sk, case.hk, case.d)
    v_shape = (case.b, case.sk, case.hk, case.value_dim)
    q = values(case.kind, q_shape, "q", gen).to(case.dtype).to(device)
    k = values(case.kind, k_shape, "k", gen).to(case.dtype).to(device)
    v = values(case.kind, v_shape, "v", gen).to(case.dtype).to(device)
    out_shape = (case.b, case.sq, case.h, case.value_dim)
    dout = torch.randn(out_shape, generator=gen, dtype=FP64).to(case.dtype).to(device)
    if case.layout != "contiguous":
        dout = transposed(dout)
    lse_dtype = FP64 if case.dtype == FP64 else FP32
    dlse = torch.randn((case.b, case.h, case.sq), generator=gen, dtype=lse_dtype).to(device)
    slopes = s_aux = keep = None
    if case.alibi is not None:
        shape = (case.h,) if case.alibi == "h" else (case.b, case.h)
        slopes = random_slopes(shape, gen).to(device)
    if case.sinks:
        s_aux = torch.randn((case.h,), generator=gen, dtype=FP32).to(device)
    if case.dropout_p > 0:
        sizes = (case.b, case.h, case.sq, case.sk)
        keep = reference_dropout.keep_mask(SEED, OFFSET, *sizes, case.dropout_p).to(device)
    return Inputs(*arrange(case, q, k, v), dout, dlse, slopes, s_aux, keep)


def rng_state(device, seed: int = SEED, offset: int = OFFSET) -> Tensor:
    return torch.tensor([seed, offset], dtype=torch.int64, device=device)


def padded_on_gpu(*tensors: Tensor) -> list[Tensor]:
    """Zeros up to a head dim that is a multiple of 8, which operations on CUDA tensors ask for.

    The public functions pad by themselves; operations called directly need it done.
    """
    return [F.pad(x, (0, -x.shape[-1] % 8)) if x.is_cuda else x for x in tensors]


def pairwise(seed: int = 0, **options: list) -> list[dict]:
    """Few combinations in which every pair of values of two different options appears once.

    Greedy: of fifty random completions of a pair not met yet, take the one that meets the most.
    """
    rng = random.Random(seed)
    names = list(options)
    missing = {
        ((a, x), (b, y))
        for a, b in itertools.combinations(range(len(names)), 2)
        for x in range(len(options[names[a]]))
        for y in range(len(options[names[b]]))
    }

    def pairs(row: list[int]) -> set:
        return set(itertools.combinations(list(enumerate(row)), 2))

    rows = []
    while missing:
        (a, x), (b, y) = min(missing)
        best: tuple[int, list[int]] | None = None
        for _ in range(50):
            row = [rng.randrange(len(options[n])) for n in names]
            row[a], row[b] = x, y
            met = len(pairs(row) & missing)
            if best is None or met > best[0]:
                best = (met, row)
        rows.append(best[1])
        missing -= pairs(best[1])
    return [{n: options[n][i] for n, i in zip(names, row, strict=True)} for row in rows]


def build(combinations: list[dict]) -> list[Case]:
    """Cases from rows whose keys are fields, or tuples of fields with tuples of values."""
    cases = []
    for n, row in enumerate(combinations):
        flat: dict = {"seed": n}
        for key, value in row.items():
            names = key.split("__")
            flat.update(zip(names, value, strict=True) if len(names) > 1 else [(key, value)])
        cases.append(Case(**flat))
    return cases


LENGTHS = [(128, 128), (113, 113), (1, 129), (129, 17), (17, 257), (257, 64), (64, 1), (31, 150)]
HEADS = [(4, 4), (4, 1), (6, 2), (3, 3)]
MASKS = [
    (False, NO_WINDOW),
    (True, NO_WINDOW),
    (False, (20, 0)),
    (False, (-1, 9)),
    (False, (33, 65)),
    (True, (64, -1)),
    (False, (0, 0)),
    (False, (70, -1)),
]
LAYOUTS = ["poisoned", "transposed", "packed", "contiguous"]
KINDS = ["normal", "low_rank", "outliers", "large", "constant"]

# What the first GPU kernels compute: half precision, d = dv up to 128, masks, grouped heads.
PLAIN_CASES = build(
    pairwise(
        dtype=[BF16, FP16],
        sq__sk=LENGTHS,
        h__hk=HEADS,
        d=[64, 128, 32, 80, 59],
        causal__window=MASKS,
        layout=LAYOUTS,
        kind=KINDS,
        scale=[None, 0.3],
    )
)

FEATURE_CASES = build(
    pairwise(
        seed=1,
        dtype=[BF16, FP16, FP32, FP64],
        sq__sk=LENGTHS,
        h__hk=HEADS[:3],
        d__dv=[(64, None), (128, None), (192, 128), (40, 72), (256, None), (33, None)],
        causal__window=MASKS,
        softcap=[0.0, 15.0],
        alibi=[None, "h", "bh"],
        dropout_p=[0.0, 0.17],
        sinks=[False, True],
        layout=LAYOUTS,
        kind=KINDS,
    )
)

BACKWARD_CASES = build(
    pairwise(
        seed=2,
        dtype=[BF16, FP16, FP32],
        sq__sk=LENGTHS,
        h__hk=HEADS[:3],
        d__dv=[(64, None), (128, None), (192, 128), (40, 72), (59, None)],
        causal__window=MASKS[:6],
        softcap=[0.0, 15.0],
        alibi=[None, "bh"],
        dropout_p=[0.0, 0.17],
        sinks=[False, True],
        layout=LAYOUTS,
        kind=KINDS,
    )
)

# Long and odd: several tiles in both directions whatever the tile.
LONG_CASES = [
    Case(b=1, sq=1023, sk=1023, h=2, hk=1, causal=True),
    Case(b=1, sq=1023, sk=1023, h=2, hk=2, window=(200, 0), dtype=FP16),
    Case(b=1, sq=257, sk=1023, h=2, hk=1, causal=True, kind="outliers"),
    Case(b=1, sq=1023, sk=257, h=1, hk=1, causal=True, kind="low_rank"),
    Case(FP32, b=1, sq=2100, sk=2100, h=1, hk=1, d=16, causal=True),
    Case(b=1, sq=3, sk=2049, h=4, hk=1, d=128, causal=True),
    Case(b=1, sq=700, sk=900, h=2, hk=1, window=(100, 150), layout="transposed"),
]


def random_case(seed: int) -> Case:
    """Any feature with any other: the pairs above say nothing about triples."""
    rng = random.Random(seed)
    hk = rng.choice([1, 2, 3])
    d = rng.choice([8, 24, 47, 64, 96, 128, 160])
    lengths = [1, 2, 15, 16, 17, 63, 64, 65, 100, 127, 130, 200]
    window = rng.choice([NO_WINDOW, NO_WINDOW, (rng.randrange(80), rng.randrange(-1, 80))])
    return Case(
        dtype=rng.choice([BF16, FP16, FP32]),
        b=rng.choice([1, 2, 3]),
        sq=rng.choice(lengths),
        sk=rng.choice(lengths),
        h=hk * rng.choice([1, 2, 3]),
        hk=hk,
        d=d,
        dv=rng.choice([None, None, 16, 72]),
        causal=rng.random() < 0.4,
        window=window,
        scale=rng.choice([None, None, 0.07]),
        softcap=rng.choice([0.0, 0.0, 3.0, 30.0]),
        alibi=rng.choice([None, None, "h", "bh"]),
        dropout_p=rng.choice([0.0, 0.0, 0.3]),
        sinks=rng.random() < 0.3,
        layout=rng.choice(LAYOUTS),
        kind=rng.choice(KINDS),
        seed=seed,
    )


def without_dropout(case: Case) -> Case:
    return replace(case, dropout_p=0.0)
