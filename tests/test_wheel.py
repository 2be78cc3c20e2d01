"""What ends up in a wheel, and what the compiled library in it depends on."""

from __future__ import annotations

import itertools
import os
import platform
import re
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from build_tools import check_wheel, manylinux, try_wheel
from build_tools.instantiate import load_table
from build_tools.targets import OWN_CODES
from tests.commands import ROOT, run, script, wheel_of


def test_the_pure_wheel(tmp_path):
    wheel = wheel_of(tmp_path, FLASH_ATTN_CUDA_ARCHS="none")
    assert wheel.name == "flash_attn-2.8.3-py3-none-any.whl"
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
    env = {"PYTHONPATH": str(tmp_path), "CUDA_HOME": str(tmp_path), "FLASH_ATTN_CUDA_ARCHS": "80"}
    done = run(sys.executable, "setup.py", "--name", "--version", **env)
    assert done.stdout.split() == ["flash-attn", "2.8.3"]


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
        ("Py_BuildValue", True),
        ("_Py_NotImplementedStruct", True),
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


def wheel_with(folder: Path, name: str, *files: str) -> Path:
    wheel = folder / f"flash_attn-2.8.3-{name}.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for file in files:
            archive.writestr(file, "")
    return wheel


@pytest.mark.parametrize(
    ("name", "files", "problem"),
    [
        ("cp310-abi3-linux_x86_64", ["flash_attn/other.so"], "is not tagged cp310-abi3-manylinux"),
        ("cp310-abi3-manylinux_2_34_x86_64", ["flash_attn/other.so"], "contains"),
        (
            "cp310-abi3-manylinux_2_34_x86_64",
            ["flash_attn/_C.abi3.so", "flash_attn.libs/libcudart.so.13.0"],
            "contains .*libcudart",
        ),
        ("py3-none-any", ["flash_attn/_C.abi3.so"], "is pure Python, but contains"),
    ],
)
def test_what_a_wheel_is_refused_for(tmp_path, name, files, problem):
    assert re.search(problem, " ".join(check_wheel.check(wheel_with(tmp_path, name, *files))))


BOTH = {"sm_80", "sm_90", "compute_80"}


@pytest.mark.parametrize(
    ("files", "archs", "problems"),
    [
        ([BOTH, {"sm_90a"}], ["80", "90a"], []),
        ([BOTH, {"sm_90a"}], ["80"], []),
        ([BOTH, {"sm_90a"}], [], []),
        ([{"sm_90"}, {"sm_90a"}], ["90a"], []),
        ([BOTH], ["80", "90a"], ["has no sm_90a code"]),
        (
            [BOTH, BOTH | {"sm_120"}, {"sm_90a"}],
            ["80", "90a", "120"],
            ["has no sm_120 code in 1 of 2 files of kernels"],
        ),
        ([BOTH - {"compute_80"}], ["80"], ["has no compute_80 code in 1 of 1 files of kernels"]),
        ([], ["86"], ["has no sm_86 code in 0 of 0 files of kernels"]),
    ],
)
def test_gpu_code_that_is_missing(monkeypatch, files, archs, problems):
    monkeypatch.setattr(check_wheel, "device_code", lambda elf: files)
    assert check_wheel.missing_code(Path(__file__), archs) == problems


def test_what_was_asked_for_is_looked_for(monkeypatch, capsys, tmp_path):
    wheel = wheel_with(tmp_path, "cp310-abi3-manylinux_2_34_x86_64", check_wheel.EXTENSION)
    symbols = check_wheel.Symbols([], [check_wheel.INIT])
    monkeypatch.setattr(check_wheel, "read_symbols", lambda library: symbols)
    monkeypatch.setattr(check_wheel, "device_code", lambda elf: [BOTH])
    monkeypatch.setenv("FLASH_ATTN_CUDA_ARCHS", "80;100")
    assert check_wheel.main([str(wheel)]) == 1
    said = capsys.readouterr().out
    assert "compute_80, sm_80, sm_90 in 1 files of kernels" in said
    assert "has no sm_100 code in 1 of 1" in said
    monkeypatch.setenv("FLASH_ATTN_CUDA_ARCHS", "80")
    assert check_wheel.main([str(wheel)]) == 0
    monkeypatch.setattr(check_wheel, "MEGABYTES", 1e-6)
    assert check_wheel.main([str(wheel)]) == 1
    assert "MB, more than" in capsys.readouterr().out


def test_a_pure_wheel_keeps_its_tag(tmp_path):
    wheel = wheel_with(tmp_path, "py3-none-any")
    assert manylinux.tag(wheel) == wheel


def test_a_wheel_is_tried_where_nothing_else_is(tmp_path):
    wheel = wheel_of(tmp_path, FLASH_ATTN_CUDA_ARCHS="none")
    (tmp_path / "try").mkdir()
    line = try_wheel.attempt(wheel, sys.executable, None, tmp_path / "try")
    assert f"torch {torch.__version__}: " in line
    assert "tests passed" in line


def test_a_wheel_that_does_not_work_is_noticed(tmp_path):
    wheel = wheel_with(tmp_path, "py3-none-any", "flash_attn/__init__.py")
    with pytest.raises(try_wheel.Failed, match="install"):
        try_wheel.attempt(wheel, sys.executable, None, tmp_path)


LIBRARY = ROOT / "flash_attn" / "_C.abi3.so"


def unusable(library: Path, csrc: Path) -> str:
    """Why `library` says nothing about the sources in `csrc`; empty if it does.

    Compiling it here would take minutes; CI, which does, runs this after its build.
    """
    if not library.exists():
        return "no compiled library in the checkout"
    built = library.stat().st_mtime
    sources = [path for path in csrc.rglob("*.*") if path.suffix in {".cpp", ".cu", ".h", ".py"}]
    newer = [path.name for path in sources if path.stat().st_mtime > built]
    return f"the library is older than {', '.join(newer)}: make build" if newer else ""


def test_a_library_older_than_its_sources_is_not_tested(tmp_path):
    csrc, library = tmp_path / "csrc", tmp_path / "_C.abi3.so"
    (csrc / "api").mkdir(parents=True)
    source = csrc / "api" / "module.cpp"
    source.touch()
    assert "no compiled library" in unusable(library, csrc)
    library.touch()
    os.utime(source, (0, 0))
    assert unusable(library, csrc) == ""
    os.utime(library, (0, 0))
    source.touch()
    assert "older than module.cpp" in unusable(library, csrc)


STALE = unusable(LIBRARY, ROOT / "csrc")


def version(words: str) -> tuple[int, ...]:
    """(2, 34) of "2.34"; of a system without glibc ()."""
    return tuple(int(part) for part in words.split(".") if part)


@pytest.mark.skipif(bool(STALE), reason=STALE)
class TestLibrary:
    def test_takes_only_stable_symbols(self):
        assert check_wheel.problems(LIBRARY) == []

    def test_needs_no_newer_glibc_than_the_pages_promise(self):
        """Where it is compiled with Debian 12's or an older one: headers of newer ones name newer
        functions."""
        if version(platform.libc_ver()[1]) > (2, 36):
            pytest.skip("compiled with a newer glibc")
        needed = re.search(r"GLIBC ([\d.]+)", check_wheel.system_needs(LIBRARY))[1]
        promised = re.search(r"glibc ≥ ([\d.]+)", (ROOT / "docs/install.md").read_text())[1]
        assert version(needed) <= version(promised)

    def test_has_the_same_code_of_every_portable_kernel(self):
        """And PTX, with which CUDA_FORCE_PTX_JIT=1 runs them (docs/build.md)."""
        files = check_wheel.device_code(LIBRARY.read_bytes())
        portable = [file for file in files if not file <= OWN_CODES]
        assert portable
        assert all(file == portable[0] for file in portable)
        assert ("compute_80" in portable[0]) == ("sm_80" in portable[0])

    def test_explains_a_call_without_heads(self):
        """It divides by tiles, of which there are none: the forward kernel serves it."""
        size = (132, 0, 0, 2, 1, 4096, -1, -1, 0, 1, -1, -1)
        call = (90, "bf16", 64, 64, 0, *size, 0, 0, 1, 0, 0, 1, 0, 0, 0)
        program = (
            "import flash_attn; library = flash_attn.backend.library;"
            f"print(library.explain_decode{call}, library.explain_forward{call})"
        )
        said = run(sys.executable, "-c", program).stdout
        assert said.startswith('None {"variant": {"name": "fwd_')

    @pytest.mark.parametrize(("longest", "scores"), [(1, "full"), (100, "plain")])
    def test_explains_decode_of_odd_rows(self, longest, scores):
        """Read where they lie, unless a forward beside it has copied them."""
        shape = (
            f"80, 'bf16', 104, 104, 0, 108, 0, 0, 4, {longest}, 4096, 200, -1, 8, 2, -1, 0, "
            "0, 16, 0, 0, 1, 1, 0, 0, 0"
        )
        program = (
            "import flash_attn, json;"
            f"print(json.loads(flash_attn.backend.library.explain_decode({shape}))['variant'])"
        )
        assert f"'scores': '{scores}'" in run(sys.executable, "-c", program).stdout

    @pytest.mark.parametrize(("longest", "odd", "scores"), [(1, 0, "plain"), (2048, 1, "full")])
    def test_explains_decode_of_codes(self, longest, odd, scores):
        """Of one query, and of any number where rows are not multiples of 16 bytes."""
        shape = (
            f"90, 'fp16', 128, 128, 0, 132, 50 << 20, 3350, 4, {longest}, 4096, -1, -1, 32, 8, "
            f"-1, 0, 0, 16, 1, 0, {odd}, 1, 0, 0, 1"
        )
        program = (
            "import flash_attn, json;"
            f"print(json.loads(flash_attn.backend.library.explain_decode({shape}))['variant'])"
        )
        said = run(sys.executable, "-c", program).stdout
        assert "'cached_bits': 8" in said
        assert f"'scores': '{scores}'" in said

    @pytest.mark.parametrize(
        ("gpu", "family", "tile"),
        [("H100", 90, ""), ("A100", 80, ""), ("RTX 4090", 80, "_16x32")],
    )
    def test_explains_latent_attention(self, gpu, family, tile):
        """Of 128 heads, more rows than other decode kernels take."""
        program = f"""if True:
            import torch, flash_attn
            like = dict(dtype=torch.bfloat16, device="meta")
            q, qv = (torch.empty(4, 1, 128, columns, **like) for columns in (64, 512))
            cache = torch.empty(4, 4096, 1, 576, **like)
            said = flash_attn.explain_call(
                flash_attn.flash_attn_with_kvcache, q, cache[..., 512:], cache[..., :512], qv=qv,
                cache_seqlens=torch.empty(4, dtype=torch.int32, device="meta"), gpu={gpu!r},
            )
            print(said.kernel, said.plan)
        """
        said = run(sys.executable, "-c", program).stdout
        assert said.startswith(f"latent_sm{family}_bf16_d64x512_plain{tile} ")

    def test_explains_the_tile_of_a_forward(self):
        """One of its row's two, and that of the plan's words."""
        rows = [row for row in load_table().VARIANTS if row.second_block_n]
        assert rows
        program = "import flash_attn, json; explain = flash_attn.backend.library.explain_forward\n"
        for row, seqlen in itertools.product(rows, (512, 16384)):
            dims = row.head_dim, row.head_dim_v
            size = 132, 60 << 20, 0, 4, seqlen, seqlen, -1, -1, 8, 8, -1, -1
            contents = 4 if row.dtype == "e4m3" else 0
            call = (90, row.dtype, *dims, 0, *size, 0, 0, 0, 0, 0, 0, 0, 0, contents)
            program += f"answer = json.loads(explain{call})\n"
            program += f"assert answer['block_n'] in {(row.block_n, row.second_block_n)}, answer\n"
            program += "assert f\"x {answer['block_n']} keys\" in answer['plan']['text'], answer\n"
        run(sys.executable, "-c", program)

    @pytest.mark.parametrize("minor", range(10, 16))
    def test_imports_under_other_pythons(self, tmp_path, minor):
        """Without torch's Python side: a library of torch's C side is all that it needs."""
        python = interpreter(minor)
        if python is None:
            pytest.skip(f"no Python 3.{minor}")
        env = try_wheel.loading(Path(torch.__file__).parent / "lib", tmp_path)
        if torch.version.cuda is not None:
            del env["LD_PRELOAD"]
        done = run(python, "-S", "-c", try_wheel.LOAD, str(LIBRARY.parent), **env)
        assert int(done.stdout) >= 12000


def interpreter(minor: int) -> Path | None:
    for pattern in (".pyenv/versions", ".local/share/uv/python"):
        for python in sorted((Path.home() / pattern).glob(f"*3.{minor}.*/bin/python3")):
            return python
    system = Path(f"/usr/bin/python3.{minor}")
    return system if system.exists() else None
