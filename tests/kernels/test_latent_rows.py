"""Latent caches on Hopper: which kernel serves a call, and clusters that share a tile."""

import json
from dataclasses import replace

import pytest
import test_latent
from cache_cases import CacheCase
from cases import FP16

from tests.kernels import library

# A call, and the family of the kernel that it runs.
CALLS = {
    "rows": ({}, 90),
    "left_padding": ({"leftpad": (3, 0)}, 90),
    "pages": ({"page_size": 64}, 90),
    "small_pages": ({"page_size": 8}, 90),
    "pages_of_12": ({"page_size": 12}, 80),
    "left_padding_in_pages": ({"page_size": 16, "leftpad": (3, 0)}, 80),
}


@pytest.mark.parametrize("name", CALLS)
def test_row(kernels, monkeypatch, name):
    options, family = CALLS[name]
    case = CacheCase(name, b=2, h=4, hk=1, d=64, dv=512, cache_seqlens=(70, 9), cache_size=80)
    lines: list[str] = []
    with library.serving(monkeypatch, 90):
        library.module().trace_to(lines.append)
        test_latent.check(replace(case, **options), "cpu")
        library.module().trace_to(None)
    assert [line for line in lines if f"latent_sm{family}_bf16_d64x512_plain" in line]


CLUSTERED = [
    dict(name="one", b=1, cache_seqlens=(300,), cache_size=300),
    # One cluster's CTAs have no keys, and some of another's have none.
    dict(name="several", h=20, sq=3, cache_seqlens=(200, 0, 130), cache_size=200, sinks=True),
    dict(name="full_tiles", b=1, h=70, cache_seqlens=(190,), cache_size=200, page_size=8),
    dict(name="mods", b=2, sq=2, cache_seqlens=(200, 70), cache_size=200, softcap=5.0, alibi="h"),
    # Each CTA fills its buffers more than once.
    dict(name="long", b=1, h=2, cache_seqlens=(970,), cache_size=970),
    dict(
        name="window", b=1, h=6, hk=2, sq=2, cache_seqlens=(400,), cache_size=400, window=(150, 0)
    ),
    dict(name="narrow", b=1, d=40, dv=200, cache_seqlens=(150,), cache_size=160, dtype=FP16),
]


@pytest.mark.parametrize("cluster", [2, 4, 8, 16])
@pytest.mark.parametrize("options", CLUSTERED, ids=lambda options: options["name"])
def test_clusters(kernels, monkeypatch, options, cluster):
    """CTAs that share a tile's keys send each other their rows."""
    case = CacheCase(**dict(h=4, hk=1, d=64, dv=512) | options)
    with library.serving(monkeypatch, 90):
        module = library.module()
        module.record_plans(True)
        try:
            test_latent.check(case, "cpu")
        finally:
            plans = json.loads(module.record_plans(False))
        choices = [choice["text"] for choice in plans["decode"]["choices"]]
        module.force_choice(-1, choices.index(f"clusters of {cluster}"))
        try:
            test_latent.check(case, "cpu")
        finally:
            module.force_choice(-1, -1)
