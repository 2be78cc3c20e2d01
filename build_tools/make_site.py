"""Builds the documentation's site: `python -m build_tools.make_site` writes build/site.

Pages are docs/ as it is read in the repository. What they link to outside of docs/ becomes a page
of the site, too: so links hold in both, and no address of the repository has to be known. Whatever
Sphinx warns of, a link that leads nowhere included, is an error.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
STAGE = ROOT / "build" / "site-pages"
SITE = ROOT / "build" / "site"
SETTINGS = Path(__file__).with_name("site")
LEXERS = {".py": "python", ".h": "cpp", ".cpp": "cpp", ".cu": "cuda"}
# What begins a page that no table of contents has.
ORPHAN = "---\norphan: true\n---\n"
# [text](target#anchor), of a picture as well.
LINK = re.compile(r"(?P<text>\[[^\]]*\])\((?P<target>[^)#\s:]+)(?P<anchor>#[^)\s]*)?\)")

#: The contents, beside each page that has some: caption → pages, in order.
CONTENTS: dict[str, dict[str, str]] = {
    "README.md": {
        "Use": """install features arguments packing caches fp8 latent_attention engines
            determinism cpu accuracy torch modules linear_attention errors switches distributed
            porting fa3""",
        "Reference": """api/attention api/explain api/distributed api/linear api/modules
            api/helpers api/ops""",
        "How it is made": "build benchmarks plan glossary kernels/index lab/index releasing",
    },
    "kernels/README.md": {
        "Pages": """sm80_forward sm80_paged decode decode_varlen decode_codes
            wide sm90_latent sm80_append rotary sm80_backward sm90_forward
            sm90_forward_pages sm90_forward_codes sm90_fp8_forward encode
            sm90_forward_scores sm90_paired_forward
            sm90_backward sm90_backward_scores sm90_paired_backward linear_attention
            linear_attention_vector linear_step linear_delta counters probabilities
            emulation""",
    },
    "lab/README.md": {
        "Experiments": """plan latent_attention wide_heads sm90_forward_rates
            sm90_forward_few_queries sm90_forward_log
            sm90_forward_instruction_cost sm90_forward_step sm90_forward_tile_ends
            sm90_forward_varlen_short sm90_forward_short_rows sm90_forward_short_rows_tried
            sm90_forward_tile_choice sm90_forward_late_store sm90_forward_largest_logits
            sm90_forward_last_wave sm90_forward_head_strips sm90_forward_counters
            sm90_forward_scheduler_warp sm90_forward_tiles sm90_forward_machine_code
            sm90_forward_page_loads
            sm90_forward_small_pages sm90_forward_large_pages sm90_forward_kv_split
            sm90_forward_codes sm90_fp8_forward
            sm90_forward_score_mods sm90_operands
            sm90_backward_rates sm90_backward_design sm90_backward_step
            sm90_backward_counters sm90_backward_log sm90_backward_no_last_pass
            sm90_backward_head_strips sm90_backward_gqa_split sm90_backward_kv_persistent
            sm90_backward_ordered_dq sm90_backward_ordered_dq_strips sm90_backward_tile_stream
            sm90_backward_delta_warp sm90_backward_row_split sm90_backward_dq_semaphore
            sm90_backward_open sm90_paired_backward_log sm90_paired_backward_step
            sm90_backward_lone_mods sm90_backward_d64_mods decode_rates decode_codes
            decode_registers decode_merge decode_clusters decode_split
            decode_timeline decode_reading decode_log decode_second_series
            decode_third_series decode_new_rows decode_open
            decode_varlen_steps decode_varlen_overlap sm80_backward_rates
            sm80_backward_tiles sm80_operands sm80_backward_gqa_split sm80_backward_log
            sm80_forward_rates sm80_forward_registers sm80_forward_tiles sm80_forward_log
            counters_rejected rotary_rates linear_attention linear_attention_segments
            linear_attention_factors linear_attention_vector""",
    },
}


def staged(path: Path) -> Path:
    """Where the site has a file of the repository, relative to its pages."""
    if path.is_relative_to(DOCS):
        page = path.relative_to(DOCS)
        return page.with_name("index.md") if page.name == "README.md" else page
    shown = Path("source") / path.relative_to(ROOT)
    return shown if path.suffix == ".md" else shown.with_name(f"{shown.name}.md")


def page(path: Path) -> str:
    """A file's page: Markdown with its links turned, or a source as it is."""
    name = path.relative_to(ROOT).as_posix()
    text = path.read_text()
    if path.suffix != ".md":
        lexer = LEXERS.get(path.suffix, "text")
        return f"{ORPHAN}# {name}\n\n~~~~~~{lexer}\n{text}\n~~~~~~\n"
    text = LINK.sub(lambda link: turned(link, path), text)
    if not path.is_relative_to(DOCS):
        return ORPHAN + text
    return text + _contents(path.relative_to(DOCS).as_posix())


def turned(link: re.Match, path: Path) -> str:
    """A link of the repository's as one of the site's; a folder has no page there."""
    target = (path.parent / link["target"]).resolve()
    if target.is_dir():
        return link["text"][1:-1]
    to = os.path.relpath(staged(target), staged(path).parent)
    return f"{link['text']}({to}{link['anchor'] or ''})"


def _contents(name: str) -> str:
    trees = []
    for caption, pages in CONTENTS.get(name, {}).items():
        names = "\n".join(pages.split())
        trees.append(f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{names}\n```\n")
    return "".join(trees)


def linked(path: Path) -> Iterator[Path]:
    """Files outside of docs/ that a page links to."""
    if path.suffix == ".md":
        for link in LINK.finditer(path.read_text()):
            target = (path.parent / link["target"]).resolve()
            if target.is_file() and not target.is_relative_to(DOCS):
                yield target


def stage() -> None:
    """Writes all pages to STAGE."""
    shutil.rmtree(STAGE, ignore_errors=True)
    shutil.copytree(DOCS, STAGE, ignore=shutil.ignore_patterns("*.md"))
    waiting = sorted(DOCS.rglob("*.md"))
    seen = set(waiting)
    while waiting:
        path = waiting.pop()
        target = STAGE / staged(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(page(path))
        new = set(linked(path)) - seen
        seen |= new
        waiting += new


def main() -> int:
    stage()
    shutil.rmtree(SITE, ignore_errors=True)
    command = [
        sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html",
        "-c", SETTINGS, "-d", ROOT / "build" / "site-cache", STAGE, SITE,
    ]  # fmt: skip
    code = subprocess.run(command, cwd=ROOT).returncode
    print(f"build/site: {len([*SITE.rglob('*.html')])} pages" if code == 0 else "no site")
    return code


if __name__ == "__main__":
    sys.exit(main())
