from collections.abc import Callable
from types import ModuleType

import pytest

from tests import host_build

from . import build


@pytest.fixture(scope="session")
def kernels() -> ModuleType:
    """Every kernel of the variant table, compiled for the host."""
    return _loaded(build.load)


@pytest.fixture(scope="session")
def selftest() -> ModuleType:
    """Small kernels that test the emulation itself."""
    return _loaded(build.load_selftest)


def _loaded(load: Callable[[], ModuleType]) -> ModuleType:
    try:
        return load()
    except host_build.Unavailable as reason:
        pytest.skip(f"the kernels cannot be compiled here: {reason}")
