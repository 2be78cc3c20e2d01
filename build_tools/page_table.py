"""Tables of the documents that a module of build_tools writes: its `--check` and `--write`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

DOCS = Path(__file__).resolve().parent.parent / "docs"


def between(text: str, begin: str, end: str, table: str) -> str:
    """``text`` with ``table`` between two markers."""
    before, rest = text.split(begin)
    _, after = rest.split(end)
    return f"{before}{begin}\n\n{table}\n\n{end}{after}"


def main(argv: list[str], command: str, page: Path, rewritten: Callable[[str], str]) -> int:
    """What the module called ``command`` does: checks or writes the page, its exit status.

    rewritten: a page's text → the text with the table as it has to be.
    """
    if argv not in (["--check"], ["--write"]):
        print(f"usage: python -m build_tools.{command} --check | --write", file=sys.stderr)
        return 2
    text = page.read_text()
    if argv == ["--write"]:
        page.write_text(rewritten(text))
        return 0
    if text != rewritten(text):
        print(f"docs/{page.name} is out of date: run with --write", file=sys.stderr)
        return 1
    return 0


@dataclass(frozen=True)
class Table:
    """A page's one table of the module called ``command``."""

    command: str
    page: Path
    name: str  # what the marker after it says
    markdown: Callable[[], str]

    def rewritten(self, text: str) -> str:
        begin = f"<!-- python -m build_tools.{self.command} --write -->"
        return between(text, begin, f"<!-- end of the {self.name} -->", self.markdown())

    def main(self, argv: list[str]) -> int:
        return main(argv, self.command, self.page, self.rewritten)
