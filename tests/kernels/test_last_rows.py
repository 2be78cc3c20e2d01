"""The last rows of a forward for Hopper, cut along the keys beside the last round of the others."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

import pytest
import torch

from build_tools.instantiate import load_table

from .test_hopper_forward import check_dense
from .test_key_splits import DTYPES, id_of

ROWS = [
    v for v in load_table().VARIANTS if (v.direction, v.arch, v.scores) == ("fwd", "sm90", "plain")
]


@dataclass
class Cut:
    kernels: ModuleType
    rows: int
    parts: int

    def run(self, variant: str, call: dict) -> None:
        self.kernels.run(variant, call | {"last_rows": self.rows, "key_splits": self.parts})


@pytest.mark.parametrize("row", ROWS, ids=id_of)
@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize(("behind", "parts"), [(0, 2), (70, 3)])
def test_rows_behind_whole_ones(kernels, row, group, behind, parts):
    """Two row blocks whole; parts of what is left, and of more than that."""
    gen = torch.Generator().manual_seed(group)
    sq = 3 * row.block_m + behind
    q = torch.randn(2, sq, 2 * group, row.head_dim, generator=gen).to(DTYPES[row.dtype])
    k = torch.randn(2, 700, 2, row.head_dim, generator=gen).to(q.dtype)
    v = torch.randn(2, 700, 2, row.head_dim_v, generator=gen).to(q.dtype)
    check_dense(Cut(kernels, sq - 2 * row.block_m, parts), row, q, k, v)
