"""Every test runs on each backend: the `device` fixture.

A CUDA case that needs something without a kernel yet is not skipped: `needs` asserts that the call
raises NotImplementedError, and fails when it no longer does, so that CUDA_MISSING only shrinks.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from flash_attn import backend
from flash_attn.dispatch import content_checks, direct
from tests import all_pairs
from tests.devices import GPU
from tests.gpu_room import Room
from tests.kernels import library as host_kernels

# Everything a test may name in `needs(...)`.
FEATURES = frozenset(
    {
        "alibi",
        "attn_probs",  # return_attn_probs: S_dmask
        "backward",
        "batch_invariant",
        "dropout",
        "fp32",
        "fp64",
        "head_dim_256",  # 128 < d <= 256
        "head_dim_v",  # v's head dim differs from q's and k's
        "kvcache",
        "leftpad",
        "paged",  # block_table
        "seqused_k",
        "sinks",
        "softcap",
    }
)

# Operations with no CUDA kernel yet. Remove a name when its kernel exists: the tests insist.
CUDA_MISSING: frozenset[str] = frozenset()

# The GPU's kernels compiled for the host, for this compute capability.
HOST_KERNELS = {"host-kernels": 80, "host-kernels-90": 90}

# Not missing but wrong on a GPU, for good: a ValueError.
CUDA_REJECTS = frozenset({"fp32", "fp64"})

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # the workers are the parallelism


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--every-combination",
        action="store_true",
        help="of parameters; else without a GPU only so many that each pair of values is in one",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("every_combination"):
        items[:], left_out = all_pairs.select(items)
        config.hook.pytest_deselected(items=left_out)


def pytest_collection_finish() -> None:
    """Tens of thousands of tests stay until the end: no collection of garbage needs to see them."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """A gain where the operations are small."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=["cpu", *HOST_KERNELS, GPU])
def device(request, monkeypatch) -> Iterator[str]:
    """Of the tensors of a test, which runs with the CPU backend, with the GPU's kernels compiled
    for the host (tests/kernels), and on a GPU."""
    if request.param not in HOST_KERNELS:
        yield request.param
        return
    if request.node.get_closest_marker("many_blocks"):
        pytest.skip("too many thread blocks for the host")
    with host_kernels.serving(monkeypatch, HOST_KERNELS[request.param]):
        yield "cpu"


@pytest.fixture
def checking(device, monkeypatch) -> Iterator[None]:
    """As if FLASH_ATTN_CHECK=1 had been set when the package was imported."""
    monkeypatch.setattr(direct, "enabled", False)
    if backend.CHECK:
        yield
        return
    monkeypatch.setattr(backend, "CHECK", True)
    library = torch.library.Library("flash_attn", "IMPL")
    content_checks.register(library)
    yield
    library._destroy()


@pytest.fixture(scope="session")
def gpu_room() -> Room:
    return Room()


@pytest.fixture(autouse=True)
def _in_the_gpu_room(request) -> Iterator[None]:
    call = getattr(request.node, "callspec", None)
    if call is None or call.params.get("device") != "cuda":
        yield
        return
    with request.getfixturevalue("gpu_room").entered():
        yield


@pytest.fixture
def need_memory(_in_the_gpu_room, gpu_room) -> Callable[[int], None]:
    """`need_memory(60)`: this test runs alone on the GPU, whose free memory is at least 60 GiB."""
    return gpu_room.need


@pytest.fixture
def cuda(device) -> str:
    """For what only exists on a GPU: streams, graphs, tens of gigabytes."""
    if device != "cuda":
        pytest.skip("about the GPU")
    return device


@pytest.fixture
def needs(device, request):
    """`with needs("softcap", "backward"): ...` around the calls that need these features."""

    @contextmanager
    def block(*features: str) -> Iterator[None]:
        unknown = set(features) - FEATURES
        assert not unknown, f"not a feature: {sorted(unknown)}"
        if request.node.callspec.params["device"] == "cpu":
            yield
            return
        rejected, missing = CUDA_REJECTS & set(features), CUDA_MISSING & set(features)
        if not rejected and not missing:
            yield
            return
        expected: tuple = (ValueError,) if rejected else (NotImplementedError,)
        try:
            yield
        except expected:
            return
        pytest.fail(
            f"{sorted(rejected)} should be rejected"
            if rejected
            else f"nothing raised: take {sorted(missing)} out of CUDA_MISSING in conftest.py"
        )

    return block


@pytest.fixture(autouse=True)
def _same_random_numbers():
    torch.manual_seed(0)
