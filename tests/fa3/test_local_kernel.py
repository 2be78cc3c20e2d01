"""The folder that the package `kernels` takes for a kernel of its hub."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import sys

import pytest
import torch

import flash_attn_interface as fa3
from flash_attn_3 import local_kernel
from tests.commands import ROOT, run

NAMES = ("flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache")


def test_the_module_has_the_functions(tmp_path):
    """Loaded as `kernels` does it: by the id of its metadata."""
    assert local_kernel.write(tmp_path) == f"{local_kernel.REPOSITORY}={tmp_path}"
    variant = tmp_path / "build" / "torch-universal"
    name = json.loads((variant / "metadata.json").read_text())["id"]
    assert importlib.util.find_spec(name) is None
    spec = importlib.util.spec_from_file_location(name, variant / "__init__.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert [getattr(module, n) for n in NAMES] == [getattr(fa3, n) for n in NAMES]


def test_kernels_loads_it(tmp_path):
    """In a process of its own: here `kernels` is a folder of tests."""
    try:
        importlib.metadata.version("kernels")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the package kernels is not installed")
    program = (
        "import kernels, flash_attn_interface as fa3\n"
        f"module = kernels.get_kernel({local_kernel.REPOSITORY!r}, version=1)\n"
        "print(module.flash_attn_varlen_func is fa3.flash_attn_varlen_func)"
    )
    path = f"{ROOT / 'flash-attn-3'}:{ROOT}:{os.environ.get('PYTHONPATH', '')}"
    done = run(
        sys.executable, "-c", program, PYTHONPATH=path, LOCAL_KERNELS=local_kernel.write(tmp_path)
    )
    assert done.stdout == "True\n"


def test_command(tmp_path):
    folder = tmp_path / "kernel"
    command = (sys.executable, "-m", "flash_attn_3.local_kernel")
    path = f"{ROOT / 'flash-attn-3'}:{ROOT}"
    done = run(*command, folder, "someone/fa3", PYTHONPATH=path)
    assert done.stdout == f"export LOCAL_KERNELS=someone/fa3={folder}\n"
    assert (folder / "build" / "torch-universal" / "__init__.py").is_file()
    assert run(*command, check=False, PYTHONPATH=path).returncode == 2


def test_a_colon_would_end_the_entry(tmp_path):
    with pytest.raises(ValueError, match="separates its entries by colons"):
        local_kernel.write(tmp_path / "a:b")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_gpt_oss_runs_on_it(tmp_path, device):
    """tests/fa3/gpt_oss.py; transformers takes few versions of `kernels`."""
    for name in ("transformers", "kernels"):
        try:
            importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            pytest.skip(f"the package {name} is not installed")
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU")
    path = f"{ROOT / 'flash-attn-3'}:{ROOT}:{os.environ.get('PYTHONPATH', '')}"
    local = local_kernel.write(tmp_path)
    command = (sys.executable, "-m", "tests.fa3.gpt_oss", device)
    done = run(*command, PYTHONPATH=path, LOCAL_KERNELS=local, HF_HUB_OFFLINE="1")
    if done.stdout.startswith("skipped: "):
        pytest.skip(done.stdout.removeprefix("skipped: ").strip())
    print(done.stdout)
    assert "tokens as written out" in done.stdout
