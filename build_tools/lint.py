"""ruff, clang-format and a limit on file length; `--fix` rewrites what can be rewritten."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CPP_SUFFIXES = {".h", ".cuh", ".cpp", ".cu"}
CPP_FOLDERS = ("csrc", "tests/unit")
# One idea per file.
MAX_LINES = 500


def tracked() -> list[Path]:
    """Files git knows or would add; all files where there is no git."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode == 0:
        return [path for name in done.stdout.splitlines() if (path := ROOT / name).is_file()]
    folders = ("build_tools", "csrc", "flash_attn", "tests", "examples", "benchmarks")
    return [path for name in folders for path in (ROOT / name).rglob("*") if path.is_file()]


def too_long(paths: list[Path]) -> list[str]:
    # Stubs are written by build_tools/stubs.py, not by hand.
    counted = [path for path in paths if path.suffix in {".py", ".md", *CPP_SUFFIXES}]
    lengths = {path: len(path.read_text().splitlines()) for path in counted}
    return [
        f"{path.relative_to(ROOT)}: {lines} lines, more than {MAX_LINES}: split it by idea"
        for path, lines in lengths.items()
        if lines > MAX_LINES
    ]


def commands(paths: list[Path], fix: bool) -> list[list[str]]:
    tools = Path(sys.executable).parent
    ruff, clang_format = str(tools / "ruff"), str(tools / "clang-format")
    cpp = [
        str(path.relative_to(ROOT))
        for path in paths
        if path.suffix in CPP_SUFFIXES and str(path.relative_to(ROOT)).startswith(CPP_FOLDERS)
    ]
    found = [
        [ruff, "check", *(["--fix"] if fix else []), "."],
        [ruff, "format", *([] if fix else ["--check"]), "."],
    ]
    if cpp:
        found.append([clang_format, *(["-i"] if fix else ["--dry-run", "-Werror"]), *cpp])
    return found


def main(argv: list[str]) -> int:
    paths = tracked()
    codes = [subprocess.run(c, cwd=ROOT).returncode for c in commands(paths, "--fix" in argv)]
    sentences = too_long(paths)
    print(*sentences, sep="\n", end="\n" if sentences else "", file=sys.stderr)
    return int(any(codes) or bool(sentences))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
