"""The build: which mode is chosen, what is refused and how, what is compiled for which GPU."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from build_tools import (
    instantiate,
    ninja_file,
    object_file,
    occupancy,
    probe,
    ptxas,
    report,
    resources,
    sass,
    targets,
)
from build_tools.plan import Probes, make_plan, parse_archs
from build_tools.probe import BuildError, Gpu, Nvcc, Torch
from tests.commands import ROOT, run, script

NVCC = Nvcc(Path("/cuda/bin/nvcc"), Path("/cuda"), "13.0.88")
TORCH = Torch(Path("/site/torch"), "2.13.0+cu130", "13.0")
H200 = Gpu("NVIDIA H200", "9.0")
REQUESTED = {"FLASH_ATTN_CUDA_ARCHS": "80;90a"}


def machine(nvcc=NVCC, gpus=(), torch=TORCH, codes=("80", "86", "89", "90", "100")) -> Probes:
    return Probes(
        nvcc=lambda env: nvcc,
        gpus=lambda: list(gpus),
        torch=lambda env: torch,
        codes=lambda _: set(codes),
    )


# Modes


@pytest.mark.parametrize(
    ("env", "probes", "archs", "reason"),
    [
        ({}, machine(), (), "no GPU"),
        ({}, machine(nvcc=None, gpus=[H200]), (), "no nvcc"),
        ({}, machine(gpus=[H200]), ("90a",), "NVIDIA H200"),
        ({}, machine(gpus=[Gpu("A10", "8.6"), Gpu("A100", "8.0")]), ("80", "86"), "A100"),
        ({}, machine(gpus=[Gpu("T4", "7.5")]), (), "need sm_80"),
        ({}, machine(gpus=[Gpu("T4", "7.5"), H200]), ("90a",), "NVIDIA H200"),
        (REQUESTED, machine(), ("80", "90a"), "FLASH_ATTN_CUDA_ARCHS"),
        (REQUESTED, machine(gpus=[H200]), ("80", "90a"), "FLASH_ATTN_CUDA_ARCHS"),
        ({"FLASH_ATTN_CUDA_ARCHS": "none"}, machine(gpus=[H200]), (), "none"),
        ({"FLASH_ATTN_CUDA_ARCHS": "native"}, machine(gpus=[H200]), ("90a",), "H200"),
    ],
)
def test_mode(env, probes, archs, reason):
    plan = make_plan(env, probes)
    assert plan.archs == archs
    assert reason in plan.reason


def test_torch_without_cuda_builds_kernels():
    plan = make_plan(REQUESTED, machine(torch=Torch(Path("/site/torch"), "2.13.0+cpu", None)))
    assert plan.archs == ("80", "90a")


@pytest.mark.parametrize(
    ("env", "probes", "message"),
    [
        (REQUESTED, machine(nvcc=None), r"No nvcc found .* CUDA_HOME"),
        (REQUESTED, machine(nvcc=Nvcc(Path("/n"), Path("/"), "11.8.89")), r"11\.8\.89 .* 12\.4"),
        (REQUESTED, machine(torch=None), r"No torch found .* FLASH_ATTN_TORCH_DIR"),
        (REQUESTED, machine(torch=Torch(Path("/t"), "2.9.1", "13.0")), r"2\.9\.1 .* 2\.10"),
        (REQUESTED, machine(torch=Torch(Path("/t"), "2.13.0", "12.8")), r"CUDA 12\.8, differ"),
        ({}, machine(gpus=[H200], torch=None), r"No torch found .*NVIDIA H200"),
        ({}, machine(gpus=[Gpu("B300", "10.3")]), r"cannot compile for sm_103"),
        ({"FLASH_ATTN_CUDA_ARCHS": "native"}, machine(), r"nvidia-smi shows no GPU"),
        ({"FLASH_ATTN_CUDA_ARCHS": "75"}, machine(), r'"75", but kernels need sm_80'),
        ({"FLASH_ATTN_CUDA_ARCHS": "hopper"}, machine(), r'"hopper"; accepted'),
    ],
)
def test_refusal_is_one_sentence(env, probes, message):
    with pytest.raises(BuildError, match=message) as caught:
        make_plan(env, probes)
    assert str(caught.value).endswith(".")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("request_", ["80;90a", "8.0 9.0", "sm_80,sm_90a", "80;90a;80", "80;90"])
def test_spellings_of_an_architecture(request_):
    assert parse_archs(request_) == ("80", "90a")


# Resources


@pytest.mark.parametrize(
    ("free", "cores", "env", "jobs"),
    [
        (64, 8, {}, 8),
        (8, 8, {}, 2),
        (1, 8, {}, 1),
        (64, 8, {"MAX_JOBS": "3"}, 3),
        (2, 2, {"MAX_JOBS": "6"}, 6),
        (16, 8, {"NVCC_THREADS": "2"}, 2),
    ],
)
def test_jobs_are_bounded_by_memory_and_cores(free, cores, env, jobs):
    assert resources.job_count(free, cores, env) == jobs


@pytest.mark.parametrize("env", [{"MAX_JOBS": "0"}, {"MAX_JOBS": "many"}, {"NVCC_THREADS": "-1"}])
def test_bad_job_counts_are_named(env):
    with pytest.raises(BuildError, match=next(iter(env))):
        resources.job_count(64, 8, env)


def test_a_container_s_memory_limit_counts(tmp_path):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 99 kB\nMemAvailable: 67108864 kB\n")
    assert resources.available_gib(tmp_path) == 64
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/memory.max").write_text(f"{6 << 30}\n")
    (tmp_path / "sys/fs/cgroup/memory.current").write_text(f"{2 << 30}\n")
    assert resources.available_gib(tmp_path) == 4
    (tmp_path / "sys/fs/cgroup/memory.max").write_text("max\n")
    assert resources.available_gib(tmp_path) == 64


# Probes


def test_torch_is_read_as_text_not_imported(tmp_path):
    folder = tmp_path / "torch"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise SystemExit('imported')")
    (folder / "version.py").write_text(
        "__version__ = '2.10.1+cu128'\ndebug = False\ncuda: Optional[str] = '12.8'\n"
    )
    for place in (tmp_path, folder):
        torch = probe.find_torch({"FLASH_ATTN_TORCH_DIR": str(place)})
        assert (torch.version, torch.cuda, torch.release) == ("2.10.1+cu128", "12.8", (2, 10))
    with pytest.raises(BuildError, match="FLASH_ATTN_TORCH_DIR"):
        probe.find_torch({"FLASH_ATTN_TORCH_DIR": str(tmp_path / "elsewhere")})


def test_torch_of_this_environment_is_found_under_build_isolation():
    # pip's isolation takes site-packages off sys.path and leaves the interpreter as it is.
    code = (
        "import sys; sys.path[:] = [p for p in sys.path if not p.endswith('-packages')]; "
        "from build_tools import probe; "
        "print(probe.find_torch({}).version); assert 'torch' not in sys.modules"
    )
    import torch

    done = run(sys.executable, "-c", code)
    assert done.stdout.strip() == torch.__version__


def test_nvcc_s_toolkit_is_found_behind_a_script(tmp_path):
    toolkit = tmp_path / "toolkit"
    script(
        toolkit / "bin" / "nvcc",
        f'if [ "$1" = --version ]; then echo "release 12.6, V12.6.77"; '
        f'else echo "#$ TOP={toolkit}/bin/.." >&2; fi',
    )
    script(tmp_path / "path" / "nvcc", f'exec {toolkit}/bin/nvcc "$@"')
    found = probe.find_nvcc({"PATH": str(tmp_path / "path")})
    assert (found.path, found.root) == (toolkit / "bin" / "nvcc", toolkit)
    assert found.version == (12, 6)


def test_gpus_are_read_from_nvidia_smi(tmp_path, monkeypatch):
    script(tmp_path / "nvidia-smi", 'echo "NVIDIA H200, 9.0"; echo "Some GPU, [N/A]"')
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert probe.find_gpus() == [H200]


# Targets


def row(arch, direction="fwd"):
    return SimpleNamespace(arch=arch, direction=direction)


def gencodes(*pairs):
    return [f"--generate-code=arch=compute_{a},code={b}" for a, b in pairs]


def test_a_portable_row_has_code_for_every_gpu():
    both = ["80", "90a"]
    everywhere = gencodes(("80", "sm_80"), ("80", "sm_90"), ("80", "compute_80"))
    assert targets.targets(row("sm80"), both) == everywhere


def test_a_row_that_runs_beside_others_has_code_from_hopper_s():
    assert targets.targets(row("sm80", "decode"), ["80", "90a"]) == gencodes(
        ("80", "sm_80"), ("90", "sm_90"), ("80", "compute_80")
    )


def test_a_row_of_another_family_has_code_for_its_gpu():
    assert targets.targets(row("sm90"), ["80", "90a"]) == gencodes(("90a", "sm_90a"))
    assert targets.targets(row("sm90"), ["80"]) == []


def test_a_build_for_one_gpu_has_its_machine_code_only():
    old = row("sm80")
    assert targets.targets(old, ["86"]) == gencodes(("80", "sm_86"))
    assert targets.targets(old, ["90a"]) == gencodes(("80", "sm_90"))


@pytest.mark.parametrize("stem", [instantiate.file_stem, instantiate.family_stem])
def test_instantiation_is_idempotent(tmp_path, stem):
    first = instantiate.generate(tmp_path, ["80", "90a"], stem)
    times = {path: path.stat().st_mtime_ns for path in first}
    text = "\n".join(path.read_text() for path in first if path.suffix == ".cu")
    for row in instantiate.load_table().VARIANTS:
        assert text.count(f"void launch_{row.name}(") == 1
    assert instantiate.generate(tmp_path, ["80", "90a"], stem) == first
    assert {path: path.stat().st_mtime_ns for path in first} == times


@pytest.mark.parametrize("stem", [instantiate.file_stem, instantiate.family_stem])
def test_rows_of_a_file_include_the_same(stem):
    """The file includes what launches the first of them."""
    heads: dict[str, set] = {}
    for row in instantiate.load_table().VARIANTS:
        heads.setdefault(stem(row), set()).add((row.arch, row.direction, row.cluster > 1))
    assert all(len(own) == 1 for own in heads.values())


def variant(arch, dtype, allow_spills=0):
    return instantiate.load_table().Variant(
        direction="fwd", arch=arch, dtype=dtype, head_dim=64, head_dim_v=64, block_m=128,
        block_n=64, warps=4, stages=1, scores="plain", why="", allow_spills=allow_spills,
    )  # fmt: skip


@pytest.fixture
def table(monkeypatch):
    """bf16 has a kernel for Hopper; fp16 has not."""
    rows = [variant("sm80", "bf16", 400), variant("sm80", "fp16", True), variant("sm90", "bf16")]
    monkeypatch.setattr(instantiate.load_table(), "VARIANTS", rows)


@pytest.mark.parametrize(
    ("archs", "names"),
    [
        (["80"], ["sm80_bf16", "sm80_fp16"]),
        (["90a"], ["sm80_bf16", "sm80_fp16", "sm90_bf16"]),
        (["80", "90a"], ["sm80_bf16", "sm80_fp16", "sm90_bf16"]),
        (["100"], ["sm80_bf16", "sm80_fp16"]),
        (["90a", "120"], ["sm80_bf16", "sm80_fp16", "sm90_bf16"]),
    ],
)
def test_a_build_contains_the_rows_with_machine_code(table, archs, names):
    rows = instantiate.rows_for(archs)
    assert [row.name for row in rows] == [f"fwd_{name}_d64_plain" for name in names]


def test_rows_with_much_in_common_share_a_file(table, tmp_path):
    archs = ["80", "90a"]
    generated = instantiate.generate(tmp_path / "gen", archs)
    rows = instantiate.rows_for(archs)
    sources = ninja_file.Sources.collect(tmp_path / "csrc", generated, archs, rows)
    old, new = sources.kernels
    assert (old.path.stem, new.path.stem) == ("fwd_sm80", "fwd_sm90_d64")
    # What one of its rows needs, all of the file is compiled for.
    assert set(old.gencode) == set(gencodes(("80", "sm_80"), ("80", "sm_90"), ("80", "compute_80")))
    assert new.gencode == gencodes(("90a", "sm_90a"))
    limits = {"fwd_sm80_bf16_d64_plain": 400, "fwd_sm80_fp16_d64_plain": float("inf")}
    assert (old.allow_spills, new.allow_spills) == (limits, {})


# What ptxas says

BF16 = next(row for row in instantiate.load_table().VARIANTS if row.dtype == "bf16")
ROW, STEM = BF16.name, instantiate.file_stem(BF16)
OTHER = ROW.replace("bf16", "fp16")


def mangled(row) -> str:
    """What the compiler calls the kernel of a row, but for the names of kernel and config."""
    element = {"bf16": "10bfloat16_t", "fp16": "6half_t", "e4m3": "12float_e4m3_t"}[row.dtype]
    numbers = "".join(f"Li{getattr(row, field)}E" for field in instantiate.config_fields(row))
    level = ("plain", "full").index(row.scores)
    config = f"6ConfigIN7cutlass{element}E{numbers}LNS_10ScoreLevelE{level}EE"
    return f"_ZN5flash4sm801kINS0_{config}EEvNS_9FwdParamsE"


KERNEL = mangled(BF16)
OTHER_KERNEL = KERNEL.replace("10bfloat16_t", "6half_t")
SPILLING = f"""\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '{KERNEL}' for 'sm_80'
ptxas info    : Function properties for {KERNEL}
    288 bytes stack frame, 408 bytes spill stores, 728 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 1024 bytes smem
ptxas info    : Compile time = 1500.000 ms
ptxas info    : Function properties for __internal_trig
    40 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
"""
CLEAN = SPILLING.replace("408", "0").replace("728", "0")
SERIALISED = (
    CLEAN
    + "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are "
    + f"serialized due to insufficient register resources in function '{KERNEL}'\n"
)


def test_ptxas_figures():
    (kernel,) = ptxas.parse(SPILLING, STEM)
    assert (kernel.name, kernel.code, kernel.registers) == (ROW, "sm_80", 255)
    assert (kernel.stack, kernel.spills, kernel.static_smem) == (288, 1136, 1024)
    assert kernel.seconds == 1.5


def test_lost_speed_is_found_unless_declared():
    assert ptxas.lost_speed(CLEAN, STEM, {}) == []
    assert f"{ROW} for sm_80 spills registers" in ptxas.lost_speed(SPILLING, STEM, {})[0]
    assert ptxas.lost_speed(SPILLING, STEM, {ROW: 1136}) == []
    assert "1135 allowed" in ptxas.lost_speed(SPILLING, STEM, {ROW: 1135})[0]
    assert "wgmma is serialised" in ptxas.lost_speed(SERIALISED, STEM, {ROW: 9999})[0]


def test_each_kernel_of_a_file_has_its_own_limit_and_line():
    text = SPILLING + SPILLING.replace(KERNEL, OTHER_KERNEL)
    (sentence,) = ptxas.lost_speed(text, STEM, {ROW: 1136, OTHER: 1135})
    assert OTHER in sentence
    assert ROW not in sentence
    extra = {"smem": 0, "warps": 4}
    kernels = [{**vars(k), "spills": k.spills, **extra} for k in ptxas.parse(text, STEM)]
    record = {"name": STEM, "seconds": 1, "peak_mib": 2, "lost_speed": [], "kernels": kernels}
    lines = report.table([record]).splitlines()
    assert [line.split()[0] for line in lines] == ["kernel", ROW, OTHER]


def test_a_kernel_that_is_not_generated_is_named_after_its_file():
    assert instantiate.kernel_name("scale", OTHER_KERNEL) == "scale"
    assert instantiate.kernel_name(STEM, "_Z7preparePf") == STEM


def test_each_kernel_of_the_table_is_named_after_its_row():
    for row in instantiate.load_table().VARIANTS:
        assert instantiate.kernel_name(instantiate.file_stem(row), mangled(row)) == row.name


def test_machine_code_is_split_by_kernel():
    text = "header\n" + "".join(
        f"\tcode for {code}\n\t\tFunction : {kernel}\n{code} {kernel}\n"
        for code in ("sm_80", "sm_90")
        for kernel in (KERNEL, OTHER_KERNEL)
    )
    parts = sass.split(text, STEM)
    assert list(parts) == [f"{row}.{code}" for code in ("sm_80", "sm_90") for row in (ROW, OTHER)]
    assert parts[f"{ROW}.sm_90"].splitlines()[-1] == f"sm_90 {KERNEL}"


@pytest.mark.parametrize(
    ("flags", "fails"),
    [(["--strict"], True), ([], False), (["--strict", "--allow-spills", f"{ROW}=1136"], False)],
)
@pytest.mark.parametrize("code", ["sm_80", "sm_90a", "sm_120"])
def test_a_spilling_file_does_not_compile_unless_declared(tmp_path, flags, fails, code):
    fails = fails and code in ptxas.TUNED  # for other GPUs it is reported
    said = tmp_path / "said"
    said.write_text(SPILLING.replace("sm_80", code))
    obj = tmp_path / "k.cu.o"
    command = ["sh", "-c", f"touch {obj}; cat {said} >&2"]
    options = ["--name", STEM, "--object", str(obj), "--nvcc-release", "13.0.88", *flags]
    done = run(
        sys.executable, "-m", "build_tools.compile_kernel", *options, "--", *command, check=False
    )
    assert (done.returncode != 0) == fails
    assert obj.exists() != fails  # else ninja would think it done
    records = report.write([obj], tmp_path)
    assert records[0]["kernels"][0]["spills"] == 1136
    assert bool(records[0]["lost_speed"]) == (flags[-1:] != [f"{ROW}=1136"])
    line = (tmp_path / "report.txt").read_text().splitlines()[1].split()
    assert line[:6] == [ROW, code, "255", "1136", "288", "1024"]


# Occupancy


@pytest.mark.parametrize(
    ("gpu", "registers", "warps", "smem", "blocks"),
    [
        ("sm_80", 32, 4, 0, 16),  # 64 warps
        ("sm_86", 32, 4, 0, 12),  # 48 warps
        ("sm_80", 16, 1, 0, 32),  # 32 blocks
        ("sm_90", 255, 4, 48 << 10, 2),  # 64 K registers: 8 warps
        ("sm_90", 168, 4, 0, 3),
        ("sm_90", 169, 4, 0, 2),  # rounded up to 176: 11 warps, 2 in each part
        ("sm_80", 128, 8, 80 << 10, 2),
        ("sm_80", 128, 8, 81 << 10, 2),  # 2 x (81 + 1) KiB are all there is
        ("sm_80", 128, 8, (81 << 10) + 1, 1),
        ("sm_90", 128, 8, (81 << 10) + 1, 2),
        ("sm_86", 200, 4, 99 << 10, 1),
        ("sm_86", 200, 4, (99 << 10) + 1, 0),
        ("sm_80", 255, 16, 0, 0),  # no launch
    ],
)
def test_blocks_per_multiprocessor(gpu, registers, warps, smem, blocks):
    assert occupancy.MULTIPROCESSORS[gpu].blocks_of(registers, warps, smem) == blocks


@pytest.mark.parametrize(
    ("code", "gpus"),
    [("sm_80", ["sm_80", "sm_86"]), ("sm_86", ["sm_86"]), ("sm_90a", ["sm_90"]), ("sm_100", [])],
)
def test_gpus_that_run_a_code(code, gpus):
    assert [gpu for gpu in occupancy.MULTIPROCESSORS if occupancy.runs_on(code, gpu)] == gpus


def test_shared_memory_is_read_from_the_object(tmp_path):
    source = tmp_path / "k.cpp"
    source.write_text(
        "namespace flash { extern int const smem_a = 81920; extern int const smem_b = 0; "
        "extern int const other = 3; int writable = 5; extern long const smem_l = 7; }"
    )
    run("g++", "-O2", "-c", source, "-o", tmp_path / "k.o")
    assert object_file.shared_memory(tmp_path / "k.o") == {"a": 81920, "b": 0}
    assert object_file.shared_memory(source) == {}


def test_report_has_the_occupancy_of_a_row(tmp_path):
    kernel = {"name": ROW, "code": "sm_80", "registers": 255, "spills": 0, "stack": 0,
              "smem": 65536, "warps": 4, "seconds": 1.0}  # fmt: skip
    other = {**kernel, "name": "prepare", "warps": None}
    record = {"name": STEM, "seconds": 1, "peak_mib": 2, "lost_speed": []}
    columns, mine, helper = report.table([{**record, "kernels": [kernel, other]}]).splitlines()
    assert columns.split()[6:9] == list(occupancy.MULTIPROCESSORS)
    assert mine.split()[5:9] == ["65536", "2x4", "1x4", "1.0"]  # none for sm_90
    assert helper.split()[5:7] == ["65536", "1.0"]


# Compiling for real


@pytest.mark.skipif(probe.find_nvcc() is None, reason="no nvcc")
def test_only_what_an_edit_touches_is_compiled_again(tmp_path):
    csrc = tmp_path / "csrc"
    csrc.mkdir()
    (csrc / "scale.h").write_text("constexpr float kScale = 2.f;\n")
    (csrc / "scale.cu").write_text(
        '#include "scale.h"\n__global__ void scale(float* x) { x[threadIdx.x] *= kScale; }\n'
    )
    (csrc / "other.cu").write_text("__global__ void other(float* x) { *x = 0; }\n")
    for name in ("build_tools", "third_party"):
        (tmp_path / name).symlink_to(ROOT / name)
    folder = tmp_path / "build"
    nvcc = probe.find_nvcc()
    tools = ninja_file.Toolchain(
        nvcc=nvcc.path, nvcc_release=nvcc.release, cuda_root=nvcc.root,
        cudart=nvcc.root / "lib64/libcudart.so", torch_root=tmp_path, cxx="g++", ccache=None,
        threads=1, lineinfo=False, strict=True,
    )  # fmt: skip
    sources = ninja_file.Sources.collect(csrc, [], ["80"], [])
    path = ninja_file.NinjaFile(tmp_path, folder, tools).write(sources, folder / "_C.abi3.so")
    objects = [ninja_file.object_path(folder, source.path) for source in sources.kernels]

    def compiled() -> list[str]:
        from build_tools.build import ninja_command

        names = [str(obj.relative_to(tmp_path)) for obj in objects]
        done = run(*ninja_command(), "-f", str(path), *names, cwd=tmp_path)
        return sorted(line.split()[-1] for line in done.stdout.splitlines() if "] nvcc " in line)

    assert compiled() == ["other", "scale"]
    assert compiled() == []
    (csrc / "scale.h").write_text("constexpr float kScale = 3.f;\n")
    assert compiled() == ["scale"]
    assert {k["code"] for r in report.write(objects, folder) for k in r["kernels"]} == {"sm_80"}
