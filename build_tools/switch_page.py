"""The tables of docs/switches.md, from those of the code: `--check` or `--write`."""

from __future__ import annotations

import sys
from pathlib import Path

from build_tools.feature_matrix import between
from build_tools.switches import table

PAGE = Path(__file__).resolve().parent.parent / "docs" / "switches.md"
TABLES = {"run time": table.AT_RUN_TIME, "build": table.AT_BUILD_TIME}


def markdown(switches: tuple) -> str:
    lines = ["| variable | takes | without it | what it does |", "|---|---|---|---|"]
    lines += [f"| `{s.name}` | {s.accepts} | {s.default} | {s.meaning} |" for s in switches]
    return "\n".join(lines)


def rewritten(text: str) -> str:
    for name, switches in TABLES.items():
        begin = f"<!-- {name}: python -m build_tools.switch_page --write -->"
        text = between(text, begin, f"<!-- end of {name} -->", markdown(switches))
    return text


def main(argv: list[str]) -> int:
    if argv not in (["--check"], ["--write"]):
        print("usage: python -m build_tools.switch_page --check | --write", file=sys.stderr)
        return 2
    text = PAGE.read_text()
    if argv == ["--write"]:
        PAGE.write_text(rewritten(text))
        return 0
    if text != rewritten(text):
        print("docs/switches.md is out of date: run with --write", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
