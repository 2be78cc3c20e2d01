"""Stands in for an engine that is not installed: modules by name, for as long as a test runs."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest


def is_installed(engine: str) -> bool:
    return importlib.util.find_spec(engine) is not None


@contextmanager
def serving(engine: str, modules: dict[str, dict[str, Any]]) -> Iterator[ModuleType]:
    """``flash_attn.engines.<engine>``, on stubs where the engine is missing. Where it is installed,
    on the engine, but for what no machine without a GPU can run: ``patched``."""
    ours = f"flash_attn.engines.{engine}"
    with pytest.MonkeyPatch.context() as patch:
        if is_installed(engine):
            for path, value in modules["patched"].items():
                patch.setattr(path, value)
        else:
            for name, contents in modules.items():
                _install(patch, name, contents)
        patch.delitem(sys.modules, ours, raising=False)
        try:
            yield importlib.import_module(ours)
        finally:
            sys.modules.pop(ours, None)


def _install(patch: pytest.MonkeyPatch, name: str, contents: dict[str, Any]) -> None:
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        path = ".".join(parts[:end])
        if path not in sys.modules:
            module = ModuleType(path)
            module.__path__ = []
            patch.setitem(sys.modules, path, module)
            if end > 1:
                setattr(sys.modules[".".join(parts[: end - 1])], parts[end - 1], module)
    for key, value in contents.items():
        setattr(sys.modules[name], key, value)


def assert_like(stub: type, real: type) -> None:
    """The stub's methods take what the engine's take, in that order, and its flags exist there."""
    for name, mine in vars(stub).items():
        if name.startswith("__") and name != "__init__":
            continue
        theirs = inspect.getattr_static(real, name)
        if inspect.isfunction(inspect.unwrap(getattr(mine, "__func__", mine))):
            expected, got = (inspect.signature(getattr(c, name)) for c in (real, stub))
            assert list(got.parameters) == list(expected.parameters), f"{stub.__name__}.{name}"
        else:
            assert type(theirs).__name__ == type(mine).__name__, f"{stub.__name__}.{name}"
