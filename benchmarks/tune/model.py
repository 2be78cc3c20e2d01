"""The cost model (csrc/plan), compiled for the host: choices and times with other numbers."""

from __future__ import annotations

import ctypes
import functools
import subprocess
import tempfile
from pathlib import Path

import numpy as np

from benchmarks.regret.problems import Problem
from build_tools import host_compiler
from csrc.variants import VARIANTS, Variant

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc"
FLAGS = ["-std=c++20", "-O2", "-fPIC", "-shared", f"-I{CSRC}"]


def can_be_predicted(problem: Problem) -> bool:
    """Not mixed batches, whose choices are measured beside those of another kernel, nor pages that
    Hopper's kernels do not take."""
    is_mixed = len(set(problem.queries)) > 1
    return not is_mixed and (problem.codes or problem.page % 8 == 0)


def _row(direction: str, arch: str, problem: Problem, bits: int = 16) -> Variant:
    """The first row that is large enough, as in csrc/launch/select.cpp."""
    return next(
        row for row in VARIANTS
        if (row.direction, row.arch, row.dtype) == (direction, arch, "bf16")
        and row.cached_bits == bits
        and problem.head_dim <= row.head_dim and problem.head_dim_v <= row.head_dim_v
    )  # fmt: skip


def _numbers(p: Problem) -> list[int]:
    """A call as model.cpp takes it, with the rows that serve it (csrc/launch/*_plan.cpp)."""
    cache, varlen, backward = p.direction == "cache", bool(p.lengths or p.queries), [0] * 4
    keys = -(-max(p.keys) // p.page) * p.page if cache and p.page else p.seqlen_k
    rows = [sum(p.lengths)] * 2 if p.lengths else [p.batch * p.seqlen_q, p.batch * keys]
    forward, decode = [0] * 5, [0] * 8
    if p.direction == "backward":
        row = _row("bwd", "sm90", p)
        backward = [row.block_m, row.block_n, row.head_dim, row.head_dim_v]
    else:
        row = _row("fwd", "sm90", p, 8 if p.codes else 16)
        forward = [row.head_dim, row.head_dim_v, row.block_m, row.block_n, row.second_block_n]
    cluster = row.cluster
    if cache:
        row = _row("decode", "sm80", p, 8 if p.codes else 16)
        at_once, resident = 128 * row.warps // row.head_dim_v, 1 if row.wide else 3
        unit = row.block_n * (1 if row.wide else row.warps)  # keys; warps of wide rows share them
        decode = [row.head_dim, row.head_dim_v, row.block_m, unit, at_once,
                  resident, row.warps >= 4 and not row.wide, p.codes]  # fmt: skip
    return [
        p.batch, p.seqlen_q, keys, *rows, varlen, cache, p.heads_q, p.heads_kv,
        p.head_dim, p.head_dim_v, p.window, 0 if p.causal else -1, p.deterministic, p.page,
        cluster, *backward, *forward, *decode,
    ]  # fmt: skip


@functools.cache
def _library() -> ctypes.CDLL:
    sources = [Path(__file__).with_name("model.cpp"), *sorted(CSRC.glob("plan/*.cpp"))]
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "model.so"
        words = [
            host_compiler.find(FileNotFoundError),
            *FLAGS,
            *sources,
            CSRC / "launch" / "plan_text.cpp",
            "-o",
            target,
        ]
        subprocess.run(list(map(str, words)), check=True)
        library = ctypes.CDLL(str(target))
    library.start.restype = library.add.restype = ctypes.c_char_p
    return library


class Model:
    """One at a time: a new one takes the place of the last. Begins with the numbers of the machine
    whose L2 is nearest in size. ``names``: of the numbers; of kernels' as in
    backward/128/128/tiles/fixed. sm_count 0: that machine's."""

    def __init__(self, l2_bytes: int, sm_count: int = 0):
        self._library = _library()
        self.l2_bytes = l2_bytes
        names = self._library.start(ctypes.c_int64(l2_bytes), sm_count)
        self.names = names.decode().split()
        self.sm_count = self._library.sm_count()

    @property
    def numbers(self) -> np.ndarray:
        """In the order of ``names``."""
        values = np.empty(len(self.names))
        self._library.get_numbers(ctypes.c_void_p(values.ctypes.data))
        return values

    @numbers.setter
    def numbers(self, numbers: np.ndarray) -> None:
        values = np.ascontiguousarray(numbers, dtype=np.float64)
        self._library.set_numbers(ctypes.c_void_p(values.ctypes.data))

    def add(self, problem: Problem) -> list[str]:
        """The problem's choices; problems count from 0, in the order that they were added."""
        numbers = _numbers(problem)
        return self._library.add((ctypes.c_int * len(numbers))(*numbers)).decode().splitlines()

    def predict(self, problems: np.ndarray, choices: int) -> tuple[np.ndarray, np.ndarray]:
        """µs of all choices of these problems (int32), `choices` in sum, and which are planned."""
        us, planned = np.empty(choices), np.empty(choices, dtype=bool)
        pointers = [ctypes.c_void_p(a.ctypes.data) for a in (problems, us, planned)]
        self._library.predict(len(problems), *pointers)
        return us, planned
