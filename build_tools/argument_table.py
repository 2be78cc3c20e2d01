"""The table of other libraries' arguments in docs/porting.md: `--check` or `--write`."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

from build_tools.feature_matrix import between

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


def main(argv: list[str]) -> int:
    if argv not in (["--check"], ["--write"]):
        print("usage: python -m build_tools.argument_table --check | --write", file=sys.stderr)
        return 2
    text = PAGE.read_text()
    wanted = between(text, BEGIN, END, table())
    if argv == ["--write"]:
        PAGE.write_text(wanted)
        return 0
    if text != wanted:
        print("docs/porting.md: the arguments are out of date: run with --write", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
