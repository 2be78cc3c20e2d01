"""Programs that import fla, mamba_ssm or causal_conv1d run on these functions."""

from __future__ import annotations

import importlib
import inspect
import json
import subprocess
import sys
import types
from pathlib import Path

import pytest

from flash_attn import linear
from flash_attn.linear import serve

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def served():
    linear.serve_fla()
    yield
    serve.withdraw()


def test_names(served):
    from causal_conv1d import causal_conv1d_fn
    from fla.layers import GatedLinearAttention
    from fla.ops import chunk_simple_gla
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    from fla.ops.gla import chunk_gla, fused_chunk_gla
    from mamba_ssm.ops.triton.selective_state_update import selective_state_update
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

    assert GatedLinearAttention is linear.GatedLinearAttention
    assert chunk_gla is fused_chunk_gla is linear.chunk_gla
    for function in (
        causal_conv1d_fn,
        chunk_gated_delta_rule,
        chunk_simple_gla,
        mamba_chunk_scan_combined,
        selective_state_update,
    ):
        assert function is getattr(linear, function.__name__)
    with pytest.raises(ImportError):
        importlib.import_module("fla.ops.kda")
    assert importlib.util.find_spec("fla") is not None  # who asks whether it is installed


def test_twice_and_back():
    linear.serve_fla()
    linear.serve_fla()
    serve.withdraw()
    assert not [name for name in sys.modules if name.split(".")[0] in serve.VERSIONS]


def test_refuses_beside_the_package_itself(monkeypatch):
    monkeypatch.setitem(sys.modules, "mamba_ssm", types.ModuleType("mamba_ssm"))
    with pytest.raises(RuntimeError, match="mamba_ssm is already imported"):
        linear.serve_fla()
    assert "fla" not in sys.modules


@pytest.mark.parametrize(
    ("name", "names"),
    [
        ("chunk_gla", "q k v g scale initial_state output_final_state state_v_first cu_seqlens"),
        (
            "fused_recurrent_gla",
            "q k v gk gv scale initial_state output_final_state reverse state_v_first cu_seqlens",
        ),
        (
            "mamba_chunk_scan_combined",
            "x dt A B C chunk_size D z dt_bias initial_states seq_idx cu_seqlens dt_softplus",
        ),
        ("selective_state_update", "state x dt A B C D z dt_bias dt_softplus"),
        ("causal_conv1d_fn", "x weight bias seq_idx initial_states return_final_states"),
        ("causal_conv1d_update", "x conv_state weight bias activation cache_seqlens"),
    ],
)
def test_positions(name, names):
    """Positional callers meet the arguments where they are used to them."""
    parameters = list(inspect.signature(getattr(linear, name)).parameters)
    assert parameters[: len(names.split())] == names.split()


@pytest.fixture(scope="module")
def differences() -> dict[str, dict[str, float]]:
    pytest.importorskip("transformers")
    command = [sys.executable, "-m", "tests.linear.served_models"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mamba2", "bamba", "qwen3_next"])
def test_models(differences, family):
    """Logits, padded ones, generated tokens and gradients are those of transformers' own path, and
    packed sequences, which raise there, are as each alone."""
    found = differences[family]
    assert len(found) >= 6
    assert found.pop("generated") == 0
    packed = found.pop("packed")
    assert packed < 1e-4
    for name, difference in found.items():
        assert difference < (1e-3 if "gradient" in name else 1e-4), name
