"""For which GPUs a build has code: what is asked for, and what nvcc made of it."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from build_tools import instantiate, ninja_file, object_file, probe, targets
from build_tools.plan import parse_archs
from tests.commands import ROOT, run, script

RELEASE = ["80", "86", "90a", "100", "120"]
JETSONS = ["87", "110"]


def test_every_gpu_s_code_is_from_one_run_of_the_front_end():
    archs = [*RELEASE, *JETSONS]
    assert list(parse_archs(";".join(archs))) == archs
    assert list(parse_archs("8.0 8.6 9.0 10.0 12.0 8.7 11.0")) == archs
    flags = targets.targets(SimpleNamespace(arch="sm80", direction="fwd"), archs)
    assert targets.codes(flags) == {
        *(f"sm_{number}" for number in (80, 86, 90, 100, 120, 87, 110)), "compute_80"
    }  # fmt: skip
    assert all("arch=compute_80," in flag for flag in flags)


@pytest.mark.parametrize(("machine", "more"), [("x86_64", []), ("aarch64", JETSONS)])
def test_a_wheel_to_carry_elsewhere_is_for_every_gpu(tmp_path, machine, more):
    script(tmp_path / "uname", f"echo {machine}")
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    makefile = (ROOT / "Makefile").read_text() + "\nasked:\n\t@echo '$(RELEASE_ARCHS)'\n"
    (tmp_path / "Makefile").write_text(makefile)
    done = run("make", "-s", "-f", tmp_path / "Makefile", "asked", **path)
    assert done.stdout.strip().split(";") == [*RELEASE, *more]


def test_a_family_s_folder_is_compiled_for_its_own_gpu(tmp_path):
    csrc = tmp_path / "csrc"
    for family in ("sm80", "sm90"):
        (csrc / family / "linear").mkdir(parents=True)
        (csrc / family / "linear" / f"walks_{family}.cu").touch()

    def sources(archs: list[str]) -> dict[str, list[str]]:
        found = ninja_file.Sources.collect(csrc, [], archs, [])
        return {source.path.stem: source.gencode for source in found.kernels}

    both = sources(["80", "90a"])
    assert both["walks_sm90"] == ["--generate-code=arch=compute_90a,code=sm_90a"]
    assert both["walks_sm80"] == targets.common_targets(["80", "90a"])
    assert list(sources(["80", "120"])) == ["walks_sm80"]


@pytest.mark.parametrize(("archs", "has_walks"), [(["80"], False), (["80", "90a"], True)])
def test_the_registry_names_hopper_s_walks_where_they_are_compiled(tmp_path, archs, has_walks):
    registry = instantiate.generate(tmp_path, archs)[-1].read_text()
    assert ("vector_walks_bf16" in registry) == has_walks
    assert ("hopper_walks() { return {}; }" in registry) == (not has_walks)


def test_what_nvcc_compiled_is_read_from_its_object(tmp_path):
    """A file of kernels for every GPU; CI builds the others for two."""
    nvcc = probe.find_nvcc()
    if nvcc is None or {"100", "110", "120"} - probe.gpu_codes(nvcc):
        pytest.skip("no nvcc that knows every GPU")
    if not (ROOT / ninja_file.CUTLASS_INCLUDES[-1]).exists():
        pytest.skip("no CUTLASS headers: python third_party/fetch.py")
    source = ROOT / "csrc" / "passes" / "merge" / "merge.cu"
    obj, flags = tmp_path / "k.o", targets.common_targets([*RELEASE, *JETSONS])
    includes = [f"-I{ROOT / folder}" for folder in ("csrc", *ninja_file.CUTLASS_INCLUDES)]
    run(nvcc.path, "-c", source, "-o", obj, "-std=c++20",
        "--expt-relaxed-constexpr", *includes, *flags)  # fmt: skip
    assert object_file.device_code(obj.read_bytes()) == [targets.codes(flags)]
