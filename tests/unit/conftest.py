from types import ModuleType

import pytest

from tests import host_build

from . import build


@pytest.fixture(scope="session")
def core() -> ModuleType:
    """The C++ functions of csrc/core, compiled for the host."""
    try:
        return build.load()
    except host_build.Unavailable as reason:
        pytest.skip(f"csrc/core cannot be compiled here: {reason}")
