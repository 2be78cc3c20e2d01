import pytest

from tests.distributed.processes import Processes


@pytest.fixture(scope="session")
def processes():
    pool = Processes()
    yield pool
    pool.stop()
