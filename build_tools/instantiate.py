"""Turns the rows of csrc/variants.py into one short .cu file each, and the C++ registry."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

CSRC = Path(__file__).resolve().parent.parent / "csrc"

_ELEMENT = {"bf16": "cutlass::bfloat16_t", "fp16": "cutlass::half_t"}

_KERNEL = """\
// Generated from csrc/variants.py.
#include "{arch}/launch.h"

namespace flash {{
using Config_{name} = {arch}::ForwardConfig<{element}, {head_dim}, {block_m}, {block_n}, {warps},
                                            {arch}::ScoreLevel::{level}>;
extern int const smem_{name} = {arch}::kSmemBytes<Config_{name}>;
void launch_{name}(FwdParams const& params, DeviceInfo const& device, cudaStream_t stream) {{
  {arch}::launch_forward<Config_{name}>(params, device, stream, "{name}");
}}
}}  // namespace flash
"""

_DECLARATION = """\
extern int const smem_{name};
void launch_{name}(FwdParams const&, DeviceInfo const&, cudaStream_t);
"""

_ROW = """\
      {{"{name}", "{direction}", {sm}, "{dtype}", {head_dim}, {head_dim_v}, {block_m}, {block_n},
       {warps}, {stages}, "{scores}", "{why}", smem_{name}, launch_{name}}},
"""

_REGISTRY = """\
// Generated from csrc/variants.py.
#include "host/variant.h"

namespace flash {{
{declarations}
std::span<Variant const> variants() {{
  static Variant const rows[] = {{
{rows}  }};
  return rows;
}}
}}  // namespace flash
"""


def load_table():
    """The module csrc/variants.py, without putting csrc on the path."""
    name = "flash_attn_variants"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, CSRC / "variants.py")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


def rows_for(archs: list[str]) -> list:
    """The rows a build for `archs` ("80", "90a", …) contains: each family that runs there.

    The sm80 family also serves newer GPUs, so it is always in.
    """
    newest = max(int(arch.rstrip("af")) for arch in archs)
    return [v for v in load_table().VARIANTS if int(v.arch[2:]) <= newest]


def _fields(variant) -> dict:
    return dict(
        vars(variant),
        name=variant.name,
        sm=int(variant.arch[2:]),
        element=_ELEMENT[variant.dtype],
        level=variant.scores.capitalize(),
    )


def _write(path: Path, text: str) -> Path:
    """Leaves an unchanged file alone, so that it is not compiled again."""
    if not path.exists() or path.read_text() != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return path


def generate(out_dir: Path, archs: list[str]) -> list[Path]:
    """Writes the instantiations and the registry for `archs` and returns their paths."""
    variants = [_fields(v) for v in rows_for(archs)]
    out_dir = Path(out_dir)
    files = [_write(out_dir / f"{v['name']}.cu", _KERNEL.format(**v)) for v in variants]
    registry = _REGISTRY.format(
        declarations="".join(_DECLARATION.format(**v) for v in variants),
        rows="".join(_ROW.format(**v) for v in variants),
    )
    return [*files, _write(out_dir / "registry.cpp", registry)]


if __name__ == "__main__":
    for generated in generate(Path(sys.argv[1]), sys.argv[2].split(";")):
        print(generated)
