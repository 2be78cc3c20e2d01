"""What the engines' modules say where an engine is missing, and the check that users run."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from flash_attn import engines
from flash_attn.engines import check
from tests.engines import stubs, vllm_stub


@pytest.mark.parametrize(
    ("engine", "said"),
    [("vllm", "vLLM is needed, 0.33 .*pip install vllm"), ("sglang", "SGLang is needed, 0.5.23 ")],
)
def test_without_the_engine(monkeypatch, engine, said):
    monkeypatch.setitem(sys.modules, engine, None)
    monkeypatch.delitem(sys.modules, f"flash_attn.engines.{engine}", raising=False)
    with pytest.raises(ImportError, match=said):
        importlib.import_module(f"flash_attn.engines.{engine}")
    with pytest.raises(ImportError, match=said):
        getattr(engines, f"register_{engine}")()


def test_the_package_imports_no_engine():
    code = "import flash_attn, sys; print([m for m in sys.modules if 'engines' in m])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_entry_points():
    """By which the engines find what registers their backends."""
    tomllib = pytest.importorskip("tomllib")  # of Python 3.11
    root = Path(__file__).resolve().parents[2]
    groups = tomllib.loads((root / "pyproject.toml").read_text())["project"]["entry-points"]
    assert set(groups) == set(check.PLUGINS.values())
    for points in groups.values():
        module, _, name = points["flash_attn"].partition(":")
        assert callable(getattr(importlib.import_module(module), name))


@pytest.mark.skipif(stubs.is_installed("sglang"), reason="SGLang is installed")
def test_the_command_without_the_engine():
    command = [sys.executable, "-m", "flash_attn.engines.check", "sglang"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == (
        "SGLang is not installed here, so there is nothing to check: pip install sglang\n"
    )


def test_what_else_may_be_missing(monkeypatch):
    monkeypatch.setattr(check, "version", lambda engine: "0.33.0")
    monkeypatch.setattr(check.backend, "cuda_problem", lambda: "this torch has no CUDA")
    assert "on a GPU, which is not possible here: this torch" in check.why_not("vllm")
    monkeypatch.setattr(check.backend, "cuda_problem", lambda: "")
    monkeypatch.setattr(check.torch.cuda, "is_available", lambda: False)
    assert "no GPU was found" in check.why_not("vllm")
    monkeypatch.setattr(check.torch.cuda, "is_available", lambda: True)
    points = SimpleNamespace(names={"somebody"})
    monkeypatch.setattr(check.importlib.metadata, "entry_points", lambda group: points)
    assert "entry points of an installed flash_attn" in check.why_not("vllm")
    points.names.add("flash_attn")
    assert check.why_not("vllm") is None


AGREED = check.Generated([[1, 2, 3], [4, 5, 6]], [[-1.0, -2.0, -3.0], [-1.0, -2.0, -3.0]])


@pytest.mark.parametrize(
    ("tokens", "logprobs", "agree", "said"),
    [
        ([4, 5, 6], [-1.0, -2.0, -3.01], True, "6 of 6 tokens"),
        (
            [4, 7, 9],
            [-1.0, -2.02, -9.0],
            True,
            "from number 1 on, of log-probability -2.0",
        ),
        ([4, 7, 9], [-1.0, -2.2, -3.0], False, "4 of 6 tokens"),
        ([4, 5, 6], [-1.0, -2.0, -3.2], False, "at most 0.2000"),
    ],
    ids=["same", "tie", "other", "far"],
)
def test_comparison(tokens, logprobs, agree, said):
    theirs = check.Generated([[1, 2, 3], tokens], [[-1.0, -2.0, -3.0], logprobs])
    found, notes = check.compare(AGREED, theirs)
    assert found == agree
    assert said in "\n".join(notes)


def outputs(rows: int, tokens: list[int]) -> list:
    """Of vLLM: a dictionary of log-probabilities for each token."""
    logprobs = [{t: SimpleNamespace(logprob=-t / 8)} for t in tokens]
    return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=tokens, logprobs=logprobs)])] * rows


class LLM:
    """vLLM's, which takes the backend that it is asked for from its registry."""

    def __init__(self, model, *, attention_config, max_num_batched_tokens, **_):
        assert max_num_batched_tokens < max(check.PROMPTS)  # chunks
        if attention_config:
            assert attention_config == {"backend": "CUSTOM"}
            importlib.import_module("flash_attn.engines.vllm")

    def generate(self, given, params):
        assert [len(x["prompt_token_ids"]) for x in given] == list(check.PROMPTS)
        return outputs(len(given), [3, 1, 2])


class SGLang:
    """SGLang's Engine."""

    def __init__(self, *, model_path, attention_backend, **_):
        assert attention_backend in (None, "flash_attn")

    def generate(self, *, input_ids, sampling_params, return_logprob):
        chosen = [(-t / 8, t, None) for t in (3, 1, 2)]
        return [{"meta_info": {"output_token_logprobs": chosen}}] * len(input_ids)

    def shutdown(self):
        pass


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_run(monkeypatch, tmp_path, capsys, engine):
    """The whole command, with an engine that says the same whatever its backend."""

    def run(command, check):
        arguments = command[command.index("flash_attn.engines.check") + 1 :]
        with pytest.MonkeyPatch.context() as patch:
            for name, value in vllm_stub.MODULES.items() if engine == "vllm" else ():
                stubs._install(patch, name, value)
            fakes = {"LLM": LLM, "SamplingParams": SimpleNamespace, "Engine": SGLang}
            module = sys.modules.get(engine) if engine == "vllm" else ModuleType("sglang")
            for name, value in fakes.items():
                patch.setattr(module, name, value, raising=False)
            patch.setitem(sys.modules, engine, module)
            patch.delitem(sys.modules, "flash_attn.engines.vllm", raising=False)
            assert main(arguments) == 0
            sys.modules.pop("flash_attn.engines.vllm", None)
        assert json.loads((folder / "generated.json").read_text())["tokens"][0] == [3, 1, 2]

    main, folder = check.main, tmp_path
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    monkeypatch.setattr(check, "why_not", lambda engine: None)
    monkeypatch.setattr(check, "version", lambda engine: "0.1")
    monkeypatch.setattr(check.torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(check.subprocess, "run", run)
    monkeypatch.setattr(check.tempfile, "TemporaryDirectory", lambda: nullcontext(tmp_path))
    assert main([engine]) == 0
    said = capsys.readouterr().out
    assert "24 of 24 tokens are the same" in said
    assert said.endswith("it works\n")
    assert {"config.json", "model.safetensors"} <= {x.name for x in tmp_path.iterdir()}
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["num_hidden_layers"] == 4
