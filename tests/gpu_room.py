"""Memory of one GPU that the tests of several processes share."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch


class Room:
    """Tests on a GPU run side by side; one that needs tens of gigabytes runs alone.

    Every test takes `room` shared, and passes `door` before: a test that waits to be alone keeps
    the door closed, or others would enter for ever.
    """

    def __init__(self) -> None:
        folder = Path(tempfile.gettempdir(), f"flash_attn_tests_{os.getuid()}")
        folder.mkdir(exist_ok=True)
        self._door, self._room = ((folder / name).open("w") for name in ("door", "room"))

    @contextmanager
    def entered(self) -> Iterator[None]:
        fcntl.flock(self._door, fcntl.LOCK_EX)
        fcntl.flock(self._room, fcntl.LOCK_SH)
        fcntl.flock(self._door, fcntl.LOCK_UN)
        self._is_alone = False
        try:
            yield
        finally:
            if self._is_alone:
                torch.cuda.empty_cache()
                fcntl.flock(self._door, fcntl.LOCK_UN)
            fcntl.flock(self._room, fcntl.LOCK_UN)

    def need(self, gigabytes: int) -> None:
        """Waits until no other test runs; skips where even then so much is not free."""
        fcntl.flock(self._room, fcntl.LOCK_UN)
        fcntl.flock(self._door, fcntl.LOCK_EX)
        fcntl.flock(self._room, fcntl.LOCK_EX)
        self._is_alone = True
        if torch.cuda.mem_get_info()[0] < gigabytes * 2**30:
            pytest.skip(f"{gigabytes} GiB of GPU memory are not free")
