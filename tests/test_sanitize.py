"""The cases that compute-sanitizer gets are calls that work: here on the CPU."""

import pytest
import torch

from tests import sanitize


@pytest.fixture(autouse=True)
def default_device():
    yield
    torch.set_default_device(None)


def test_cases(capsys):
    sanitize.main("cpu")
    assert "finite" in capsys.readouterr().out
