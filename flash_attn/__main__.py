"""``python -m flash_attn``: what is installed, what it would use, and whether it works here."""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import sys
from typing import Any

import torch

import flash_attn
from flash_attn import _selftest, backend

_CODE = {
    "machine code": "sm_{sm}: machine code",
    "PTX": "sm_{sm}: PTX, which the driver compiles when a kernel is first called, and keeps",
    "none": "sm_{sm}: none; it can be built for sm_80 and newer",
}
_COLUMNS = ("name", "head_dim", "head_dim_v", "block_m", "block_n", "warps", "stages", "why")


def report() -> dict[str, Any]:
    """Everything that is printed, apart from the self-test."""
    gpus = []
    for i in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(i)
        sm = major * 10 + minor
        name, code = torch.cuda.get_device_name(i), backend.device_code(sm)
        gpus.append({"name": name, "sm": sm, "code": code})
    problem = backend.cuda_problem()
    if not problem and not gpus:
        problem = "no GPU was found"
    return {
        "version": flash_attn.__version__,
        "build": flash_attn.__build__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "library": str(backend.library_path()) if backend.library is not None else None,
        "backends": ["cpu"] if problem else ["cpu", "cuda"],
        "why_no_cuda": problem or None,
        "gpus": gpus,
        "variants": backend.compiled_variants(),
    }


def _is_complete_without_gpu(found: dict[str, Any]) -> bool:
    """A laptop: no kernels, and nothing that they would run on. A library that does not load is
    another matter."""
    return not found["gpus"] and not backend.library_path().exists() and not found["variants"]


def _print_report(found: dict[str, Any]) -> None:
    gpus = [f"{gpu['name']} (sm_{gpu['sm']})" for gpu in found["gpus"]]
    rows = {
        "flash_attn": f"{found['version']} (build {found['build']})",
        "Python": found["python"],
        "torch": f"{found['torch']} (CUDA {found['torch_cuda'] or 'none'})",
        "GPU": ", ".join(gpus) or "none",
        "library": found["library"] or "none",
        "backends": ", ".join(found["backends"]),
    }
    if _is_complete_without_gpu(found):
        rows["library"] = "none, and none is needed without a GPU: the CPU backend does everything"
    elif found["why_no_cuda"]:
        rows["no CUDA:"] = found["why_no_cuda"]
    else:
        lines = [_CODE[gpu["code"]].format_map(gpu) for gpu in found["gpus"]]
        rows["GPU code"] = "; ".join(dict.fromkeys(lines))
    for name, value in rows.items():
        print(f"{name:<12}{value}")
    if _is_complete_without_gpu(found):
        return
    variants = found["variants"]
    print(f"\n{len(variants)} compiled CUDA kernels")
    if variants:
        _print_table([_COLUMNS, *[[str(row.get(c, "")) for c in _COLUMNS] for row in variants]])


def _print_table(rows: list) -> None:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        print("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())


def _self_test(devices: list[str], quiet: bool) -> list[_selftest.Result]:
    if not quiet:
        print("\nself-test against float64")
    results = []
    for device in devices:
        for result in _selftest.run(device):
            results.append(result)
            if not quiet:
                print(f"  {result.status:<8}{result.name:<28}{result.detail}", flush=True)
    return results


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code: 1 if a test failed, else 0."""
    parser = argparse.ArgumentParser("python -m flash_attn", description=__doc__)
    about = f"flash_attn {flash_attn.__version__} (build {flash_attn.__build__})"
    parser.add_argument("--version", action="version", version=about)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--no-test", action="store_true", help="skip the self-test")
    options = parser.parse_args(arguments)

    found = report()
    if not options.json:
        _print_report(found)
    results = [] if options.no_test else _self_test(found["backends"], quiet=options.json)
    failed = sum(result.status == "failed" for result in results)
    if options.json:
        found["self_test"] = [dataclasses.asdict(result) for result in results]
        print(json.dumps(found, indent=2))
    elif results:
        print(f"{failed} of {len(results)} tests failed" if failed else "all tests passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
