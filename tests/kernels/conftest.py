from types import ModuleType

import pytest

from tests import host_build

from . import build


@pytest.fixture(scope="session")
def kernels() -> ModuleType:
    """Every kernel of the variant table, compiled for the host."""
    return host_build.load_or_skip(build.load)


@pytest.fixture(scope="session")
def selftest() -> ModuleType:
    """Small kernels that test the emulation itself."""
    return host_build.load_or_skip(build.load_selftest)
