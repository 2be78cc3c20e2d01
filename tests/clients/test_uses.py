"""Programs that CI cannot install find their names, and their calls fit the signatures."""

from __future__ import annotations

import importlib
import inspect
import re
from importlib import metadata

import pytest
from packaging.version import Version

import flash_attn
from tests.clients.uses import GATES, USES

EVERY_USE = [(client, use) for client, uses in USES.items() for use in uses]


@pytest.mark.parametrize(
    ("client", "use"),
    EVERY_USE,
    ids=[f"{client.split()[0]}-{use.name}" for client, use in EVERY_USE],
)
def test_names_and_calls(client, use):
    module, name = use.name.split(":")
    taken = getattr(importlib.import_module(module), name)
    if use.positional is not None:
        keywords = dict.fromkeys(use.keywords.split())
        inspect.signature(taken).bind(*[None] * use.positional, **keywords)


@pytest.mark.parametrize("gate", GATES)
def test_version_gates(gate):
    """Some ask the package, some its installed distribution."""
    least, most = GATES[gate]
    for version in (flash_attn.__version__, metadata.version("flash-attn")):
        assert Version(least) <= Version(version)
        assert not most or Version(version) <= Version(most)


def test_the_version_is_a_plain_release():
    """A local label would make it more than 2.8.3, the last that some of them take."""
    assert re.fullmatch(r"\d+\.\d+\.\d+", flash_attn.__version__)


def test_the_raw_module_is_what_the_interface_calls_its_extension():
    """xformers takes it from there, once it has seen that the older name does not exist."""
    assert not hasattr(flash_attn.flash_attn_interface, "flash_attn_cuda")
    raw = importlib.import_module("flash_attn_2_cuda")
    assert flash_attn.flash_attn_interface.flash_attn_gpu is raw
