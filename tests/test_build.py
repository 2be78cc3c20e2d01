"""The build: which mode is chosen, what is refused and how, and what ends up in a wheel."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from build_tools import check_wheel, ninja_file, probe, ptxas, report, resources, targets
from build_tools.instantiate import generate, load_table
from build_tools.plan import Probes, make_plan, parse_archs
from build_tools.probe import BuildError, Gpu, Nvcc, Torch
from third_party import fetch

ROOT = Path(__file__).resolve().parent.parent

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


def row(arch, dtype="bf16", head_dim=64):
    return SimpleNamespace(
        arch=arch, direction="fwd", dtype=dtype, head_dim=head_dim, head_dim_v=64, scores="plain"
    )


def gencodes(*pairs):
    return [f"-gencode=arch=compute_{a},code={b}" for a, b in pairs]


def test_a_portable_row_serves_each_gpu_that_has_no_better_one():
    old, new = row("sm80"), row("sm90")
    both = ["80", "90a"]
    alone = gencodes(("80", "sm_80"), ("80", "sm_90"), ("80", "compute_80"))
    assert targets.targets(old, [old], both) == alone
    assert targets.targets(old, [old, row("sm90", head_dim=128)], both) == alone
    beside_a_better_one = gencodes(("80", "sm_80"), ("80", "compute_80"))
    assert targets.targets(old, [old, new], both) == beside_a_better_one
    assert targets.targets(new, [old, new], both) == gencodes(("90a", "sm_90a"))


def test_a_build_for_one_gpu_has_its_machine_code_only():
    old = row("sm80")
    assert targets.targets(old, [old], ["86"]) == gencodes(("80", "sm_86"))
    assert targets.targets(old, [old], ["90a"]) == gencodes(("80", "sm_90"))


def test_instantiation_is_idempotent(tmp_path):
    first = generate(tmp_path, ["80", "90a"])
    times = {path: path.stat().st_mtime_ns for path in first}
    assert {row.name for row in load_table().VARIANTS} <= {path.stem for path in first}
    assert generate(tmp_path, ["80", "90a"]) == first
    assert {path: path.stat().st_mtime_ns for path in first} == times


# What ptxas says

SPILLING = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z1kPf' for 'sm_80'
ptxas info    : Function properties for _Z1kPf
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
    + "serialized due to insufficient register resources in function '_Z1kPf'\n"
)


def test_ptxas_figures():
    (kernel,) = ptxas.parse(SPILLING)
    assert (kernel.name, kernel.code, kernel.registers) == ("_Z1kPf", "sm_80", 255)
    assert (kernel.stack, kernel.spills, kernel.static_smem) == (288, 1136, 1024)
    assert kernel.seconds == 1.5


def test_lost_speed_is_found_unless_declared():
    assert ptxas.lost_speed(CLEAN) == []
    assert "spills registers" in ptxas.lost_speed(SPILLING)[0]
    assert ptxas.lost_speed(SPILLING, allowed_spills=1136) == []
    assert "1135 allowed" in ptxas.lost_speed(SPILLING, allowed_spills=1135)[0]
    assert "wgmma is serialised" in ptxas.lost_speed(SERIALISED, allowed_spills=9999)[0]


@pytest.mark.parametrize(
    ("flags", "fails"),
    [(["--strict"], True), ([], False), (["--strict", "--allow-spills", "1136"], False)],
)
def test_a_spilling_file_does_not_compile_unless_declared(tmp_path, flags, fails):
    said = tmp_path / "said"
    said.write_text(SPILLING)
    obj = tmp_path / "k.cu.o"
    command = ["sh", "-c", f"touch {obj}; cat {said} >&2"]
    options = ["--name", "k", "--object", str(obj), "--nvcc-release", "13.0.88", *flags]
    done = run(
        sys.executable, "-m", "build_tools.compile_kernel", *options, "--", *command, check=False
    )
    assert (done.returncode != 0) == fails
    assert obj.exists() != fails  # else ninja would think it done
    records = report.write([obj], tmp_path)
    assert records[0]["kernels"][0]["spills"] == 1136
    line = (tmp_path / "report.txt").read_text().splitlines()[1].split()
    assert line[:6] == ["k", "sm_80", "255", "1136", "288", "1024"]


# Third-party headers


@pytest.fixture
def cutlass_wheel(tmp_path):
    path = tmp_path / fetch.WHEEL
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(fetch.HEADERS + "cute/tensor.hpp", "// cute")
        archive.writestr(fetch.LICENSE, "BSD")
        archive.writestr("cutlass_cppgen/__init__.py", "")
    return path


def test_fetched_headers_are_verified(tmp_path, cutlass_wheel):
    target = tmp_path / "cutlass"
    with pytest.raises(fetch.FetchError, match=f"{fetch.SHA256} is pinned"):
        fetch.fetch_cutlass(target, cutlass_wheel)
    assert not target.exists()
    assert list(tmp_path.iterdir()) == [cutlass_wheel]


def test_fetch_is_idempotent(tmp_path, cutlass_wheel):
    target = tmp_path / "cutlass"
    sha256 = fetch.hashlib.sha256(cutlass_wheel.read_bytes()).hexdigest()
    include = fetch.fetch_cutlass(target, cutlass_wheel, sha256)
    assert (include / "cute/tensor.hpp").read_text() == "// cute"
    assert sorted(path.name for path in target.iterdir()) == [
        "LICENSE.txt",
        "WHEEL.sha256",
        "include",
    ]
    cutlass_wheel.unlink()
    assert fetch.fetch_cutlass(target, cutlass_wheel, sha256) == include


def test_offline_fetch_says_what_to_do(tmp_path, monkeypatch):
    def offline(folder):
        raise OSError("no route to host")

    monkeypatch.setattr(fetch, "_with_pip", offline)
    monkeypatch.setattr(fetch, "_from_index", offline)
    with pytest.raises(fetch.FetchError, match=r"no route to host.*--wheel"):
        fetch.fetch_cutlass(tmp_path / "cutlass")


# Wheels


def wheel_of(tmp_path, **env) -> Path:
    """A wheel built by setup.py in this environment."""
    build = tmp_path / "build"
    done = run(
        sys.executable, "setup.py", "-q", "egg_info", "--egg-base", str(tmp_path),
        "build", "--build-base", str(build), "bdist_wheel", "--dist-dir", str(tmp_path),
        "--bdist-dir", str(tmp_path / "bdist"), **env,
    )  # fmt: skip
    assert done.returncode == 0
    (wheel,) = tmp_path.glob("*.whl")
    return wheel


def test_the_pure_wheel(tmp_path):
    wheel = wheel_of(tmp_path, FLASH_ATTN_CUDA_ARCHS="none")
    assert wheel.name.endswith("-py3-none-any.whl")
    assert check_wheel.check(wheel) == []
    names = zipfile.ZipFile(wheel).namelist()
    assert {"flash_attn/__init__.py", "flash_attn_2_cuda.py"} <= set(names)
    own = ("flash_attn/", "flash_attn_2_cuda.py", "flash_attn-")
    assert [name for name in names if not name.startswith(own)] == []


def test_metadata_needs_no_torch_and_looks_at_no_machine(tmp_path):
    # A torch that cannot be imported, an nvcc that fails, and a request that a build would refuse.
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text("raise ImportError('metadata imported torch')")
    script(tmp_path / "bin" / "nvcc", "exit 1")
    env = {"PYTHONPATH": str(tmp_path), "CUDA_HOME": str(tmp_path), **REQUESTED}
    done = run(sys.executable, "setup.py", "--name", "--version", **env)
    assert done.stdout.split() == ["flash-attn", "2.8.3+abi3.1"]


def test_a_refused_build_is_one_sentence(tmp_path):
    env = {"FLASH_ATTN_CUDA_ARCHS": "75"}
    done = run(sys.executable, "setup.py", "build", check=False, **env)
    assert done.returncode == 1
    assert done.stderr.strip().startswith("flash-attn: FLASH_ATTN_CUDA_ARCHS")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("symbol", "allowed"),
    [
        ("aoti_torch_get_current_cuda_stream", True),
        ("torch_call_dispatcher", True),
        ("cudaLaunchKernelExC@libcudart.so.13", True),
        ("PyUnicode_FromStringAndSize", True),
        ("memcpy@GLIBC_2.14", True),
        ("_ZNSolsEi@GLIBCXX_3.4", True),
        ("_ZN3c106detail14torchCheckFailEPKcS2_jS2_", False),
        ("_ZN2at5emptyEN3c108ArrayRefIlEE", False),
        ("_PyObject_GetState", False),
        ("cuTensorMapEncodeTiled", False),
    ],
)
def test_symbols_that_would_tie_the_library_to_one_torch(symbol, allowed):
    assert (check_wheel.foreign([symbol]) == []) == allowed


LIBRARY = ROOT / "flash_attn" / "_C.abi3.so"


@pytest.mark.skipif(not LIBRARY.exists(), reason="no compiled library in the checkout")
class TestLibrary:
    def test_takes_only_stable_symbols(self):
        assert check_wheel.problems(LIBRARY) == []

    @pytest.mark.parametrize("minor", range(10, 16))
    def test_imports_under_other_pythons(self, tmp_path, minor):
        """Without torch's Python side: a library of torch's C side is all that it needs."""
        python = interpreter(minor)
        if python is None:
            pytest.skip(f"no Python 3.{minor}")
        import torch

        code = "import sys; sys.path.insert(0, sys.argv[1]); import _C; print(_C.cuda_version())"
        env = {"LD_LIBRARY_PATH": f"{Path(torch.__file__).parent / 'lib'}:{cudart_folder()}"}
        if torch.version.cuda is None:
            env["LD_PRELOAD"] = str(cuda_stream_stub(tmp_path))
        done = run(python, "-S", "-c", code, str(LIBRARY.parent), **env)
        assert int(done.stdout) >= 12000


def interpreter(minor: int) -> Path | None:
    for pattern in (".pyenv/versions", ".local/share/uv/python"):
        for python in sorted((Path.home() / pattern).glob(f"*3.{minor}.*/bin/python3")):
            return python
    system = Path(f"/usr/bin/python3.{minor}")
    return system if system.exists() else None


def cudart_folder() -> Path | str:
    nvcc = probe.find_nvcc()
    return nvcc.root / "lib64" if nvcc else ""


def cuda_stream_stub(folder: Path) -> Path:
    """Stands in for the one symbol of torch's CUDA half that the library asks for."""
    source = folder / "stub.cpp"
    source.write_text(
        'extern "C" int aoti_torch_get_current_cuda_stream(int, void**) { return 1; }'
    )
    run("g++", "-shared", "-fPIC", str(source), "-o", str(folder / "stub.so"))
    return folder / "stub.so"


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


def script(path: Path, body: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)


def run(*command, check=True, cwd=ROOT, **env) -> subprocess.CompletedProcess:
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd, env={**os.environ, **env}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0 or not check, done.stdout + done.stderr
    return done
