"""GPUs whose blocks have 99 KiB of shared memory: compute capability 8.6, 8.9 and 12.x."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator

import pytest
import test_latent
from cache_cases import CacheCase, expected, make_cache, run_cached
from calls import check_backward, check_forward
from cases import FP16, Case, make_inputs
from compare import assert_accurate, assert_lse
from reference import attention_ref, standard_attention

from tests.kernels import library

SM = 120
SMEM = library.DEVICES[SM][0]
HEAD_DIMS = [(d, d) for d in (8, 32, 64, 96, 128, 192, 256, 512)]
HEAD_DIMS += [(192, 128), (64, 256), (128, 264)]
LEVELS = {"plain": {}, "full": {"softcap": 5.0}}


@pytest.fixture
def small(kernels, monkeypatch) -> Iterator[list[str]]:
    """Calls run as on such a GPU; the lines that its launches log."""
    lines: list[str] = []
    with library.serving(monkeypatch, SM):
        library.module().trace_to(lines.append)
        yield lines
        library.module().trace_to(None)


def launched(lines: list[str], direction: str) -> set[str]:
    names = {line.split(" -> ")[1].split(" ")[0] for line in lines if " -> " in line}
    return {name for name in names if name.startswith(f"{direction}_sm80_")}


@pytest.mark.parametrize(
    ("direction", "cached_bits"),
    [("fwd", 16), ("bwd", 16), ("paged", 16), ("decode", 16), ("decode", 8)],
)
def test_every_call_has_a_row_that_fits(kernels, direction, cached_bits):
    rows = json.loads(library.module().compiled_variants())
    fits = [row for row in rows if row["arch"] == 80 and row["smem_bytes"] <= SMEM]
    most = 512 if cached_bits == 16 else 256
    dims = [(d, dv) for d, dv in HEAD_DIMS if max(d, dv) <= most]
    for (d, dv), dtype, scores in itertools.product(dims, ("bf16", "fp16"), LEVELS):
        assert any(
            row["direction"] == direction
            and row["cached_bits"] == cached_bits
            and row["dtype"] == dtype
            and row["scores"] in (scores, "full")
            and row["head_dim"] >= d
            and row["head_dim_v"] >= dv
            for row in fits
        ), (d, dv, dtype, scores)


@pytest.mark.parametrize("scores", LEVELS)
@pytest.mark.parametrize(("d", "dv"), HEAD_DIMS)
def test_gradients(d, dv, scores, small):
    case = Case(b=1, sq=70, sk=133, h=2, hk=1, d=d, dv=dv, causal=True, **LEVELS[scores])
    check_backward(case, make_inputs(case, "cpu"))
    for direction in ("fwd", "bwd"):
        assert len(launched(small, direction)) == 1


def test_fp16_with_every_score_mod(small):
    options = {"alibi": "bh", "dropout_p": 0.2, "sinks": True}
    case = Case(FP16, b=1, sq=70, sk=133, h=2, hk=1, d=128, causal=True, **options)
    check_forward(case, make_inputs(case, "cpu"))
    check_backward(case, make_inputs(case, "cpu"))
    assert launched(small, "bwd") == {"bwd_sm80_fp16_d128_full_64x64"}


@pytest.mark.parametrize("scores", LEVELS)
@pytest.mark.parametrize(("sq", "direction"), [(1, "decode"), (70, "paged")])
@pytest.mark.parametrize("d", [64, 128, 256, 512])
def test_keys_in_pages(d, sq, direction, scores, small):
    sequences = {"b": 1, "cache_size": 300, "cache_seqlens": (200,), "page_size": 20}
    case = CacheCase("pages", d=d, sq=sq, **sequences, **LEVELS[scores])
    x = make_cache(case, "cpu")
    ref, std = (expected(case, x.clone(), f) for f in (attention_ref, standard_attention))
    out, lse = run_cached(case, x)
    assert_accurate("out", out, ref.out, std.out)
    assert_lse("lse", lse, ref.lse)
    assert len(launched(small, direction)) == 1


@pytest.mark.parametrize(
    ("sm", "row"),
    [
        (80, "d128_plain"),
        (86, "d128_full_64x64"),
        (87, "d128_plain"),
        (89, "d128_full_64x64"),
        (103, "d128_plain"),
        (110, "d128_plain"),
        (121, "d128_full_64x64"),
    ],
)
def test_explain_knows_what_fits(kernels, sm, row):
    """Without such a GPU, of a backward that wants 161 KiB."""
    shape = (1, 512, 512, -1, -1, 8, 8, -1, -1)
    said = library.module().explain_backward(
        sm, "bf16", 128, 128, 0, 0.0, 100, 40 << 20, 0, *shape, 0
    )
    assert json.loads(said)["variant"]["name"] == f"bwd_sm80_bf16_{row}"


@pytest.mark.parametrize("scores", LEVELS)
def test_latent_cache(scores, small):
    options = LEVELS[scores]
    case = CacheCase(
        "latent", b=2, h=3, hk=1, d=64, dv=512, cache_seqlens=(120, 7), cache_size=120, **options
    )
    test_latent.check(case, "cpu", num_splits=2)
    assert launched(small, "latent") == {f"latent_sm80_bf16_d64x512_{scores}_16x32"}
