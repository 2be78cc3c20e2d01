"""Rows of the table, and the names that tests give to them and to their cases."""

from __future__ import annotations

from cases import BF16, FP16

from build_tools.instantiate import load_table

TABLE = load_table().VARIANTS
# Of 16 bits; those of codes have suites of their own.
FORWARDS = [v for v in TABLE if (v.direction, v.cached_bits) == ("fwd", 16)]
DTYPES = {"bf16": BF16, "fp16": FP16}


def id_of(x) -> str:
    return x.name
