"""`make tune` without a GPU: it finds a machine again from times that the model made of it."""

from __future__ import annotations

import json
import random
import re
import shutil
import subprocess

import numpy as np
import pytest
import torch

from benchmarks.regret.measure import Regret
from benchmarks.regret.problems import Problem, draw
from benchmarks.tune import __main__ as tune
from benchmarks.tune.machine_file import name_of, text_of
from benchmarks.tune.model import CSRC, Model, can_be_predicted
from build_tools import host_compiler

MIB = 2**20
MACHINE = {"gpu": "NVIDIA Test 80GB", "l2_bytes": 60 * MIB}
# What the other machine's numbers are, over those of the nearest one.
OTHER = {"kv_persistent/step": 0.65, "packed/step": 0.85, "launch": 0.8}

pytestmark = pytest.mark.skipif(
    not any(map(shutil.which, ("g++", "c++", "clang++"))), reason="needs a C++ compiler"
)


class _Gpu:
    """The other machine, with 0.5% of noise; as benchmarks.regret.measure.Bench."""

    def __init__(self, _device):
        self.dice, self.count = random.Random(0), 0
        self.model = Model(MACHINE["l2_bytes"])
        factors = [
            next((f for end, f in OTHER.items() if n.endswith(end)), 1.0) for n in self.model.names
        ]
        self.model.numbers = self.model.numbers * np.array(factors)

    def measure(self, problem: Problem) -> Regret | None:
        if not can_be_predicted(problem):
            return None
        choices, this = self.model.add(problem), np.array([self.count], dtype=np.int32)
        self.count += 1
        us, planned = self.model.predict(this, len(choices))
        times = [float(t) * self.dice.gauss(1, 0.005) for t in us]
        everything = list(range(len(choices)))
        return Regret(problem, choices, times, list(us), int(planned.argmax()), everything)


def test_finds_the_other_machine_and_writes_it(tmp_path, capsys, monkeypatch):
    measured, out, models, tuned = tmp_path / "measured.json", tmp_path / "test.h", [], tune.tuned
    counts = {"backward": 120, "forward": 70, "cache": 20}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(tune, "describe_machine", lambda *_: MACHINE)
    monkeypatch.setattr(tune, "Bench", _Gpu)
    monkeypatch.setattr(tune, "draw", lambda seed, _: draw(seed, counts))
    monkeypatch.setattr(tune, "MEASURED", measured)
    monkeypatch.setattr(tune, "tuned", lambda *args: models.append(tuned(*args)) or models[0])
    assert tune.main(["--seed", "3", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    for direction in ("backward", "forward"):
        line = re.search(rf"{direction}, .*over best (\S+) → (\S+); .* (\S+) → (\S+)", printed)
        regret, after, near, near_after = map(float, line.groups())
        assert regret > 1.005, printed
        assert after - 1 < 0.6 * (regret - 1), printed
        assert near_after > near, printed
    _compiles_and_says(out, models[0], tmp_path)
    machine, regrets = tune.load([measured])
    assert machine == MACHINE
    assert len(regrets) > 190


def _compiles_and_says(header, model: Model, folder) -> None:
    """The written file's numbers are the model's, with four digits."""
    program = folder / "numbers.cpp"
    members = [name for name in model.names if "/" not in name]
    prints = "".join(f"show(kTest.{name});" for name in members)
    program.write_text(f"""
        #include <cstdio>
        #include "{header}"
        using namespace flash::plan;
        void show(double x) {{ std::printf("%.9g\\n", x); }}
        void show_all(auto const& rows, int kernels) {{
          for (auto& r : rows)
            for (int i = 0; i < kernels; ++i) show(r.kernels[i].fixed), show(r.kernels[i].step);
        }}
        int main() {{
          {prints}
          show_all(kTest.backward, 3), show_all(kTest.forward, 4);
          show_all(kTest.forward_codes, 4), show_all(kTest.forward_fp8, 2);
          show_all(kTest.decode, 2);
        }}
    """)
    command = [
        host_compiler.find(FileNotFoundError),
        "-std=c++20",
        "-Wall",
        "-Werror",
        f"-I{CSRC}",
        str(program),
    ]
    subprocess.run([*command, "-o", str(folder / "numbers")], check=True)
    shown = subprocess.run([folder / "numbers"], check=True, capture_output=True, text=True).stdout
    np.testing.assert_allclose([float(x) for x in shown.split()], model.numbers, rtol=6e-4)


def test_the_files_that_are_built_are_as_tune_writes_them():
    for gpu, mib in (("NVIDIA H200", 60), ("NVIDIA H100 80GB HBM3", 50)):
        name = name_of(gpu)
        written = (CSRC / "plan" / "machines" / f"{name}.h").read_text()
        assert text_of(Model(mib * MIB), gpu, name) == written


def test_names_of_machines():
    gpus = [
        "NVIDIA H100 80GB HBM3",
        "NVIDIA H100 PCIe",
        "NVIDIA A100-SXM4-80GB",
        "NVIDIA GH200 480GB",
    ]
    assert list(map(name_of, gpus)) == ["h100", "h100_pcie", "a100", "gh200"]


def test_runs_of_two_gpus_are_refused(tmp_path):
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    for gpu, file in zip(("NVIDIA H100", "NVIDIA H200"), files):
        file.write_text(json.dumps({"machine": {"gpu": gpu, "l2_bytes": 1}, "regrets": []}))
    with pytest.raises(SystemExit, match="one GPU; these are of NVIDIA H100, NVIDIA H200"):
        tune.main(["--from", *map(str, files)])
