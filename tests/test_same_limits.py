"""Limits of kernels that Python knows, too, because it decides by them before it calls: they are
written in C++ once more, and must be the same."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from flash_attn.dispatch import encode, fp8
from flash_attn.linear import _kernels

CSRC = Path(__file__).resolve().parents[1] / "csrc"


@pytest.mark.parametrize(
    ("value", "name", "header"),
    [
        (fp8._PAGE_ROWS, "kLeastBoxRows", "params/forward_tile.h"),
        (fp8._DECODED_ROWS, "kMostDecodeRows", "plan/decode.cpp"),
        (encode._MOST_COLUMNS, "kMostEncodedColumns", "passes/encode/launch.h"),
        (_kernels._DELTAS.max_k, "kDeltaK", "linear/delta_rule.h"),
        (_kernels._DELTA_STEPS.max_k, "kDeltaStepK", "linear/delta_step.h"),
        (encode._COLUMNS, "kChunk", "passes/encode/encode.cu"),
    ],
)
def test_python_and_cpp_have_the_same(value, name, header):
    (written,) = re.findall(rf"\b{name} = (\d+)", (CSRC / header).read_text())
    assert value == int(written)
