"""Text that every machine with Python has: the standard library's own source files."""

from __future__ import annotations

import random
import sysconfig
from pathlib import Path

import torch
from torch import Tensor

from examples.gpt.model import Packed

# A file every so many is held out: whole files, so that no line of theirs is ever trained on.
HELD_OUT_EVERY = 20


def standard_library_files() -> list[bytes]:
    """The sources at the top of the library and in its packages, tests left out."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skip = {"test", "tests", "site-packages", "dist-packages", "idlelib", "lib2to3", "encodings"}
    files = []
    for path in sorted(root.rglob("*.py")):
        if not skip.intersection(path.relative_to(root).parts[:-1]):
            text = path.read_bytes()
            if len(text) > 512:
                files.append(text)
    return files


class Corpus:
    """Files split into training and held-out ones, drawn as packed batches of varied lengths."""

    def __init__(self, tokens_per_batch: int, max_seqlen: int, seed: int = 0):
        files = standard_library_files()
        self.held_out = files[::HELD_OUT_EVERY]
        self.train = [f for i, f in enumerate(files) if i % HELD_OUT_EVERY]
        self.tokens_per_batch = tokens_per_batch
        self.max_seqlen = max_seqlen
        self.random = random.Random(seed)
        self.bytes = sum(map(len, self.train))

    def batch(self) -> Packed:
        return self._pack(self.train, self.random)

    def held_out_batches(self, count: int) -> list[Packed]:
        """The same ones every time."""
        draw = random.Random(1)
        return [self._pack(self.held_out, draw) for _ in range(count)]

    def rows(self, count: int, length: int, *, held_out: bool) -> Tensor:
        """Pieces of one length, (count, length) int64, the same ones every time."""
        draw = random.Random(2)
        files = [f for f in (self.held_out if held_out else self.train) if len(f) >= length]
        rows = []
        for file in draw.choices(files, [len(f) for f in files], k=count):
            start = draw.randint(0, len(file) - length)
            rows.append(list(file[start : start + length]))
        return torch.tensor(rows)

    def _pack(self, files: list[bytes], draw: random.Random) -> Packed:
        """Random pieces of random files, 64 to ``max_seqlen`` bytes, until the batch is full."""
        weights = [len(f) for f in files]
        pieces, room = [], self.tokens_per_batch
        while room > 0:
            (file,) = draw.choices(files, weights)
            longest = min(room, self.max_seqlen, len(file) - 1)
            length = draw.randint(min(64, longest), longest)
            start = draw.randint(0, len(file) - 1 - length)
            pieces.append(
                torch.frombuffer(bytearray(file[start : start + length + 1]), dtype=torch.uint8)
            )
            room -= length
        lengths = torch.tensor([0] + [len(p) - 1 for p in pieces])
        return Packed(
            tokens=torch.cat([p[:-1] for p in pieces]).long(),
            targets=torch.cat([p[1:] for p in pieces]).long(),
            cu_seqlens=lengths.cumsum(0).int(),
            max_seqlen=int(lengths.max()),
        )
