"""The version, through the expressions of clients: some refuse what is too new for them."""

from __future__ import annotations

import importlib.metadata
import sys

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version, parse

import flash_attn
from tests.commands import run


@pytest.fixture
def installed(tmp_path, monkeypatch) -> str:
    """The version of this checkout's distribution, as an installation would record it."""
    run(sys.executable, "setup.py", "-q", "egg_info", "--egg-base", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    return importlib.metadata.version("flash-attn")


def test_metadata(installed):
    """What a package index, and pip, show of it."""
    found = importlib.metadata.metadata("flash-attn")
    links = dict(url.split(", ", 1) for url in found.get_all("Project-URL"))
    assert {"FlashAttention", "FlashAttention-2", "FlashAttention-3"} <= set(links)
    classifiers = found.get_all("Classifier")
    assert "Typing :: Typed" in classifiers
    assert "Environment :: GPU :: NVIDIA CUDA :: 13" in classifiers
    assert not any(name.startswith("License") for name in classifiers)  # License-Expression says it


def between(lowest: str, highest: str):
    return lambda version: Version(lowest) <= Version(version) <= Version(highest)


# A local label makes a version greater than the one it labels: Version("2.8.3+x") > "2.8.3".
GATES = {
    "TransformerEngine": between("2.1.1", "2.8.3"),
    "TransformerEngine on Blackwell": between("2.7.3", "2.8.3"),
    "xformers": lambda version: (
        not (parse(version) < parse("2.7.1") or parse(version) > parse("2.8.4"))
    ),
    "transformers": lambda version: parse(version) >= parse("2.3.3"),
    "Megatron": lambda version: Version(str(version)) >= Version("2.7.3"),
    "fla": lambda version: Version(version) >= Version("2.7.0"),
    "a pin": lambda version: version in SpecifierSet("==2.8.3"),
    "below the next": lambda version: parse(version) < parse("2.8.4"),
    "as strings": lambda version: "2.7.1" <= version <= "2.8.3",
    "as numbers": lambda version: tuple(int(x) for x in version.split(".")) >= (2, 7, 1),
}


@pytest.mark.parametrize("gate", GATES)
def test_clients_take_it(gate, installed):
    assert GATES[gate](installed)
    assert GATES[gate](flash_attn.__version__)


def test_transformers_itself_takes_it(installed):
    utils = pytest.importorskip("transformers.utils.import_utils")
    assert utils._is_package_available("flash_attn", return_version=True) == (True, installed)
    for oldest in ("2.1.0", "2.3.3", "2.8.3"):
        assert utils.is_flash_attn_greater_or_equal.__wrapped__(oldest)


def test_the_build_shows_beside_it(installed):
    """Two packages with one version: __build__ tells them apart."""
    assert installed == flash_attn.__version__
    assert flash_attn.__build__
    assert flash_attn.__build__ not in flash_attn.__version__
