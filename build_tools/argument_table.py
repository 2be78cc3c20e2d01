"""The table of other libraries' arguments in docs/porting.md: `--check` or `--write`."""

from __future__ import annotations

import itertools
import sys

from build_tools.page_table import DOCS, Table


def table() -> str:
    """A row for each library and thing to do."""
    from flash_attn.compat.other_arguments import ARGUMENTS

    lines = ["| of | argument | here |", "|---|---|---|"]
    same = itertools.groupby(ARGUMENTS, lambda name: (ARGUMENTS[name].of, ARGUMENTS[name].here()))
    for (of, here), names in same:
        lines.append(f"| {of} | {', '.join(f'`{name}`' for name in names)} | {here} |")
    return "\n".join(lines)


TABLE = Table("argument_table", DOCS / "porting.md", "arguments", table)

if __name__ == "__main__":
    sys.exit(TABLE.main(sys.argv[1:]))
