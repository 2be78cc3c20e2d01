"""Which of the two kernels for latent caches serves a call on Hopper."""

from dataclasses import replace

import pytest
import test_latent
from cache_cases import CacheCase

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
