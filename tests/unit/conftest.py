from types import ModuleType

import pytest

from tests import host_build

from . import build


@pytest.fixture(scope="session")
def core() -> ModuleType:
    """The C++ functions of csrc/core, compiled for the host."""
    return host_build.load_or_skip(build.load)
