"""The tables of docs/switches.md, from those of the code: `--check` or `--write`."""

from __future__ import annotations

import sys

from build_tools import page_table
from build_tools.page_table import between
from build_tools.switches import table

PAGE = page_table.DOCS / "switches.md"
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
    return page_table.main(argv, "switch_page", PAGE, rewritten)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
