"""Clients run on the CPU backend and on a GPU; kernels on the host take minutes for a model."""

from __future__ import annotations

import sys
import tempfile
from importlib import metadata
from pathlib import Path

import pytest

import flash_attn
from tests.devices import GPU


def _make_known() -> None:
    """Clients ask for an installed distribution, which a checkout on the path alone is not."""
    try:
        metadata.version("flash-attn")
    except metadata.PackageNotFoundError:
        version = flash_attn.__version__
        site = tempfile.mkdtemp()
        folder = Path(site, f"flash_attn-{version}.dist-info")
        folder.mkdir()
        (folder / "METADATA").write_text(f"Name: flash-attn\nVersion: {version}\n")
        (folder / "top_level.txt").write_text("flash_attn\nflash_attn_2_cuda\n")
        sys.path.append(site)


_make_known()  # before a client is imported: some look once


@pytest.fixture(params=["cpu", GPU])
def device(request) -> str:
    return request.param
