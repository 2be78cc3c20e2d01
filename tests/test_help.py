"""What `help` shows of the package's modules."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import pkgutil

import pytest
import torch

import flash_attn


def module_classes() -> list[type[torch.nn.Module]]:
    """Of every public module, those with an __init__ of our own."""
    found = {}
    for info in pkgutil.walk_packages(flash_attn.__path__, "flash_attn."):
        if not any(part.startswith("_") for part in info.name.split(".")[1:]):
            with contextlib.suppress(ImportError):  # names of the 2.8 package that are refused
                found |= vars(importlib.import_module(info.name))
    return [
        x
        for name, x in found.items()
        if isinstance(x, type) and issubclass(x, torch.nn.Module) and not name.startswith("_")
        if x.__init__.__module__.startswith("flash_attn.")
    ]


@pytest.mark.parametrize("module", module_classes(), ids=lambda module: module.__name__)
def test_help_of_a_module_is_ours(module):
    """And not what torch says of its own base class."""
    assert inspect.getdoc(module)
    assert inspect.getdoc(module.__init__) != inspect.getdoc(torch.nn.Module.__init__)
