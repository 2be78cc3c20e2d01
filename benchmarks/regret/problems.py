"""Problems drawn from what people run, by a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass

# (heads, KV heads, head dim): published models, and their shares under tensor parallelism.
HEADS = [
    (32, 8, 128), (64, 8, 128), (128, 8, 128), (28, 4, 128), (40, 8, 128), (12, 2, 128),
    (14, 2, 64), (16, 8, 256), (32, 16, 128), (8, 1, 256), (8, 4, 256), (32, 32, 96),
    (40, 10, 128), (12, 12, 64), (25, 25, 64), (32, 32, 128), (64, 8, 64), (71, 1, 64),
    (48, 1, 128), (32, 2, 128), (9, 3, 64), (15, 5, 64), (16, 16, 64), (24, 24, 128),
    (20, 20, 64), (32, 8, 64), (24, 8, 128), (16, 8, 128), (32, 4, 128), (64, 4, 128),
    (8, 1, 128), (16, 2, 128), (4, 1, 128), (10, 2, 128), (7, 1, 128), (16, 16, 128),
    (40, 40, 128), (24, 24, 64), (16, 4, 128), (16, 16, 256), (16, 1, 256), (12, 12, 192),
    (32, 8, 96), (16, 16, 80), (32, 32, 112), (8, 8, 160), (20, 5, 192), (8, 2, 512), (16, 4, 512),
    (8, 1, 512),
]  # fmt: skip
LATENT = (128, 192, 128)  # heads, head dim, and that of v, of the multi-head latent models
LENGTHS = (256, 512, 768, 1024, 1536, 2048, 3072, 4096, 6000, 8192, 16384, 32768)
WINDOWS = (128, 256, 512, 1024, 2048, 4096)
MOST_ELEMENTS = 2**31


@dataclass(frozen=True)
class Problem:
    """One call.

    direction: "backward", "forward" or "cache" (a call against a KV cache, or against pages).
    seqlen_q, seqlen_k: of each sequence, or of the longest; of a cache its capacity. window: keys
    to the left, -1: all. lengths: of each sequence of a varlen batch. page: rows of a page, 0:
    there are none. keys: of a cache, in use by each sequence. queries: of each sequence of a varlen
    batch against pages. codes: the cache holds codes of 8 bits.
    """

    direction: str
    heads_q: int
    heads_kv: int
    head_dim: int
    head_dim_v: int
    batch: int
    seqlen_q: int
    seqlen_k: int
    causal: bool = False
    window: int = -1
    lengths: tuple[int, ...] = ()
    deterministic: bool = False
    page: int = 0
    keys: tuple[int, ...] = ()
    queries: tuple[int, ...] = ()
    codes: bool = False

    @property
    def rows(self) -> int:
        return sum(self.lengths) or self.batch * self.seqlen_q

    @property
    def flops(self) -> float:
        """About, for a bound on what is measured."""
        if self.keys:
            queries = self.queries or (self.seqlen_q,) * self.batch
            pairs = float(sum(q * k for q, k in zip(queries, self.keys)))
        elif self.lengths:
            pairs = float(sum(n * n for n in self.lengths))
        else:
            pairs = float(self.batch * self.seqlen_q * self.seqlen_k)
        if not self.keys:
            pairs /= 2 if self.causal else 1
            pairs = min(pairs, self.rows * self.window) if self.window >= 0 else pairs
        products = 2.5 if self.direction == "backward" else 1.0
        return 2 * products * self.heads_q * pairs * (self.head_dim + self.head_dim_v)

    def __str__(self) -> str:
        dims = f"{self.head_dim}" if self.head_dim_v == self.head_dim else "192/128"
        parts = [f"b{self.batch} {self.seqlen_q}x{self.seqlen_k} h{self.heads_q}/{self.heads_kv}"]
        parts.append(f"d{dims}{' causal' if self.causal and not self.keys else ''}")
        parts += [f"w{self.window}"] * (self.window >= 0)
        parts += [f"packed, {self.rows} rows"] * bool(self.lengths)
        parts += [f"{sum(self.queries)} queries"] * bool(self.queries)
        parts += [f"{sum(self.keys)} keys"] * bool(self.keys)
        parts += [f"pages of {self.page}"] * bool(self.page)
        parts += ["fp8"] * self.codes
        return " ".join(parts + ["deterministic"] * self.deterministic)


def draw(seed: int, counts: dict[str, int], most_flops: float = 3e12) -> list[Problem]:
    """Problems, as many of each direction as ``counts`` says."""
    dice = random.Random(seed)
    problems = [
        _cache(dice) if direction == "cache" else _training(dice, direction, most_flops)
        for direction, count in counts.items()
        for _ in range(count)
    ]
    dice.shuffle(problems)
    return problems


def large_groups() -> list[Problem]:
    """Backwards of models whose KV heads have large groups: what once cost most."""
    rows = [
        (2, 8192, 64, 8), (1, 8192, 64, 8), (4, 4096, 64, 8), (1, 16384, 64, 8), (2, 8192, 32, 8),
        (2, 8192, 16, 4), (2, 8192, 40, 8), (1, 6000, 32, 8), (2, 8192, 28, 4), (2, 8192, 16, 1),
        (2, 4096, 32, 4),
    ]  # fmt: skip
    return [
        Problem("backward", heads, heads_kv, 128, 128, batch, seqlen, seqlen, causal=True)
        for batch, seqlen, heads, heads_kv in rows
    ]


def _heads(dice: random.Random) -> dict[str, int]:
    if dice.random() < 0.06:
        heads, d, dv = LATENT
        heads //= dice.choice([1, 2, 4, 8])
        return {"heads_q": heads, "heads_kv": heads, "head_dim": d, "head_dim_v": dv}
    heads, heads_kv, d = dice.choice(HEADS)
    return {"heads_q": heads, "heads_kv": heads_kv, "head_dim": d, "head_dim_v": d}


def _packed(dice: random.Random, total: int) -> tuple[int, ...]:
    kind = dice.choice(["alike", "uniform", "zipf", "one long", "lognormal"])
    mean = dice.choice([128, 256, 512, 1024, 2048, 4096])
    count = max(total // mean, 1)
    if kind == "alike":
        lengths = [mean] * count
    elif kind == "uniform":
        lengths = [dice.randint(1, 2 * mean) for _ in range(count)]
    elif kind == "zipf":
        lengths = [max(1, int(8192 / (1 + dice.random() * count) ** 0.9)) for _ in range(count)]
    elif kind == "one long":
        lengths = [total // 2] + [dice.randint(1, mean) for _ in range(count)]
    else:
        lengths = [int(dice.lognormvariate(0, 0.8) * mean * 0.7) for _ in range(count)]
    return tuple(min(max(n, 1), 16384) for n in lengths[:512])


def _training(dice: random.Random, direction: str, most_flops: float) -> Problem:
    while True:
        total = max(int(2 ** dice.uniform(8, 18)) // 128 * 128, 256)
        call = _heads(dice) | {"direction": direction, "causal": dice.random() < 0.65}
        if dice.random() < 0.3:
            lengths = _packed(dice, total)
            longest = max(lengths)
            call |= {"batch": len(lengths), "seqlen_q": longest, "seqlen_k": longest}
            call["lengths"] = lengths
        else:
            length = min(total, dice.choice([*LENGTHS, dice.randint(200, 9000)]))
            call |= {"batch": max(total // length, 1), "seqlen_q": length, "seqlen_k": length}
            if dice.random() < 0.06:  # cross attention
                call["seqlen_k"] = dice.choice([77, 256, 1024, 4096])
        if call["causal"] and dice.random() < 0.2:
            call["window"] = dice.choice(WINDOWS)
        if direction == "backward":
            call["deterministic"] = dice.random() < 0.12
        problem = Problem(**call)
        small = problem.rows * problem.heads_q * problem.head_dim < MOST_ELEMENTS
        if small and problem.flops < (most_flops if direction == "backward" else most_flops / 2):
            return problem


def _cache(dice: random.Random, most_bytes: float = 2.5e9, most_flops: float = 2e12) -> Problem:
    while True:
        call = _heads(dice) | {"direction": "cache", "causal": True}
        batch = dice.choice([1, 1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 256])
        longest = 2 ** dice.randint(9, 17)
        kind = dice.choice(["equal", "random", "random", "skewed"])
        if kind == "equal":
            keys = [longest] * batch
        elif kind == "random":
            keys = [dice.randint(1, longest) for _ in range(batch)]
        else:
            keys = [longest // dice.choice([4, 8, 16, 32]) for _ in range(batch)]
            keys[0] = longest
        page = dice.choice([0, 0, 1, 16, 16, 64, 64, 128, 256])
        queries: tuple[int, ...] = ()
        use = dice.random()
        if use < 0.6:
            seqlen_q = 1
        elif use < 0.8:
            seqlen_q = dice.choice([2, 3, 4, 5, 7, 8, 16])
        else:
            seqlen_q = dice.choice([256, 512, 1024, 2048])
            if use > 0.9:  # a mixed batch
                queries, page = (*[1] * (batch - 1), seqlen_q), page or 64
        if page and seqlen_q <= 16 and dice.random() < 0.4:
            queries = (seqlen_q,) * batch  # as engines call, varlen
        if seqlen_q > longest or (page == 1 and sum(keys) > 2**19):
            continue
        least = [*queries] if queries else [seqlen_q] * batch
        keys = [max(k, q) for k, q in zip(keys, least)]
        problem = Problem(
            **call, batch=batch, seqlen_q=seqlen_q, seqlen_k=longest, page=page, keys=tuple(keys),
            queries=queries, window=dice.choice(WINDOWS) if dice.random() < 0.15 else -1,
            codes=dice.random() < 0.25 and call["head_dim"] <= 256,
        )  # fmt: skip
        rows = sum(keys) if page else batch * longest
        fits = 4 * rows * problem.heads_kv * problem.head_dim < most_bytes
        if problem.codes and problem.flops > most_flops / 10:
            continue  # only decoded
        if fits and problem.flops < most_flops and problem.head_dim == problem.head_dim_v:
            return problem
