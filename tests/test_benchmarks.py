"""The benchmarks, small enough for a test: what they claim holds."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import types
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

import flash_attn
from benchmarks import __main__ as command
from benchmarks import compare, linear, linear_step, pictures, presets, problems, report, rotary
from benchmarks.clock import Clock
from benchmarks.presets import cpu
from benchmarks.rows import Options, Row

CPU = torch.device("cpu")


def test_clock_takes_turns_and_shows_failures_as_missing():
    order = []

    def missing():
        raise NotImplementedError

    contenders = {"a": lambda: order.append("a"), "b": lambda: order.append("b"), "c": missing}
    clock = Clock(CPU)
    medians = clock.measure(contenders, min_samples=7, max_samples=7)
    assert medians["c"] is None
    assert clock.missing == {"c": "NotImplementedError: "}
    assert medians["a"] is not None
    assert order[-14:] == ["a", "b"] * 7
    order.clear()
    clock.measure(contenders, min_samples=1, max_samples=1, warm_ups={"b": 30})
    assert order[:32] == ["a"] * 2 + ["b"] * 30


def test_operation_counts():
    point = problems.Dense(2, 4, 3, 3, 8, causal=True)
    assert point.flops("fwd") == 2 * 2 * 2 * 3 * 10 * 8
    assert point.flops("fwd+bwd") == 3.5 * point.flops("fwd")
    full = problems.Dense(2, 4, 3, 3, 8, causal=False)
    assert full.flops("fwd") == 1.6 * point.flops("fwd")
    window = problems.Dense(2, 4, 3, 3, 8, causal=True, window=(1, 0))
    assert window.flops("fwd") == 0.7 * point.flops("fwd")


def test_benchmark_rows(monkeypatch, tmp_path):
    monkeypatch.setattr(problems, "cpu_grid", lambda *_: [problems.Dense(1, 64, 2, 1, 16, True)])
    rows = list(cpu(Options(CPU, with_standard=True)))
    assert [row.problem.split()[0] for row in rows] == ["fwd", "fwd+bwd"]
    for row in rows:
        assert set(row.milliseconds) == {"ours", "sdpa", "standard"}
        assert row.ratio == row.milliseconds["ours"] / row.milliseconds["sdpa"]
        assert f"{row.ratio:.2f}" in report.table_line(row)
    report.write_json(tmp_path / "rows.json", rows, {"gpu": "none"}, [])
    assert json.loads((tmp_path / "rows.json").read_text())["rows"][0]["ratio"] == rows[0].ratio
    assert report.read_json(tmp_path / "rows.json") == (rows, {"gpu": "none"})


def test_contenders_agree():
    from benchmarks.contenders import dense

    q, k, v = problems.Dense(2, 33, 4, 2, 16, True, torch.float32).inputs(CPU, grad=False)
    attends = dense(CPU, with_standard=True)
    outputs = [attend(q, k, v, True) for attend in attends.values()]
    for out in outputs[1:]:
        torch.testing.assert_close(out, outputs[0], rtol=1e-4, atol=1e-5)


# --- Sweeps ---------------------------------------------------------------------------------------


def test_the_sweep_has_every_head_dim(monkeypatch):
    assert [p.head_dim for p in problems.head_dims(None)] == list(range(32, 257, 16))
    small = problems.Dense(1, 32, 1, 1, 48, True, torch.float32)
    monkeypatch.setattr(problems, "head_dims", lambda dims: [small])
    rows = list(presets.sweep(Options(CPU)))
    assert [row.kind for row in rows] == ["sweep: fwd by head_dim", "sweep: bwd by head_dim"]
    assert all(row.x == 48 and row.milliseconds["ours"] for row in rows)


def test_memory_grows_with_the_length_and_not_with_its_square():
    rows = list(presets.memory(Options(CPU, seqlens={512, 2048}, with_standard=True)))
    held = {name: [row.rates[name] for row in rows] for name in ("ours", "standard")}
    assert held["ours"][1] < 8 * held["ours"][0]
    assert held["standard"][1] > 12 * held["standard"][0]
    assert rows[0].unit == "MB"


def test_rotary_counts_what_it_moves(monkeypatch):
    point = rotary.Rotary("q and k", 2, 8, 3, 1, 16, 8, torch.float32)
    assert point.moved == 2 * 4 * 2 * 8 * 4 * 16
    in_place = rotary.Rotary("q and k", 2, 8, 3, 1, 16, 8, torch.float32, inplace=True)
    assert in_place.moved == point.moved / 2
    packed = rotary.Rotary("q and k", 2, 8, 3, 1, 16, 8, torch.float32, sequences=2)
    qkv = rotary.Rotary("qkv", 2, 8, 3, 3, 16, 8, torch.float32, inplace=True)
    monkeypatch.setattr(rotary, "grid", lambda: [point, in_place, packed, qkv])
    rows = list(rotary.rotary(Options(CPU)))
    assert all(row.milliseconds["ours"] and row.milliseconds["copy"] for row in rows)


# --- The linear families --------------------------------------------------------------------------


@pytest.fixture
def installed(monkeypatch):
    """Stand-ins for flash-linear-attention; its fused_chunk does no more than a size."""
    calls = []

    def gla(name, smallest=0):
        def mix(q, k, v, g=None, gk=None):
            gate = g if g is not None else gk
            calls.append((name, tuple(q.shape), tuple(gate.shape)))
            if q.shape[-1] < smallest:
                raise ValueError(f"K is {q.shape[-1]}: the product of tiles needs 16 x 16")
            return (q * k * gate.view(*gate.shape, *(1,) * (4 - gate.dim()))).sum(
                -1, True
            ) * v, None

        return mix

    package = types.ModuleType("fla")
    ops, simple = types.ModuleType("fla.ops.gla"), types.ModuleType("fla.ops.simple_gla")
    ops.chunk_gla, ops.fused_chunk_gla = gla("chunk"), gla("fused_chunk", 16)
    ops.fused_recurrent_gla = gla("fused_recurrent")
    simple.chunk_simple_gla = gla("simple")
    for name, module in (
        ("fla", package),
        ("fla.ops", types.ModuleType("fla.ops")),
        ("fla.ops.gla", ops),
        ("fla.ops.simple_gla", simple),
        ("mamba_ssm", None),
    ):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(linear, "HIDDEN", 32)
    monkeypatch.setattr(linear, "TUNING", 3)
    return calls


def run_linear(*arguments: str, monkeypatch, tmp_path) -> dict:
    path = tmp_path / "linear.json"
    line = ["benchmarks", "linear", "--device", "cpu", "--out", str(path), *arguments]
    monkeypatch.setattr(sys, "argv", line)
    assert command.main() == 0
    return json.loads(path.read_text())


def test_linear(installed, monkeypatch, tmp_path, capsys):
    small = [linear.Linear("head_dim", 1, 64, 16, 0.5), linear.Linear("seqlen", 1, 128, 32, 0.5)]
    monkeypatch.setattr(linear, "grid", lambda options: small)
    found = run_linear(monkeypatch=monkeypatch, tmp_path=tmp_path)
    assert [row["axis"] for row in found["rows"]] == ["head_dim"] * 2 + ["seqlen"] * 2
    times = found["rows"][0]["milliseconds"]
    assert list(times) == ["ours", "our simple gla", "our gla", "gla chunk", "gla fused_chunk",
                           "gla fused_recurrent", "simple gla"]  # fmt: skip
    assert [name for name, time in times.items() if time is None] == ["gla fused_chunk"]
    assert found["rows"][2]["milliseconds"]["gla fused_chunk"]
    told = capsys.readouterr().out
    assert "gla fused_chunk cannot do fwd d16" in told
    assert "K is 8: the product of tiles needs 16 x 16" in told
    assert any("by head_dim" in note for note in found["notes"])
    assert (tmp_path / "linear.png").stat().st_size > 10_000
    chunk = [shapes for name, *shapes in installed if name == "chunk"]
    assert len(chunk) >= 4 * (3 + 5), "three calls before the samples"
    assert chunk[0] == [(1, 64, 2, 8), (1, 64, 2, 8)]
    assert next(s for name, *s in installed if name == "simple") == [(1, 64, 2, 8), (1, 64, 2)]


def test_mamba2_where_it_is_installed(installed, monkeypatch):
    """mamba_ssm's scan takes v, a step > 0 for each token and head, a rate < 0 a head, k and q."""
    scan = Mock(side_effect=lambda v, step, rate, k, q, chunk_size: v)
    for name in ("mamba_ssm", "mamba_ssm.ops", "mamba_ssm.ops.triton"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    combined = types.ModuleType("mamba_ssm.ops.triton.ssd_combined")
    combined.mamba_chunk_scan_combined = scan
    monkeypatch.setitem(sys.modules, combined.__name__, combined)
    found = linear.contenders()
    assert "simple gla" not in found
    linear._step("fwd", found["mamba2"], linear.Linear("seqlen", 1, 64, 16, 0.5), CPU)()
    v, step, rate, k, q = scan.call_args.args
    assert (v.shape, step.shape, rate.shape) == ((1, 64, 2, 16), (1, 64, 2), (2,))
    assert k.shape == q.shape == (1, 64, 2, 8)
    assert (step > 0).all()
    assert (rate < 0).all()


def test_linear_without_the_packages(monkeypatch, tmp_path, capsys):
    for name in ("fla", "fla.ops.gla", "fla.ops.simple_gla", "mamba_ssm"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(linear, "grid", lambda options: [linear.Linear("seqlen", 1, 64, 16, 1.0)])
    found = run_linear("--no-plot", monkeypatch=monkeypatch, tmp_path=tmp_path)
    assert set(found["rows"][0]["missing"]) == set(found["rows"][0]["milliseconds"]) - {
        *("ours", "our simple gla", "our gla")
    }
    assert "gla chunk cannot do fwd d16 b1 s64 h128 k16 and 1 more: " in capsys.readouterr().out


def test_linear_step(installed, monkeypatch):
    """fla's recurrences get a token as a sequence of one; mamba_ssm has no decay a channel."""
    monkeypatch.setattr(linear_step, "HIDDEN", 32)
    monkeypatch.setattr(linear_step, "TUNING", 3)
    taken = []

    def mix(q, k, v, initial_state, output_final_state, g=None, gk=None):
        taken.append((tuple(q.shape), tuple((g if gk is None else gk).shape)))
        return v, initial_state

    monkeypatch.setattr(sys.modules["fla.ops.gla"], "fused_recurrent_gla", mix)
    simple = sys.modules["fla.ops.simple_gla"]
    monkeypatch.setattr(simple, "fused_recurrent_simple_gla", mix, raising=False)
    rows = list(linear_step.linear_step(Options(CPU, dims={16}, expand_k=0.5)))
    assert [row.problem for row in rows] == [
        "linear_step scalar d16 k8 b64 h2", "linear_step gla d16 k8 b64 h2",
    ]  # fmt: skip
    for row in rows:
        assert all(row.rates[name] for name in ("ours", "copy", "fla"))
        assert row.rates["ours"] == pytest.approx(
            8 * 64 * 2 * 8 * 16 / row.milliseconds["ours"] / 1e6
        )
        assert list(row.missing) == ["mamba_ssm"]
        assert row.ratio == row.milliseconds["ours"] / row.milliseconds["copy"]
    assert taken[0] == ((64, 1, 2, 8), (64, 1, 2))
    assert taken[-1] == ((64, 1, 2, 8), (64, 1, 2, 8))


def test_mambas_step_gets_steps_and_rates(monkeypatch):
    update = Mock(side_effect=lambda state, x, dt, A, B, C: x)
    module = types.ModuleType("mamba_ssm.ops.triton.selective_state_update")
    module.selective_state_update = update
    for name in ("mamba_ssm", "mamba_ssm.ops", "mamba_ssm.ops.triton"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    inputs = linear_step.Step("scalar", 3, 1024, 16).inputs(CPU)
    linear_step._peer(linear_step._mamba, "scalar")(*inputs)
    state, x, dt, A, B, C = update.call_args.args
    assert (state.shape, x.shape, dt.shape) == ((3, 2, 1024, 16), (3, 2, 1024), (3, 2, 1024))
    assert (A.shape, B.shape, C.shape) == ((2, 1024, 16), (3, 2, 16), (3, 2, 16))
    assert (dt >= 0).all()
    assert (A < 0).all()


def test_the_grid_of_steps():
    points = list(linear_step.grid(Options(CPU)))
    assert {p.head_dim for p in points} == set(linear.HEAD_DIMS)
    assert {p.batch for p in points if p.head_dim == 128} == set(linear_step.BATCHES)
    assert all(p.moved == 8 * p.batch * 2048 * p.head_dim_k for p in points)


def test_attention_ends_at_512(installed, monkeypatch):
    wide = linear.Linear("head_dim", 1, 64, 1024, 0.5)
    monkeypatch.setattr(linear, "grid", lambda options: [wide])
    row = next(linear.linear(Options(CPU)))
    assert row.milliseconds["ours"] is None
    assert "512" in row.missing["ours"]


def test_where_curves_cross():
    def row(x, ours, other):
        return Row("linear", "fwd x", "Mtok/s", {"ours": ours, "a": other, "b": 9.0}, {},
                   axis="seqlen", x=x)  # fmt: skip

    rows = [row(1024, 1.0, 2.0), row(4096, 4.0, 2.0), row(16384, None, 8.0)]
    first, second = linear.crossings(rows)
    assert first == (
        "linear: fwd by seqlen: a and ours cross at 2,048; time of a / ours is 2.00 at 1024 and "
        "0.50 at 4096"
    )
    assert "ours is faster at every size both do" in second
    assert not linear.crossings([Row("fwd", "fwd x", "", {"ours": 1.0, "fa2": 2.0})])


# --- Against an earlier run -----------------------------------------------------------------------


def test_what_became_slower(tmp_path):
    def rows(ours, peak):
        return [
            Row("fwd", "fwd a", "TFLOP/s", {"ours": ours, "fa2": ours}, {"ours": 1, "fa2": 1}),
            Row("scores", "fwd b", "TFLOP/s", {"plain": 1.0, "alibi": None}, {"plain": 1}),
            Row("memory", "peak c", "MB", {"ours": ours}, {"ours": peak}, axis="seqlen", x=1.0),
        ]

    old = tmp_path / "old.json"
    report.write_json(old, rows(1.0, 100.0), {}, [])
    assert compare.regressions(rows(1.04, 104.0), old, 0.05) == ([], 3)
    lines, compared = compare.regressions(rows(1.5, 110.0), old, 0.05)
    assert compared == 3
    assert lines == [
        "fwd fwd a ours: 1 → 1.5 (+50.0%)",
        "memory peak c ours: 100 → 110 (+10.0%)",
    ]


@pytest.mark.parametrize(("before", "code"), [(1.0, 0), (0.9, 1)])
def test_the_exit_code_tells(monkeypatch, tmp_path, before, code, capsys):
    def rows(milliseconds):
        return [Row("cpu", "fwd a", "GFLOP/s", {"ours": milliseconds}, {"ours": 1.0})]

    old = tmp_path / "old.json"
    report.write_json(old, rows(before), {}, [])
    monkeypatch.setitem(command.PRESETS, "cpu", lambda options: rows(1.0))
    line = f"benchmarks cpu --device cpu --no-plot --out {tmp_path}/new.json --compare {old}"
    monkeypatch.setattr(sys, "argv", line.split())
    assert command.main() == code
    assert f"1 figures compared with {old}, {code} are worse" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", [*line.split(), "--threshold", "0.2"])
    assert command.main() == 0
    report.write_json(old, [], {}, [])
    assert command.main() == 1, "nothing to compare with"


def test_what_was_measured_is_written_when_interrupted(monkeypatch, tmp_path):
    def rows(options):
        yield Row("cpu", "fwd a", "GFLOP/s", {"ours": 1.0}, {"ours": 1.0})
        raise KeyboardInterrupt

    monkeypatch.setitem(command.PRESETS, "cpu", rows)
    line = f"benchmarks cpu --device cpu --no-plot --out {tmp_path}/new.json"
    monkeypatch.setattr(sys, "argv", line.split())
    assert command.main() == 0
    assert len(json.loads((tmp_path / "new.json").read_text())["rows"]) == 1


@pytest.mark.parametrize("kinds", [1, 3, 5])
def test_a_picture_has_a_panel_for_each_kind(tmp_path, monkeypatch, kinds):
    figure = pytest.importorskip("matplotlib.figure")
    panels = []
    monkeypatch.setattr(figure.Figure, "savefig", lambda f, *_, **__: panels.append(len(f.axes)))
    rows = [
        Row("fwd", f"kind{n} d64", "TFLOP/s", {"ours": 1.0}, {"ours": 1.0}) for n in range(kinds)
    ]
    report.plot(tmp_path / "rows.png", rows, "a machine")
    assert panels == [kinds]


def labels(figure) -> list[tuple[str, str]]:
    return [(axis.get_xlabel(), axis.get_ylabel()) for axis in figure.axes]


@pytest.mark.parametrize("axis", ["", "seqlen"])
@pytest.mark.parametrize("unit", ["TFLOP/s", "MB"])
def test_a_picture_says_what_it_shows(tmp_path, monkeypatch, axis, unit):
    module = pytest.importorskip("matplotlib.figure")
    drawn = []
    monkeypatch.setattr(module.Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    rows = [Row("fwd", "fwd d64", unit, {"ours": 1.0}, {"ours": 1.0}, axis=axis, x=64.0)]
    report.plot(tmp_path / "rows.png", rows, "an H200")
    (figure,) = drawn
    across, up = labels(figure)[0]
    better = "lower" if unit == "MB" else "higher"
    assert (up if axis else across) == f"{unit} ({better} is better)"
    assert across == "sequence length, tokens" or not axis
    assert figure.get_suptitle().startswith("an H200")
    assert ("h: heads of q" in figure.get_suptitle()) == (not axis)
    # The legend is above the panel: no point is there.
    legend = figure.axes[0].get_legend()
    legend.figure.canvas.draw()
    assert legend.get_window_extent().y0 >= figure.axes[0].get_window_extent().y1 - 1


# --- The documents' pictures ----------------------------------------------------------------------


def text_of(path: Path) -> str:
    return path.read_bytes()[:400].decode("latin1")


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_a_picture_shows_the_committed_figures(name):
    """By the digest in it: `make pictures` draws it again."""
    assert pictures.PICTURES[name].digest() in text_of(pictures.ROOT / name)


def test_every_picture_of_the_documents_is_drawn_from_figures():
    found = {
        path.relative_to(pictures.ROOT).as_posix() for path in pictures.ROOT.glob("docs/*.png")
    }
    assert found == set(pictures.PICTURES)


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_pictures_are_drawn(name, tmp_path, monkeypatch):
    module = pytest.importorskip("matplotlib.figure")
    drawn = []
    save = module.Figure.savefig

    def savefig(figure, *args, **kwargs):
        drawn.append(figure)
        save(figure, *args, **kwargs)

    monkeypatch.setattr(module.Figure, "savefig", savefig)
    pictures.draw(name, tmp_path / "picture.png")
    assert pictures.PICTURES[name].digest() in text_of(tmp_path / "picture.png")
    (figure,) = drawn
    assert any("is better" in label for pair in labels(figure) for label in pair)
    assert re.match("NVIDIA H200|H200|a CPU", figure.get_suptitle())


# --- Where figures go -----------------------------------------------------------------------------


def run_cpu(monkeypatch, tmp_path, *arguments: str) -> None:
    rows = [Row("cpu", "fwd a", "GFLOP/s", {"ours": 1.0}, {"ours": 1.0})]
    monkeypatch.setitem(command.PRESETS, "cpu", lambda options: rows)
    monkeypatch.setattr(command, "RESULTS", tmp_path / "of a user")
    monkeypatch.setattr(command, "RECORDS", tmp_path)
    monkeypatch.delenv("FLASH_ATTN_ARCH", raising=False)
    monkeypatch.setattr(sys, "argv", ["benchmarks", "cpu", "--device", "cpu", *arguments])
    assert command.main() == 0


def test_a_users_figures_change_nothing_that_git_has():
    listed = subprocess.run(
        ["git", "check-ignore", "-q", command.RESULTS / "cpu.json"], cwd=pictures.ROOT
    )
    assert listed.returncode in (0, 128)  # 128: not a checkout
    assert command.RESULTS.is_relative_to(pictures.ROOT / "build")


def test_figures_go_to_the_users_folder(monkeypatch, tmp_path):
    run_cpu(monkeypatch, tmp_path, "--no-plot")
    assert [path.name for path in tmp_path.rglob("*.json")] == ["cpu.json"]
    assert (tmp_path / "of a user" / "cpu.json").exists()


def test_recorded_figures(monkeypatch, tmp_path):
    run_cpu(monkeypatch, tmp_path, "--record")
    assert [path.name for path in tmp_path.iterdir()] == ["cpu.json"]
    rows = [Row(name, "fwd a", "TFLOP/s", {"ours": 1.0}) for name in ("fwd", "bwd")]
    monkeypatch.setenv("FLASH_ATTN_ARCH", "80")
    paths = command.record(rows, {"gpu": "NVIDIA H200"})
    assert [path.name for path in paths] == ["h200_fwd_sm80.json", "h200_bwd_sm80.json"]


def test_only_whole_presets_are_recorded(monkeypatch, tmp_path, capsys):
    with pytest.raises(SystemExit):
        run_cpu(monkeypatch, tmp_path, "--record", "--dims", "64")
    assert "whole presets" in capsys.readouterr().err

    def interrupted(options):
        yield Row("cpu", "fwd a", "GFLOP/s", {"ours": 1.0}, {"ours": 1.0})
        raise KeyboardInterrupt

    monkeypatch.setitem(command.PRESETS, "cpu", interrupted)
    monkeypatch.setattr(sys, "argv", ["benchmarks", "cpu", "--device", "cpu", "--record"])
    with pytest.raises(KeyboardInterrupt):
        command.main()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("served_by", ["flash_attn", None])
def test_this_library_under_the_names_of_fa3_is_no_peer(monkeypatch, served_by):
    from benchmarks import contenders

    module = types.ModuleType("flash_attn_interface")
    module.flash_attn_func = module.flash_attn_varlen_func = flash_attn.flash_attn_func
    if served_by is not None:
        module.SERVED_BY = served_by
    monkeypatch.setitem(sys.modules, "flash_attn_interface", module)
    found = [
        contenders.fa3_module() is not None,
        contenders.peer(contenders.fa3_module()) is not None,
        "fa3" in contenders.packed(torch.device("cpu")),
        "fa3" in contenders.with_cache(torch.device("cpu")),
        "fa3" in contenders.serving(torch.device("cpu"), (-1, -1)),
    ]
    assert found == [served_by is None] * 5
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)  # not installed
    assert contenders.fa3_module() is None
