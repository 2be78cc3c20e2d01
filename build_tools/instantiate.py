"""Turns the rows of csrc/variants.py into short .cu files and the C++ registry.

Rows that have much in common share a file: what takes the compiler's time is reading CUTLASS and
working out CuTe's layouts, and both are done once for all of them. The machine code of each is the
same as it is alone.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Callable
from pathlib import Path

from build_tools.plan import arch_number
from build_tools.targets import FAMILIES, common_targets, targets

CSRC = Path(__file__).resolve().parent.parent / "csrc"

_ELEMENT = {
    "bf16": "cutlass::bfloat16_t",
    "fp16": "cutlass::half_t",
    "e4m3": "cutlass::float_e4m3_t",
}

_LEVELS = ("plain", "full")  # csrc/params/scores.h

_FILE = """\
// Generated from csrc/variants.py.
#include "{folder}/launch.h"

namespace flash {{
{kernels}
}}  // namespace flash
"""

# A direction's member of Launch, and the folder of its kernels, unless they are of another kind
# (_FOLDER).
_MEMBER = {
    "fwd": "forward",
    "bwd": "backward",
    "paged": "forward",
    "decode": "decode",
    "wide": "decode",
    "latent": "decode",
    "append": "append",
}

# Folders of kernels that are not named architecture/member. Without "passes/" they are also the
# namespaces.
_FOLDER = {
    ("decode", "sm80"): "decode",
    ("wide", "sm80"): "wide",
    ("latent", "sm80"): "wide",
    ("latent", "sm90"): "sm90/latent",
    ("append", "sm80"): "passes/append",
}

# Directions that take another's parameters, with a config of their own.
_PARAMS = {"paged": "Fwd", "wide": "Decode", "latent": "Decode"}
_KIND = {"paged": "Paged", "wide": "Wide", "latent": "Latent"}

# What a direction's config, or an architecture's of it, is made of, after the element type.
_CONFIG = {
    "fwd": ("head_dim", "head_dim_v", "block_m", "block_n", "warps"),
    "fwd_sm90": (
        "head_dim",
        "head_dim_v",
        "block_m",
        "block_n",
        "warps",
        "stages",
        "second_block_n",
        "cached_bits",
    ),
    "bwd": ("head_dim", "head_dim_v", "block_m", "block_n", "warps", "key_warps", "stages"),
    "bwd_sm90": ("head_dim", "head_dim_v", "block_m", "block_n", "warps", "stages"),
    "paged": ("head_dim", "head_dim_v", "block_m", "block_n", "warps"),
    "decode": ("head_dim", "head_dim_v", "block_m", "block_n", "warps", "stages", "cached_bits"),
    "wide": ("head_dim", "head_dim_v", "block_m", "block_n", "warps", "stages"),
    "latent": ("head_dim", "head_dim_v", "block_m", "block_n", "warps", "stages"),
    "append": ("block_m",),
}

# Directions whose kernels compile so quickly that sm80's of every head dim share a file, and it is
# still not the longest one.
_QUICK = frozenset({"fwd", "paged", "decode", "wide", "latent"})

# An alias: a struct would bring the row's name into the kernel's, but the compiler then makes other
# code, and the tiles were chosen, and freed of spills, with this one.
_KERNEL = """
using Config_{name} = {space}::{Kind}Config<{element}, {config}, ScoreLevel::{level}>;
extern int const smem_{name} = {space}::{smem_bytes}<Config_{name}>;
void launch_{name}({params} const& params, LaunchContext const& launch) {{
  {space}::launch_{launch}<Config_{name}>(params, launch);
}}
"""

_DECLARATION = """\
extern int const smem_{name};
void launch_{name}({params} const&, LaunchContext const&);
"""

_ROW = """\
      {{"{name}", Direction::{Direction}, {sm}, "{dtype}", {head_dim}, {head_dim_v},
       {block_m}, {block_n}, {warps}, {stages}, "{scores}", "{why}", {second_block_n},
       {cached_bits}, smem_{name}, {cluster}, {{.{member} = launch_{name}}}}},
"""

_REGISTRY = """\
// Generated from csrc/variants.py.
#include "launch/device.h"
#include "launch/variant.h"
#include "linear/vector_launches.h"

// A row names the launch of its direction; the others are null.
#pragma GCC diagnostic ignored "-Wmissing-field-initializers"

namespace flash {{
{declarations}
std::span<Variant const> variants() {{
  static Variant const rows[] = {{
{rows}  }};
  return rows;
}}

CompiledCode compiled_code() {{
  static constexpr int capabilities[] = {{{capabilities}}};
  return {{capabilities, {ptx}}};
}}

{hopper}
}}  // namespace flash
"""

# Whether the library has what is compiled from csrc/sm90/linear.
_HOPPER = {
    True: """\
namespace sm90::linear {
extern flash::linear::VectorWalk const vector_walks_bf16[];
extern flash::linear::VectorWalk const vector_walks_fp16[];
}  // namespace sm90::linear

linear::HopperWalks linear::hopper_walks() {
  return {sm90::linear::vector_walks_bf16, sm90::linear::vector_walks_fp16};
}""",
    False: "linear::HopperWalks linear::hopper_walks() { return {}; }",
}


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
    """The rows that a build for `archs` ("80", "90a", …) compiles to machine code."""
    table = load_table().VARIANTS
    return [row for row in table if targets(row, archs)]


def file_stem(row) -> str:
    """The name of the row's .cu file: what its rows have in common."""
    if row.arch == "sm80" and _kind(row) in _QUICK:
        return family_stem(row)
    head, _, _ = row.name.partition(f"_{row.scores}")
    codes = "_e4m3" if row.cached_bits == 8 else ""
    return head.replace(f"_{row.dtype}_", "_") + codes


def family_stem(row) -> str:
    """The same for files with every head dim of a family's direction: the least work of all, but
    the longest file alone takes longer than many cores take for the rest."""
    codes = "_e4m3" if row.cached_bits == 8 else ""
    return f"{'paired_' if row.cluster > 1 else ''}{_kind(row)}_{row.arch}{codes}"


def _kind(row) -> str:
    """The row's direction; "wide" is a decode with kernels of another folder."""
    return "wide" if row.wide else row.direction


def kernel_name(stem: str, mangled: str) -> str:
    """The name of a kernel of the file `stem`.cu: its row's, or the file's if it has none."""
    for row in load_table().VARIANTS:
        if file_stem(row) == stem and re.search(_mangled_config(row), mangled):
            return row.name
    return stem


def _mangled_config(row) -> str:
    """A pattern for the template arguments that a row gives its config."""
    element = _ELEMENT[row.dtype].removeprefix("cutlass::")
    numbers = "".join(f"Li{getattr(row, field)}E" for field in config_fields(row))
    return f"{element}E{numbers}L[A-Z0-9_]*ScoreLevelE{_LEVELS.index(row.scores)}E"


def config_fields(row) -> tuple[str, ...]:
    return _CONFIG.get(f"{row.direction}_{row.arch}") or _CONFIG[_kind(row)]


def _fields(variant) -> dict:
    kind = _kind(variant)
    member = _MEMBER[kind]
    own = f"sm90::{member}" if variant.arch == "sm90" else variant.arch
    folder = _FOLDER.get((kind, variant.arch))
    return dict(
        vars(variant),
        name=variant.name,
        sm=int(variant.arch[2:]),
        Direction=variant.direction.capitalize(),
        element=_ELEMENT[variant.dtype],
        level=variant.scores.capitalize(),
        member=member,
        launch=("paired_" if variant.cluster > 1 else "") + member,
        folder=folder or f"{variant.arch}/{'paired_' * (variant.cluster > 1)}{member}",
        space=folder.removeprefix("passes/").replace("/", "::") if folder else own,
        Kind=("Paired" if variant.cluster > 1 else "") + _KIND.get(kind, member.capitalize()),
        smem_bytes="kPairedSmemBytes" if variant.cluster > 1 else "kSmemBytes",
        config=", ".join(str(getattr(variant, field)) for field in config_fields(variant)),
        params=_PARAMS.get(kind, kind.capitalize()) + "Params",
    )


def _write(path: Path, text: str) -> Path:
    """Leaves an unchanged file alone, so that it is not compiled again."""
    if not path.exists() or path.read_text() != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return path


def _kernel_file(rows: list) -> str:
    kernels = "".join(_KERNEL.format(**_fields(row)) for row in rows)
    return _FILE.format(**_fields(rows[0]), kernels=kernels)


def generate(out_dir: Path, archs: list[str], stem: Callable[..., str] = file_stem) -> list[Path]:
    """Writes the instantiations and the registry for `archs` and returns their paths; `stem` of a
    row is the name of its file."""
    rows = rows_for(archs)
    out_dir = Path(out_dir)
    by_file: dict[str, list] = {}
    for row in rows:
        by_file.setdefault(stem(row), []).append(row)
    files = [_write(out_dir / f"{name}.cu", _kernel_file(own)) for name, own in by_file.items()]
    variants = [_fields(row) for row in rows]
    registry = _REGISTRY.format(
        declarations="".join(_DECLARATION.format(**v) for v in variants),
        rows="".join(_ROW.format(**v) for v in variants),
        capabilities=", ".join(str(arch_number(arch)) for arch in archs),
        ptx=str(any("code=compute_" in flag for flag in common_targets(archs))).lower(),
        hopper=_HOPPER[FAMILIES["sm90"] in archs],
    )
    return [*files, _write(out_dir / "registry.cpp", registry)]


if __name__ == "__main__":
    for generated in generate(Path(sys.argv[1]), sys.argv[2].split(";")):
        print(generated)
