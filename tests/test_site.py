"""The site's pages, before Sphinx has seen them: `make docs` does the rest, links included."""

from __future__ import annotations

import pytest

from build_tools import make_site
from build_tools.make_site import DOCS, ROOT


@pytest.mark.parametrize(
    ("page", "link", "turned"),
    [
        ("docs/caches.md", "[x](errors.md#errors)", "[x](errors.md#errors)"),
        ("docs/caches.md", "[x](kernels/README.md)", "[x](kernels/index.md)"),
        ("docs/caches.md", "[x](../README.md#install)", "[x](source/README.md#install)"),
        ("docs/caches.md", "[x](../examples/serve.py)", "[x](source/examples/serve.py.md)"),
        ("docs/kernels/README.md", "[x](../build.md)", "[x](../build.md)"),
        ("README.md", "![x](docs/h200.png)", "![x](../h200.png)"),
        ("README.md", "[examples/](examples)", "examples/"),
        ("README.md", "[x](https://arxiv.org/abs/2205.14135)", None),
        ("README.md", "[x](#install)", None),
    ],
)
def test_links_lead_to_pages(page, link, turned):
    text = make_site.LINK.sub(lambda found: make_site.turned(found, ROOT / page), link)
    assert text == (turned or link)


def test_a_source_is_a_page_that_shows_it():
    page = make_site.page(ROOT / "examples" / "quickstart.py")
    assert "# examples/quickstart.py" in page
    assert (ROOT / "examples" / "quickstart.py").read_text() in page


def test_every_page_is_in_the_contents():
    listed = {"index"}
    for name, parts in make_site.CONTENTS.items():
        folder = (DOCS / name).parent
        for names in " ".join(parts.values()).split():
            listed.add((folder / names).relative_to(DOCS).as_posix())
    pages = {make_site.staged(path).with_suffix("").as_posix() for path in DOCS.rglob("*.md")}
    assert pages == listed


def test_the_contents_follow_the_page():
    assert "sm80_forward\nsm80_paged" in make_site.page(DOCS / "kernels" / "README.md")
    assert "toctree" not in make_site.page(DOCS / "caches.md")


def test_what_pages_outside_link_to_is_there_as_well(monkeypatch, tmp_path):
    monkeypatch.setattr(make_site, "STAGE", tmp_path / "pages")
    make_site.stage()
    pages = {p.relative_to(tmp_path / "pages").as_posix() for p in tmp_path.rglob("*.md")}
    assert {"index.md", "kernels/index.md", "source/README.md"} <= pages
    assert "source/examples/gpt/model.py.md" in pages  # linked by examples/README.md alone
    assert (tmp_path / "pages" / "h200.png").exists()
