"""What type checkers make of the package: of a client's calls, and of all that is public."""

from __future__ import annotations

import ast
import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from build_tools import stubs
from tests.clients import typed_client
from tests.commands import ROOT

# Both find the package by PYTHONPATH, and torch by the python that comes first.
ENVIRONMENT = {
    **os.environ,
    "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    "PYTHONPATH": str(ROOT),
    "MYPYPATH": str(ROOT),
}
CLIENT = Path(typed_client.__file__)


def _run(folder: Path, module: str, *arguments: str) -> str:
    """In a folder without settings of ours."""
    pytest.importorskip(module)
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return done.stdout


def _mypy(folder: Path) -> dict[int, str]:
    cache = ROOT / "build" / "mypy"  # a third of a minute for torch, once
    report = _run(
        folder, "mypy", "--strict", "--config-file=", "--follow-imports=silent",
        f"--cache-dir={cache}", CLIENT.name,
    )  # fmt: skip
    errors = re.findall(rf"^{CLIENT.name}:(\d+): error: (.*)$", report, re.MULTILINE)
    return {int(line): message for line, message in errors}


def _pyright(folder: Path) -> dict[int, str]:
    report = json.loads(_run(folder, "pyright", "--outputjson", CLIENT.name))
    assert report["summary"]["filesAnalyzed"] == 1
    return {d["range"]["start"]["line"] + 1: d["message"] for d in report["generalDiagnostics"]}


@pytest.mark.parametrize("check", [_mypy, _pyright])
def test_a_client(check, tmp_path):
    """It is strict, and refuses exactly the lines that are wrong."""
    lines = CLIENT.read_text().splitlines()
    (tmp_path / CLIENT.name).write_text("\n".join(lines))
    errors = check(tmp_path)
    wrong = {number for number, line in enumerate(lines, 1) if "# wrong: " in line}
    assert len(wrong) > 20
    accepted = [lines[number - 1].strip() for number in sorted(wrong - {*errors})]
    assert not accepted, accepted
    refused = {lines[n - 1].strip(): errors[n] for n in sorted({*errors} - wrong)}
    assert not refused, refused


def test_results_are_what_type_checkers_take_them_for(monkeypatch):
    asserted = []

    def is_of(value: Any, kind: Any) -> None:
        values, kinds = (value, get_args(kind)) if get_args(kind) else ((value,), (kind,))
        assert len(values) == len(kinds)
        assert all(map(isinstance, values, kinds))
        asserted.append(kind)

    monkeypatch.setattr(typed_client, "assert_type", is_of)
    b, s, h, d = 2, 6, 2, 8
    x, kv, qkv = (torch.randn(b, s, *part, h, d) for part in ((), (2,), (3,)))
    ends, longest = torch.tensor([0, 2, 6], dtype=torch.int32), torch.tensor(4)
    rows, table = x[0], torch.zeros(b, 1, dtype=torch.int32)
    assert typed_client.Attention(h * d, h)(torch.randn(b, s, h * d)).shape == (b, s, h * d)
    assert typed_client.dense(x, x, x, False).shape == typed_client.dense(x, x, x, True).shape
    assert typed_client.packed_in_one(x, kv, qkv).shape == x.shape
    assert len(typed_client.options(x, torch.zeros(h), torch.zeros(h))) == 5
    assert typed_client.sequences(rows, kv[0], qkv[0], ends, longest).shape == rows.shape
    assert typed_client.pages(rows, x, ends, table).shape == rows.shape
    assert typed_client.padded(qkv, torch.ones(b, s)).shape == x.shape
    assert typed_client.generation(x[:, :1], x.repeat(1, 4, 1, 1), ends[1:]).shape[1] == 1
    labels = torch.zeros(b * s * h, dtype=torch.int64)
    assert typed_client.modules(x, torch.ones(d), torch.randn(s, d // 2), labels).shape == x.shape
    assert len(typed_client.explanations(x)) == 2
    out, plain = typed_client.passed_on(x, causal=True)
    assert out.shape == plain.shape
    assert len(asserted) > 20


def test_nearly_every_public_name_has_a_type(tmp_path):
    """One that every type checker has, because it is written down."""
    arguments = "--outputjson", "--ignoreexternal", "--verifytypes", "flash_attn"
    report = json.loads(_run(tmp_path, "pyright", *arguments))["typeCompleteness"]
    assert report["exportedSymbolCounts"]["withKnownType"] > 900
    missing = [
        f"{symbol['name']}: {diagnostic['message']}"
        for symbol in report["symbols"]
        for diagnostic in symbol["diagnostics"]
        if not symbol["isTypeKnown"] or symbol["isTypeAmbiguous"]
    ]
    assert report["completenessScore"] >= 0.95, "\n".join(missing)


# --- Stubs ----------------------------------------------------------------------------------------


def test_the_stubs_are_up_to_date():
    assert stubs.main([]) == 0, f"run {stubs.COMMAND} --write"


SOURCE = """
from os import path, sep
from re import error
from torch import Tensor

LIMIT: int = 3

def attend(q: Tensor, scale: float = 1.0, return_attn_probs: bool = False, pages: Tensor | None =
           None, *, return_lse: bool = False) -> Tensor | tuple[Tensor, Tensor]:
    return path.join(q, _own(sep))

def _own(x): ...

def plain(x: Tensor) -> Tensor: ...
"""


def test_an_overload_for_each_result():
    text = stubs.stub(SOURCE)
    found = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
    q, pages = "q: Tensor, scale: float=1.0", "pages: Tensor | None=None"
    probs, lse = "return_attn_probs: ", "return_lse: "
    off, on, either = "Literal[False]=False", "Literal[True]", "bool=False"
    two, three = "tuple[Tensor, Tensor]", "tuple[Tensor, Tensor, Tensor]"
    assert [(f.name, ast.unparse(f.args), ast.unparse(f.returns)) for f in found] == [
        ("attend", f"{q}, {probs}{off}, {pages}, *, {lse}{off}", "Tensor"),
        ("attend", f"{q}, {probs}{off}, {pages}, *, {lse}{on}", two),
        ("attend", f"{q}, *, {probs}{on}, {pages}, {lse}{either}", three),
        ("attend", f"q: Tensor, scale: float, {probs}{on}, {pages}, *, {lse}{either}", three),
        ("attend", f"{q}, {probs}{either}, {pages}, *, {lse}{either}", f"Tensor | {two}"),
        ("plain", "x: Tensor", "Tensor"),
    ]
    assert [len(f.decorator_list) for f in found] == [1] * 5 + [0]
    # What the module itself has no use for is there for others.
    assert "from re import error as error" in text
    assert "LIMIT: int" in text
    assert "_own" not in text
    assert "path" not in text


@pytest.mark.parametrize("module", stubs.MODULES)
def test_a_stub_has_what_its_module_has(module):
    """A name is public by having no underscore, or by being imported or assigned for others."""
    name = module.removesuffix(".py").replace("/", ".")
    __import__(name)
    text = (ROOT / module).with_suffix(".pyi").read_text()
    for attribute, value in vars(sys.modules[name]).items():
        own = getattr(value, "__module__", None) == name and not inspect.ismodule(value)
        if own and not attribute.startswith("_"):
            assert re.search(rf"\b{attribute}\b", text), attribute
