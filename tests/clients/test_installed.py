"""The wheel as it is installed: the package of these tests, and what a client makes of it."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile

import pytest
import torch

from build_tools import stubs
from tests.commands import ROOT, wheel_of

pytest.importorskip("transformers")

# Run where neither the checkout nor its tests are on the path.
PROGRAM = """
import sys, tempfile, torch, transformers
import flash_attn

assert flash_attn.__file__.startswith(sys.argv[1]), flash_attn.__file__
sizes = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
             num_key_value_heads=1, vocab_size=50)
config = transformers.LlamaConfig(**sizes)
load = transformers.AutoModelForCausalLM.from_pretrained
with tempfile.TemporaryDirectory() as folder:
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    try:
        load(folder, attn_implementation="flash_attention_2")
    except ImportError as error:
        assert "not available on CPU" in str(error), error
        assert not torch.cuda.is_available()

    from flash_attn.utils.transformers import allow_cpu

    for _ in range(2):
        allow_cpu()
    ours = load(folder, attn_implementation="flash_attention_2", dtype=torch.bfloat16)
    eager = load(folder, attn_implementation="eager", dtype=torch.bfloat16)
assert ours.config._attn_implementation == "flash_attention_2"
ids = torch.arange(2, 22).view(2, 10)
mask = (ids % 10 < 7).long()  # three of padding
with torch.no_grad():
    outs = [model(input_ids=ids, attention_mask=mask).logits for model in (ours, eager)]
torch.testing.assert_close(*[out[mask.bool()] for out in outs], rtol=2**-6, atol=2**-6)
print("served")
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return wheel_of(tmp_path_factory.mktemp("wheel"), FLASH_ATTN_CUDA_ARCHS="none")


def test_the_wheel_holds_what_these_tests_run(wheel):
    """Byte by byte: what they say of the checkout they say of the wheel."""
    with zipfile.ZipFile(wheel) as archive:
        sources = {
            name for name in archive.namelist() if name.endswith((".py", ".pyi", "py.typed"))
        }
        assert {f"flash_attn/{name}" for name in ("utils/transformers.py", "py.typed")} <= sources
        assert {module + "i" for module in stubs.MODULES} <= sources
        for name in sources:
            assert archive.read(name) == (ROOT / name).read_bytes(), name


@pytest.mark.skipif(torch.cuda.is_available(), reason="about a machine without a GPU")
def test_a_model_is_loaded_onto_the_cpu(wheel, tmp_path):
    """The client refuses the CPU by itself, and takes it after one line of ours."""
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(site)],
        env={**os.environ, "PYTHONPATH": str(site), "HF_HUB_OFFLINE": "1"},
        cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "served"
