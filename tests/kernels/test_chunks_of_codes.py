"""Whether queries beside pages of codes become codes, too: the plan predicts both, and takes what
was faster on an H200 (docs/fp8.md has the times that were measured)."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from flash_attn import _gpus, backend
from flash_attn.call import FP8, Forward, Keys, Lengths, Scoring
from flash_attn.dispatch import fp8
from tests.kernels import library

PAGE = Path(__file__).resolve().parents[2] / "docs" / "fp8.md"
PAGE_SIZE = 64


def measured() -> list[tuple]:
    """(sequences, queries, keys, heads, KV heads, head dim, µs of codes, µs with codes of queries)
    of the page's table."""
    call = r"^\| (\d+) × ([\d,]+) of (\d+)k \| (\d+)/(\d+), (\d+) "
    row = call + r"\| [\d,]+ \| ([\d,]+) \| ([\d,]+) \|$"
    rows = re.findall(row, PAGE.read_text(), re.MULTILINE)
    return [tuple(int(number.replace(",", "")) for number in found) for found in rows]


def chunk(sequences: int, queries: int, keys: int, heads: int, heads_k: int, d: int) -> Forward:
    with torch.device("meta"):
        q = torch.empty(sequences * queries, heads, d, dtype=torch.bfloat16)
        blocks = keys * 1024 // PAGE_SIZE
        pages = torch.empty(sequences * blocks, PAGE_SIZE, heads_k, d, dtype=FP8)
        ends = torch.empty(sequences + 1, dtype=torch.int32)
        table = torch.empty(sequences, blocks, dtype=torch.int32)
    lengths = Lengths(ends, ends, queries, keys * 1024)
    scoring = Scoring(0.0, d**-0.5, True, -1, -1, 0.0, None, None)
    return Forward(q, pages, pages, scoring, lengths, Keys(table))


@pytest.fixture(autouse=True)
def simulated(monkeypatch):
    monkeypatch.setattr(backend, "library", library.module())


def test_the_faster_way_is_predicted():
    """In all calls but one, whose KV splits take longer than is predicted."""
    rows = measured()
    assert len(rows) == 11
    slower = []
    for *shape, codes, with_query_codes in rows:
        without, with_codes = fp8.predicted_us(chunk(*shape), "H200")
        if (with_codes < without) != (with_query_codes < codes):
            slower.append(shape)
    assert slower == [[8, 128, 8, 32, 8, 128]]


def test_predictions_are_those_of_explain(monkeypatch):
    """Of the forward kernel with the queries as they are; with codes, the pass comes on top."""
    _, *numbers = _gpus.GPUS["H200"]
    call = chunk(4, 1024, 8, 32, 8, 128)
    without, with_codes = fp8.predicted_us(call, "H200")
    size = (*numbers, 4, 1024, 8192, 4096, -1, 32, 8, -1, 0, 0, PAGE_SIZE, 0, 0, 0, 1, 0, 0)
    ask = library.module().explain_forward
    # Three launches, and five bytes of each number.
    of_pass = 3 * 7.0 + 5 * 4096 * 32 * 128 / 3.9e6
    for dtype, contents, us in (("bf16", 1, without), ("e4m3", 4, with_codes - of_pass)):
        plan = json.loads(ask(90, dtype, 128, 128, 0, *size, contents))["plan"]
        assert us == pytest.approx(plan["us"], rel=0.02)


def test_what_has_no_kernel_takes_for_ever():
    call = chunk(4, 1024, 8, 32, 8, 128)
    scoring = call.scoring._replace(softcap=20.0)
    _, with_codes = fp8.predicted_us(call._replace(scoring=scoring), "A100")
    assert with_codes == float("inf")
