"""The table of other libraries' arguments in docs/porting.md: `--check` or `--write`."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

from build_tools import page_table
from build_tools.page_table import between

PAGE = Path(__file__).resolve().parent.parent / "docs" / "porting.md"
BEGIN = "<!-- python -m build_tools.argument_table --write -->"
END = "<!-- end of the arguments -->"


def table() -> str:
    """A row for each library and thing to do."""
    from flash_attn.compat.other_arguments import ARGUMENTS

    lines = ["| of | argument | here |", "|---|---|---|"]
    same = itertools.groupby(ARGUMENTS, lambda name: (ARGUMENTS[name].of, ARGUMENTS[name].here()))
    for (of, here), names in same:
        lines.append(f"| {of} | {', '.join(f'`{name}`' for name in names)} | {here} |")
    return "\n".join(lines)


def rewritten(text: str) -> str:
    return between(text, BEGIN, END, table())


def main(argv: list[str]) -> int:
    return page_table.main(argv, "argument_table", PAGE, rewritten)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
