"""The documents tell the truth: their code runs and prints what they say; links lead somewhere."""

import contextlib
import io
import re
import runpy
import socket
from pathlib import Path

import pytest
import torch.distributed as dist
import yaml
from torch.nn import attention

import flash_attn
from build_tools import feature_matrix, instantiate
from flash_attn.api import checks, warn

ROOT = Path(__file__).resolve().parent.parent
BESIDE = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "examples/README.md")
DOCUMENTS = [*(ROOT / name for name in BESIDE), *sorted((ROOT / "docs").rglob("*.md"))]
# A Python block, and the text block right behind it if there is one.
BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:```text\n(.*?)^```\n)?", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
PROGRAMS = [p for p in DOCUMENTS if BLOCK.search(p.read_text())]


@pytest.fixture
def torchs_own_attention():
    """As it is found: docs/torch.md replaces it."""
    yield
    if hasattr(attention, "restore_flash_attention_impl"):
        attention.restore_flash_attention_impl(_raise_warn=False)


def name_of(path):
    return str(path.relative_to(ROOT))


@pytest.fixture
def one_process_of_torchrun(monkeypatch):
    """What torchrun sets; tests/distributed runs docs/distributed.md over several."""
    with socket.socket() as found:
        found.bind(("localhost", 0))
        port = found.getsockname()[1]
    for name, value in {
        "MASTER_ADDR": "localhost", "MASTER_PORT": port, "RANK": 0, "WORLD_SIZE": 1
    }.items():  # fmt: skip
        monkeypatch.setenv(name, str(value))
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.usefixtures("one_process_of_torchrun", "torchs_own_attention")
@pytest.mark.parametrize("path", PROGRAMS, ids=name_of)
def test_code_runs_and_prints_what_it_says(path, monkeypatch):
    monkeypatch.setattr(warn, "_said", set())  # as in a program of its own
    blocks = BLOCK.findall(path.read_text())
    names = {"__name__": "document"}
    for code, expected in blocks:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, str(path), "exec"), names)
        if expected:
            assert printed.getvalue() == expected


def anchors(path):
    """What a heading's link ends with: lower case, words joined by hyphens, nothing else."""
    titles = HEADING.findall(path.read_text())
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_links_lead_somewhere(path):
    for target, anchor in LINK.findall(path.read_text()):
        if not target.startswith(("http://", "https://", "mailto:")):
            page = path.parent / target if target else path
            assert page.exists(), f"{path.name} links to {target}"
            assert not anchor or anchor in anchors(page), f"{path.name} links to {target}#{anchor}"


@pytest.mark.parametrize("name", ["quickstart", "varlen", "kv_cache", "mla", "merge_lse"])
def test_examples_run(name, capsys):
    runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")
    assert capsys.readouterr().out


def test_serving_example_runs(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["serve", "--requests", "3", "--new-tokens", "4"])
    runpy.run_path(str(ROOT / "examples" / "serve.py"), run_name="__main__")
    assert "tokens/s" in capsys.readouterr().out


def test_quickstart_is_the_example_of_the_readme():
    code = (ROOT / "examples/quickstart.py").read_text().split('"""')[2].strip()
    assert code in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("path", sorted((ROOT / "docs" / "kernels").glob("*.md")), ids=name_of)
def test_a_kernels_page_is_read_in_ten_minutes(path):
    """Problem, bottleneck, schedule, result; what was measured on the way is in docs/lab."""
    lines = path.read_text().splitlines()
    assert len(lines) <= 150
    assert max(map(len, lines)) <= 120


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().split()) <= 750


def test_a_page_of_the_lab_and_its_kernels_page_link_to_each_other():
    for path in sorted((ROOT / "docs" / "lab").glob("*_*.md")):
        (kernel,) = re.findall(r"kernel: \[(\w+)\]\(\.\./kernels/\1\.md\)", path.read_text())
        page = (ROOT / "docs" / "kernels" / f"{kernel}.md").read_text()
        assert f"(../lab/{path.name})" in page, f"{kernel}.md does not link to {path.name}"


# What it takes to build, and how large it becomes.
BUILD_FIGURE = re.compile(r"\b\d+ (?:minutes|MiB|kernels)\b")


@pytest.mark.parametrize("name", ["README.md", "docs/install.md"])
def test_figures_of_the_build_are_on_one_page(name):
    assert not BUILD_FIGURE.findall((ROOT / name).read_text())


def test_the_number_of_kernels_is_that_of_the_table():
    rows = instantiate.rows_for(["80", "90a"])
    tiles = sum(bool(row.second_block_n) for row in rows)
    sources = list((ROOT / "csrc").rglob("*.cu"))
    files = {instantiate.file_stem(row) for row in rows}
    text = (ROOT / "docs" / "build.md").read_text().split("## Time and size")[1]
    assert f"| kernels | {len(rows) + tiles}: a row of the table each, and {tiles} rows" in text
    assert f"in {len(files) + len(sources)} files |" in text


def test_rows_of_the_table_are_counted_as_they_are():
    """docs/kernels/README.md: "sm80: 34 forward, …, 12 of them for codes", by family."""
    page = (ROOT / "docs" / "kernels" / "README.md").read_text().split("## Build")[1]
    rows = feature_matrix.Kernels().variants
    (total, families) = re.findall(r"The table has (\d+) rows\s\(([^)]*)\)", page)[0]
    assert int(total) == len(rows)
    names = {"forward": "fwd", "backward": "bwd"}
    counted = 0
    for family, text in re.findall(r"(sm\d+): ([^:;]*)", families):
        found = re.findall(r"(\d+) (\w+)(?:, (\d+)\sof\sthem\sfor\scodes)?", text)
        for number, direction, codes in found:
            mine = [v for v in rows if v.arch == family]
            mine = [v for v in mine if v.direction == names.get(direction, direction)]
            assert int(number) == len(mine), f"{family}: {direction}"
            assert int(codes or 0) == sum(v.cached_bits == 8 for v in mine), (
                f"{family}: {direction}"
            )
            counted += len(mine)
    assert counted == len(rows)


def test_head_dims_that_checks_permit_are_those_of_the_table():
    rows = feature_matrix.Kernels().variants
    for family in ("sm80", "sm90"):
        forwards = [v for v in rows if (v.arch, v.direction) == (family, "fwd")]
        assert max(v.head_dim for v in forwards) == checks.MAX_HEAD_DIM
    codes = [v for v in rows if v.direction == "decode" and v.cached_bits == 8]
    assert max(v.head_dim for v in codes) == checks.MAX_HEAD_DIM_OF_CODES


def tiles_of(page):
    """(head dims, "rows×keys") of a page's table of tiles, first ones and second ones."""
    text = page.read_text().split("## Tiles")[1].split("## Result")[0]
    for name, tiles in re.findall(r"^\| ([^|]*\d[^|]*) \| (\d+×[^|]*) \|", text, re.MULTILINE):
        dims = re.search(r"\d+(?:/\d+)?", name)[0]
        yield dims, [tile.split(",")[0] for tile in tiles.split("; ")]


@pytest.mark.parametrize("family", ["sm80", "sm90"])
def test_tiles_of_the_forwards_pages_are_the_tables(family):
    def tiles(v):
        lengths = [v.block_n, v.second_block_n] if v.second_block_n else [v.block_n]
        return [f"{v.block_m}×{keys}" for keys in lengths]

    rows = [v for v in feature_matrix.Kernels().variants if v.direction == "fwd"]
    rows = [v for v in rows if v.arch == family and v.cached_bits == 16 and v.cluster == 1]
    table = {}
    for v in rows:
        dims = f"{v.head_dim}" + f"/{v.head_dim_v}" * (v.head_dim != v.head_dim_v)
        if v.dtype == "bf16" and (v.scores == "plain" or v.tile_in_name):
            table.setdefault(dims, []).append(tiles(v))
    page = {}
    for dims, found in tiles_of(ROOT / "docs" / "kernels" / f"{family}_forward.md"):
        page.setdefault(dims, []).append(found)
    assert page == table


def test_constants_of_the_plans_page_are_the_codes():
    page = (ROOT / "docs" / "plan.md").read_text()
    code = "".join(path.read_text() for path in (ROOT / "csrc" / "plan").glob("*.*"))
    found = re.findall(r"`(k\w+)` = ([\d.]+)", page)
    assert len(found) == 11
    for name, value in found:
        (written,) = re.findall(rf"\b{name} = ([\d.]+)", code)
        assert float(written) == float(value), name


def test_the_citation_is_of_this_version():
    found = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert found["version"] == flash_attn.__version__
    assert found["license"] == "BSD-3-Clause"
    assert [paper["year"] for paper in found["references"]] == [2022, 2023, 2024]


def test_the_changelog_begins_with_what_is_not_released_or_with_this_release():
    text = (ROOT / "CHANGELOG.md").read_text()
    releases = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert f"{flash_attn.__build__}" in releases[:2]
    assert releases[0] in ("Not yet released", flash_attn.__build__)


def test_feature_matrix_is_up_to_date():
    text = feature_matrix.TABLE.page.read_text()
    assert text == feature_matrix.TABLE.rewritten(text), (
        "run python -m build_tools.feature_matrix --write"
    )


def test_feature_matrix_says_whose_kernels_serve_hopper():
    kernels = feature_matrix.Kernels()
    cache = feature_matrix.Feature("cache", probe=lambda: None, op="_flash_attn_with_kvcache")
    kernels.variants = [v for v in kernels.variants if (v.arch, v.direction) != ("sm90", "decode")]
    assert kernels.cell(cache, "sm90") == "by sm80, or the forward"
    kernels.variants = [v for v in kernels.variants if (v.arch, v.direction) != ("sm90", "fwd")]
    assert kernels.cell(cache, "sm90") == "by sm80"
    kernels.variants = [v for v in kernels.variants if v.direction != "decode"]
    assert kernels.cell(cache, "sm90") == feature_matrix.NO


def test_feature_matrix_notices_a_change():
    kernels = feature_matrix.Kernels()
    forward = feature_matrix.Feature("forward", probe=lambda: None)
    assert kernels.cell(forward, "sm80") != feature_matrix.NO
    kernels.ops.discard("_flash_attn_forward")
    assert kernels.cell(forward, "sm80") == feature_matrix.NO
