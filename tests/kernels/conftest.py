from types import ModuleType

import pytest

from tests import host_build

from . import build


@pytest.fixture(scope="session")
def kernels() -> ModuleType:
    """Every kernel of the variant table, compiled for the host."""
    try:
        return build.load()
    except host_build.Unavailable as reason:
        pytest.skip(f"the kernels cannot be compiled here: {reason}")
