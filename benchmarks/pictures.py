"""The documents' pictures, from the committed figures: `make pictures`.

    python -m benchmarks.pictures [docs/h200.png ...]

Each picture names the figures that it shows by their digest, so that a test sees when they differ.
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks import curves, report, ring_model, steps

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"


@dataclass(frozen=True)
class Picture:
    figures: tuple[str, ...]  # files of RESULTS
    draw: Callable[[list[Path], Path], None]  # of these files, to a path

    @property
    def sources(self) -> list[Path]:
        return [RESULTS / name for name in self.figures]

    def digest(self) -> str:
        return hashlib.sha256(b"".join(p.read_bytes() for p in self.sources)).hexdigest()[:16]


def _machine(path: Path) -> str:
    _, machine = report.read_json(path)
    where = machine.get("gpu") or f"a CPU, {machine['cpu_threads']} threads"
    return f"{where}, torch {machine['torch'].split('+')[0]}"


def _curves(paths: list[Path], out: Path) -> None:
    size = "batch × sequence length = 16,384 tokens, as many heads of k and v as of q"
    curves.draw(curves.read(paths), out, f"{_machine(paths[0])}, bf16; {size}")


def _linear(paths: list[Path], out: Path) -> None:
    rows, _ = report.read_json(paths[0])
    size = (
        "one causal layer, bf16, hidden size 2,048 (heads × head_dim); by head_dim: batch 4 of "
        "4,096 tokens;\nby seqlen: 16 heads of 128, batch × sequence length = 16,384 tokens up to "
        "16k, batch 1 beyond"
    )
    report.plot(out, rows, f"{_machine(paths[0])}; {size}")


def _steps(paths: list[Path], out: Path) -> None:
    size = "bf16, 32 heads of q and 8 of k and v, head_dim 128, causal,\nreplayed from a CUDA graph"
    steps.draw(steps.read(paths[0]), out, f"{_machine(paths[0])}; {size}")


def _wide(paths: list[Path], out: Path) -> None:
    curves.draw(curves.read(paths), out, f"{_machine(paths[0])}, bf16;\n16,384 tokens in a batch")


def _fp8(paths: list[Path], out: Path) -> None:
    curves.draw(curves.read(paths), out, f"{_machine(paths[0])};\n16,384 tokens in a batch")


def _fp8_cache(paths: list[Path], out: Path) -> None:
    """Decoding, by the bytes of codes, beside torch's sum of them."""
    names = {"fp8": "codes", "fp8, scales of rows": "of rows", "read": "torch's sum"}
    rows = [
        replace(
            row, preset="a step", problem=row.problem.replace("graph", "decode").split(", page")[0],
            rates={names.get(name, name): rate for name, rate in row.rates.items()},
        )
        for row in report.read_json(paths[0])[0]
        if "1 query" in row.problem or "4 queries" in row.problem
    ]  # fmt: skip
    size = "bytes of a cache's codes, by time; 32/8 heads and d 128 where not said, pages of 64"
    report.plot(out, rows, f"{_machine(paths[0])};\n{size}")


def _mla(paths: list[Path], out: Path) -> None:
    """Products count with 128 heads, bytes with 16: beside torch's sum of them."""
    rows = []
    for row in report.read_json(paths[0])[0]:
        by_bytes = row.unit == "GB/s"
        rates = {name: rate for name, rate in row.rates.items() if by_bytes or name != "read"}
        heads = "16 heads" if by_bytes else "128 heads"
        rows.append(replace(row, preset=f"latent attention, {heads}", rates=rates))
    size = "latent attention 576/512, bf16, full caches in pages of 64; q: queries"
    report.plot(out, rows, f"{_machine(paths[0])};\n{size}")


def _cpu(paths: list[Path], out: Path) -> None:
    rows, _ = report.read_json(paths[0])
    report.plot(out, rows, _machine(paths[0]))


def _ring(paths: list[Path], out: Path) -> None:
    layers = [ring_model.Layer(n) for n in (2**17, 2**20, 2**23)]
    ring_model.plot(out, layers, ring_model.Machine())


PICTURES = {
    "docs/h200.png": Picture(("h200_fwd.json", "h200_bwd.json"), _curves),
    "docs/wide.png": Picture(("h200_wide.json",), _wide),
    "docs/fp8.png": Picture(("h200_fp8_forward.json",), _fp8),
    "docs/fp8_cache.png": Picture(("h200_fp8.json",), _fp8_cache),
    "docs/mla.png": Picture(("h200_mla.json",), _mla),
    "docs/linear.png": Picture(("h200_linear.json",), _linear),
    "docs/serve.png": Picture(("h200_serve.json",), _steps),
    "docs/cpu.png": Picture(("cpu.json",), _cpu),
    "docs/distributed.png": Picture(("h200_ring.json",), _ring),
}
DIGEST = "Figures"


def draw(name: str, out: Path) -> None:
    from PIL import Image, PngImagePlugin  # matplotlib brings it

    picture = PICTURES[name]
    picture.draw(picture.sources, out)
    told = PngImagePlugin.PngInfo()
    told.add_text(DIGEST, picture.digest())
    with Image.open(out) as image:
        image.convert("RGB").save(out, pnginfo=told, optimize=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.pictures", description=__doc__.splitlines()[0]
    )
    parser.add_argument("names", nargs="*", help=f"some of {', '.join(PICTURES)} (default: all)")
    options = parser.parse_args()
    if unknown := set(options.names) - set(PICTURES):
        parser.error(f"no picture {', '.join(sorted(unknown))}; there are {', '.join(PICTURES)}")
    for name in options.names or PICTURES:
        draw(name, ROOT / name)
        print(name)


if __name__ == "__main__":
    main()
