"""Compiles flash_attn/_C.abi3.so. `python -m build_tools.build` builds it in place.

Sources: the instantiations that build_tools/instantiate.py writes from csrc/variants.py, and every
.cpp and .cu under csrc/. ninja does the rest, so an edit recompiles what depends on it and no more.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from build_tools import report, resources, switches
from build_tools.ninja_file import NinjaFile, Sources, Toolchain, object_path
from build_tools.plan import REQUEST, Plan, make_plan
from build_tools.probe import BuildError

ROOT = Path(__file__).resolve().parent.parent
# One nvcc run for one kernel file on one core; for the estimate.
SECONDS_PER_FILE = 55
# The release the table's register counts were taken with. Another compiler may spill a few bytes
# more, which is no reason to refuse an installation; there lost speed is only reported.
STRICT_NVCC = (13, 0)


def describe(plan: Plan) -> str:
    if not plan.archs:
        return f"flash-attn: building the CPU backend alone ({plan.reason})."
    archs = ", ".join(f"sm_{arch}" for arch in plan.archs)
    return (
        f"flash-attn: building kernels for {archs} ({plan.reason}) "
        f"with nvcc {plan.nvcc.release} and the headers of torch {plan.torch.version}."
    )


def build(plan: Plan, output: Path, env: Mapping[str, str] = os.environ) -> None:
    """Compiles and links the library of a plan with kernels to `output`."""
    started = time.time()
    folder = ROOT / "build" / "cuda"
    sources = _sources(plan, folder)
    toolchain = Toolchain.detect(plan, env, strict=_strict(plan, env))
    jobs = resources.job_count(resources.available_gib(), resources.cores(), env)
    library = folder / output.name
    ninja_file = NinjaFile(ROOT, folder, toolchain).write(sources, library)
    _announce(sources, jobs, toolchain)
    try:
        _run_ninja(ninja_file, jobs)
    finally:
        objects = [object_path(folder, source.path) for source in sources.kernels]
        records = report.write(objects, folder.parent)
    output.parent.mkdir(parents=True, exist_ok=True)
    _replace(library, output, started)
    _finish(output, records, time.time() - started)


def _sources(plan: Plan, folder: Path) -> Sources:
    # Late, because only a build of kernels needs the table and the headers.
    from build_tools.instantiate import generate, rows_for
    from third_party.fetch import fetch_cutlass

    fetch_cutlass()
    archs = list(plan.archs)
    return Sources.collect(ROOT / "csrc", generate(folder / "gen", archs), archs, rows_for(archs))


def _announce(sources: Sources, jobs: int, toolchain: Toolchain) -> None:
    minutes = max(1, round(len(sources.kernels) * SECONDS_PER_FILE / jobs / 60))
    cache = "with ccache" if toolchain.ccache else "without ccache"
    print(
        f"flash-attn: {len(sources.kernels)} kernel files, {len(sources.host)} host files, "
        f"{jobs} at a time "
        f"({resources.cores()} cores, {resources.available_gib():.0f} GiB free), {cache}; "
        f"about {minutes} min if nothing is built yet.",
        flush=True,
    )


def _strict(plan: Plan, env: Mapping[str, str]) -> bool:
    return switches.flag("FLASH_ATTN_STRICT", env, otherwise=plan.nvcc.version == STRICT_NVCC)


def _run_ninja(ninja_file: Path, jobs: int) -> None:
    command = [*ninja_command(), "-f", str(ninja_file)]
    env = {**os.environ, "NINJA_STATUS": "[%f/%t, %es] "}
    if subprocess.run([*command, "-j", str(jobs)], cwd=ROOT, env=env).returncode:
        raise BuildError("The kernels did not compile; the message of the first failure is above.")
    # Objects of rows that are gone: `make sass` would show them.
    subprocess.run([*command, "-t", "cleandead"], cwd=ROOT, capture_output=True)


def ninja_command() -> list[str]:
    try:
        import ninja

        return [str(Path(ninja.BIN_DIR) / "ninja")]
    except ImportError:
        pass
    found = shutil.which("ninja") or shutil.which("ninja-build")
    if found is None:
        raise BuildError("ninja is missing: pip install ninja.")
    return [found]


def _replace(source: Path, target: Path, started: float) -> None:
    # A rename, not a copy over: a process that has the old library mapped keeps it whole.
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    shutil.copy(source, temporary)
    os.utime(temporary, (started, started))  # what was edited since then may not be in it
    temporary.replace(target)


def _finish(output: Path, records: list[dict], seconds: float) -> None:
    lost = [sentence for record in records for sentence in record["lost_speed"]]
    kernels = [kernel for record in records for kernel in record["kernels"]]
    names = {kernel["name"] for kernel in kernels}
    spilling = {kernel["name"] for kernel in kernels if kernel["spills"]}
    size = output.stat().st_size / 2**20
    print(
        f"flash-attn: {output.name}, {size:.1f} MiB, {len(names)} kernels, "
        f"{len(spilling)} with spills, in {seconds:.0f} s; figures in build/report.txt."
    )
    if lost:
        print(f"flash-attn: {len(lost)} compilations lost speed with this compiler:")
        print(*(f"  {sentence}" for sentence in lost), sep="\n")


def main() -> int:
    try:
        plan = make_plan()
        print(describe(plan), flush=True)
        if plan.archs:
            build(plan, ROOT / "flash_attn" / "_C.abi3.so")
        else:
            print(f'For kernels: {REQUEST}="80;90a" make build')
    except BuildError as error:
        print(f"flash-attn: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
