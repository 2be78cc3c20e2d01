"""Loading the compiled library: why it is not used, what stands in; ``python -m flash_attn``."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._subclasses import FakeTensorMode

import flash_attn
from flash_attn import __main__, _selftest, backend
from flash_attn.api import refusals
from flash_attn.cpu import dense
from flash_attn.dispatch import ops, rotary
from tests.commands import ROOT


@pytest.fixture
def unloaded(monkeypatch):
    """State that load() may change, put back afterwards."""
    monkeypatch.setattr(backend, "library", backend.library)
    monkeypatch.setattr(backend, "why_not_loaded", backend.why_not_loaded)
    return monkeypatch


def fail_with(message: str):
    def import_module(name):
        raise ImportError(message)

    return import_module


def test_no_file(unloaded, tmp_path):
    unloaded.setattr(backend, "library_path", lambda: tmp_path / "_C.abi3.so")
    backend.load()
    assert backend.library is None
    assert f"{tmp_path / '_C.abi3.so'} does not exist" in backend.cuda_problem()
    assert backend.compiled_variants() == []


@pytest.fixture
def present(unloaded, tmp_path):
    """A file where the library should be."""
    path = tmp_path / "_C.abi3.so"
    path.touch()
    unloaded.setattr(backend, "library_path", lambda: path)
    return unloaded


SYSTEM = "/lib/x86_64-linux-gnu"


@pytest.mark.parametrize(
    ("message", "expected", "do"),
    [
        ("undefined symbol: abc", "torch >= 2.10 of the CUDA it was built for", "build it for"),
        ("undefined symbol: torch_call_dispatcher", "torch >= 2.10, whose C", "update torch"),
        ("undefined symbol: aoti_torch_get_stream", "has aoti_torch_get_stream", "update torch"),
        ("libcudart.so.13: cannot open shared object file", "built for CUDA 13", "CUDA major"),
        (f"{SYSTEM}/libc.so.6: version `GLIBC_2.34' not found", "GLIBC_2.34", "build it on"),
        (f"{SYSTEM}/libstdc++.so.6: version `GLIBCXX_3.4.29' not found", "GLIBCXX_3.4.29", "conda"),
        ("libtorch.so: cannot open shared object file", "torch's libraries", "install it again"),
        ("_C.abi3.so: file too short", "the file whole", "install it again"),
    ],
)
def test_import_error_says_what_was_found_what_is_expected_what_to_do(
    present, message, expected, do
):
    present.setattr(torch.version, "cuda", "12.6")
    present.setattr(backend.importlib, "import_module", fail_with(message))
    backend.load()
    assert backend.library is None
    problem = backend.cuda_problem()
    assert f"_C.abi3.so does not load: {message}. Found: Python " in problem
    assert f"torch {torch.__version__}, which uses CUDA 12.6" in problem
    after = problem.split(" Expected: ")[1]
    assert expected in after.split(" Do: ")[0]
    assert do in after.split(" Do: ")[1]


def test_a_library_that_does_not_load_leaves_the_cpu_backend(tmp_path):
    """A copy of the package with a broken library, in a process of its own."""
    package = Path(flash_attn.__file__).parent
    shutil.copytree(package, tmp_path / "flash_attn", ignore=shutil.ignore_patterns("*.so"))
    shutil.copy(package.parent / "flash_attn_2_cuda.py", tmp_path)
    (tmp_path / "flash_attn" / "_C.abi3.so").write_bytes(b"\x7fELF")
    program = (
        "import torch; torch.version.cuda = '13.0'\n"
        "import flash_attn; from flash_attn import backend\n"
        f"assert flash_attn.__file__.startswith({str(tmp_path)!r})\n"
        "print(flash_attn.flash_attn_func(*torch.randn(3, 1, 4, 2, 8)).shape)\n"
        "print(backend.cuda_problem())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "torch.Size([1, 4, 2, 8])" in done.stdout
    assert "does not load" in done.stdout
    assert "Do: install it again" in done.stdout


def test_import_error_without_cuda_in_torch(present):
    present.setattr(torch.version, "cuda", None)
    present.setattr(backend.importlib, "import_module", fail_with("libcudart.so.13: no"))
    backend.load()
    assert f"this torch ({torch.__version__}) has no CUDA" in backend.cuda_problem()


class Library:
    def __init__(self, cuda: int):
        self.cuda = cuda

    def cuda_version(self) -> int:
        return self.cuda

    def compiled_variants(self) -> str:
        return json.dumps([{"name": "one"}, {"name": "two"}])


def test_loaded(present):
    loaded = Library(13000)
    present.setattr(backend.importlib, "import_module", lambda name: loaded)
    present.setattr(torch.version, "cuda", "13.0")
    backend.load()
    assert backend.library is loaded
    assert backend.cuda_problem() == ""
    assert backend.describe_variants() == "2 CUDA kernels are compiled: one, two"


@pytest.mark.parametrize(
    ("torch_cuda", "words"),
    [("12.6", ["built for CUDA 13", "uses CUDA 12.6"]), (None, ["has no CUDA"])],
)
def test_loaded_but_not_usable(monkeypatch, torch_cuda, words):
    monkeypatch.setattr(backend, "library", Library(13000))
    monkeypatch.setattr(torch.version, "cuda", torch_cuda)
    assert all(word in backend.cuda_problem() for word in words)


def test_a_library_of_another_cuda_is_refused(monkeypatch):
    """Loaded after all, because both runtimes are on the machine: nothing is run with it."""
    backend.check_gpu.cache_clear()
    monkeypatch.setattr(backend, "library", Library(13000))
    monkeypatch.setattr(torch.version, "cuda", "12.6")
    with pytest.raises(RuntimeError, match="same CUDA major version"):
        backend.check_gpu(torch.device("cuda", 0))
    backend.check_gpu.cache_clear()


# --- Operations without a CUDA kernel -----------------------------------------------------------


def test_every_operation_answers_for_cuda():
    for name in ops.SCHEMAS | rotary.SCHEMAS:
        qualified = f"flash_attn::{name}"
        assert torch._C._dispatch_has_kernel_for_dispatch_key(qualified, "CUDA")
        assert torch._C._dispatch_has_kernel_for_dispatch_key(qualified, "CPU")


def test_missing_kernel_says_what_and_why(monkeypatch):
    monkeypatch.setattr(backend, "_missing", set())
    monkeypatch.setattr(backend, "library", None)
    monkeypatch.setattr(backend, "why_not_loaded", "nothing was built")
    assert backend.has_kernel("_flash_attn_backward")
    kernel = backend.missing_kernel("_flash_attn_backward")
    assert not backend.has_kernel("_flash_attn_backward")
    with pytest.raises(NotImplementedError) as raised:
        kernel(1, 2, three=3)
    for words in ("_flash_attn_backward", "nothing was built", "no CUDA kernels", "CPU"):
        assert words in str(raised.value)
    monkeypatch.setattr(backend, "library", Library(13000))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(NotImplementedError) as raised:
        kernel()
    for words in ("has no kernel for it yet", "one, two"):
        assert words in str(raised.value)


def test_miss_in_the_library_is_not_implemented():
    def operation(message):
        raise RuntimeError(message)

    with pytest.raises(
        NotImplementedError, match=r"^flash_attn: not implemented: no kernel for x$"
    ):
        backend.call(operation, "C++ says: flash_attn: not implemented: no kernel for x")
    with pytest.raises(RuntimeError, match="another failure") as raised:
        backend.call(operation, "another failure")
    assert raised.type is RuntimeError


def test_a_refusal_is_worded():
    def operation(message):
        raise ValueError(message)

    with pytest.raises(ValueError, match=r"^flash_attn: x: got stride 3 in dimension 1; a mult"):
        backend.call(operation, "flash_attn: refused: x|stride|3|1|8\nException raised from …")
    with pytest.raises(ValueError, match=r"^another one$"):
        backend.call(operation, "another one")


def test_every_refusal_has_words():
    """And as many operands as these take."""
    text = "".join(path.read_text() for path in (ROOT / "csrc" / "api").glob("*.cpp"))
    calls = [_arguments(text[at.end() :]) for at in re.finditer(r"\brequire\(", text)]
    for _, argument, code, *operands in calls:
        assert re.fullmatch(r'name|"[\w ]+"', argument), argument
        assert len(operands) == refusals.WORDS[code.strip('"')].count("{}"), (argument, code)
    assert {code.strip('"') for _, _, code, *_ in calls} == set(refusals.WORDS)


def _arguments(text: str) -> list[str]:
    """Those of the C++ call that begins here."""
    depth, found = 0, [""]
    for mark in re.findall(r'"[^"]*"|.', text, re.DOTALL):
        depth += mark in "([{"
        depth -= mark in ")]}"
        if depth < 0:
            break
        if mark == "," and depth == 0:
            found.append("")
        else:
            found[-1] += mark
    return [argument.strip() for argument in found]


def test_an_error_keeps_its_cause():
    """Such as one of a dispatch mode."""

    def operation():
        raise RuntimeError("another failure") from KeyError("the reason")

    with pytest.raises(RuntimeError, match="another failure") as raised:
        backend.call(operation)
    assert isinstance(raised.value.__cause__, KeyError)


def test_lack_of_memory_is_torch_s_error():
    """Which is what training loops catch in order to try a smaller batch."""

    def operation(*args):
        raise RuntimeError(*args)

    with pytest.raises(torch.OutOfMemoryError, match=r"^CUDA out of memory\. .* 7 bytes"):
        backend.call(operation, "CUDA out of memory. flash_attn asked for 7 bytes")


def test_a_miss_under_a_direct_call_of_the_operation(monkeypatch):
    """As compiled graphs make them: the autograd kernel translates for those."""

    def miss(*args, **kwargs):
        raise RuntimeError("flash_attn: not implemented: no kernel for x")

    monkeypatch.setattr(dense, "make_scores", miss)
    q = torch.zeros(1, 4, 2, 8)
    for x in (q, q.clone().requires_grad_()):
        with pytest.raises(NotImplementedError, match="no kernel for x"):
            ops.forward(x, x, x, 0.0, 1.0, True, -1, -1, 0.0, None, False)
        with pytest.raises(NotImplementedError, match="no kernel for x"):
            flash_attn.flash_attn_func(x, x, x)


def test_operations_are_not_run_on_fake_cuda_tensors():
    """Shapes are known without a kernel: a model can be traced for a GPU that is not there."""
    with FakeTensorMode():
        q = torch.empty(1, 4, 2, 64, device="cuda", dtype=torch.half)
        assert flash_attn.flash_attn_func(q, q, q).shape == q.shape


# --- python -m flash_attn -----------------------------------------------------------------------


def test_command_line():
    done = subprocess.run(
        [sys.executable, "-m", "flash_attn", "--json"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["version"] == flash_attn.__version__
    assert found["build"] == flash_attn.__build__
    assert found["torch"] == torch.__version__
    assert "cpu" in found["backends"]
    assert ("cuda" in found["backends"]) == (found["why_no_cuda"] is None)
    names = [result["name"] for result in found["self_test"]]
    for kind in ("forward", "backward", "varlen", "kvcache"):
        assert f"cpu bfloat16 {kind}" in names
    assert {r["status"] for r in found["self_test"] if r["name"].startswith("cpu")} == {"ok"}


def test_version_of_the_command(capsys):
    with pytest.raises(SystemExit) as ended:
        __main__.main(["--version"])
    assert ended.value.code == 0
    expected = f"flash_attn {flash_attn.__version__} (build {flash_attn.__build__})\n"
    assert capsys.readouterr().out == expected


def test_report_without_test(capsys):
    assert __main__.main(["--no-test"]) == 0
    text = capsys.readouterr().out
    assert f"{flash_attn.__version__} (build {flash_attn.__build__})" in text
    assert torch.__version__ in text
    assert "self-test" not in text


def test_a_laptop_is_complete(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(backend, "compiled_variants", list)
    monkeypatch.setattr(backend, "library_path", lambda: tmp_path / "_C.abi3.so")
    monkeypatch.setattr(backend, "library", None)
    assert __main__.main(["--no-test"]) == 0
    text = capsys.readouterr().out
    assert "none, and none is needed without a GPU" in text
    for alarming in ("does not exist", "no CUDA", "0 compiled"):
        assert alarming not in text
    # A library that is there and does not load is a failure that has to be told.
    (tmp_path / "_C.abi3.so").touch()
    monkeypatch.setattr(backend, "why_not_loaded", "it does not load")
    assert __main__.main(["--no-test"]) == 0
    text = capsys.readouterr().out
    assert "no CUDA:    it does not load" in text
    assert "0 compiled CUDA kernels" in text


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("machine code", "sm_89: machine code"),
        ("PTX", "sm_89: PTX, which the driver compiles when a kernel is first called"),
        ("none", "sm_89: none; it can be built for"),
    ],
)
def test_how_a_gpu_gets_its_kernels(monkeypatch, capsys, code, words):
    class Compiled(Library):
        def device_code(self, sm: int) -> str:
            return code if sm == 89 else "none"

    for name, result in (
        ("device_count", 1),
        ("get_device_capability", (8, 9)),
        ("get_device_name", "NVIDIA L40S"),
    ):
        monkeypatch.setattr(torch.cuda, name, lambda *_, result=result: result)
    monkeypatch.setattr(backend, "library", Compiled(13000))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert __main__.main(["--no-test"]) == 0
    assert f"GPU code    {words}" in capsys.readouterr().out
    assert __main__.main(["--no-test", "--json"]) == 0
    gpus = json.loads(capsys.readouterr().out)["gpus"]
    assert gpus == [{"name": "NVIDIA L40S", "sm": 89, "code": code}]


def test_the_first_call_is_timed(monkeypatch):
    """On a GPU before the tests; here on the CPU, and where it fails."""
    monkeypatch.setattr(_selftest, "_TESTS", {})
    result = _selftest._run_one("first", _selftest._first_call, "cpu")
    assert result.status == "ok"
    assert re.fullmatch(r"took \d+\.\d{3} s, with loading its kernel", result.detail)

    def broken(device: str) -> None:
        raise RuntimeError(device)

    monkeypatch.setattr(_selftest, "_first_call", broken)
    (result,) = _selftest.run("cuda")
    assert (result.name, result.status) == ("cuda first call", "failed")


def test_table_of_variants(monkeypatch, capsys):
    rows = [{"name": "a_kernel", "head_dim": 64, "block_m": 128, "why": "fastest"}]
    monkeypatch.setattr(backend, "compiled_variants", lambda: rows)
    assert __main__.main(["--no-test"]) == 0
    text = capsys.readouterr().out
    assert "1 compiled CUDA kernels" in text
    for words in ("a_kernel", "64", "128", "fastest", "head_dim"):
        assert words in text


@pytest.mark.parametrize("as_json", [False, True])
def test_a_wrong_result_fails(monkeypatch, capsys, as_json):
    """Results that are off by 10% or NaN, or raise, end with exit code 1."""
    right = _selftest.flash_attn_func

    def wrong(*args, **kwargs):
        return right(*args, **kwargs) * 1.1

    def not_a_number(*args, **kwargs):
        return right(*args, **kwargs) * float("nan")

    def raises(*args, **kwargs):
        raise RuntimeError("broken")

    monkeypatch.setattr(__main__, "report", lambda: {**REPORT})
    for function, detail in ((wrong, "error"), (not_a_number, "nan"), (raises, "broken")):
        monkeypatch.setattr(_selftest, "flash_attn_func", function)
        assert __main__.main(["--json"] if as_json else []) == 1
        text = capsys.readouterr().out
        assert "failed" in text
        assert detail in text
        if as_json:
            status = {r["name"]: r["status"] for r in json.loads(text)["self_test"]}
            assert status["cpu float32 forward"] == "failed"
            assert status["cpu float32 kvcache"] == "ok"


def test_a_missing_kernel_does_not_fail(monkeypatch, capsys):
    def missing(*args, **kwargs):
        raise NotImplementedError("no kernel yet")

    monkeypatch.setattr(__main__, "report", lambda: {**REPORT})
    monkeypatch.setattr(_selftest, "flash_attn_with_kvcache", missing)
    assert __main__.main([]) == 0
    assert "no kernel yet" in capsys.readouterr().out


REPORT = {
    **dict.fromkeys(("version", "build", "python", "torch", "torch_cuda", "library"), "?"),
    "why_no_cuda": None,
    "backends": ["cpu"],
    "gpus": [],
    "variants": [],
}
