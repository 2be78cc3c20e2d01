"""Builds the wheel. The three modes, and every variable, are in docs/build.md.

Metadata (pip's egg_info and dist_info) needs neither torch nor nvcc: only commands that make files
for an installation look at the machine.
"""

import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.sdist import sdist

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))  # a build front end runs this file without its folder on the path

from build_tools.build import build, describe  # noqa: E402
from build_tools.plan import Plan, make_plan  # noqa: E402
from build_tools.probe import BuildError  # noqa: E402
from third_party.fetch import FetchError, fetch_cutlass  # noqa: E402

BUILD_COMMANDS = {"build", "build_ext", "bdist_wheel", "editable_wheel", "install", "develop"}


def plan_of_this_run() -> Plan:
    if not BUILD_COMMANDS.intersection(sys.argv):
        return Plan((), "metadata only")
    try:
        plan = make_plan()
    except BuildError as error:
        raise SystemExit(f"flash-attn: {error}") from None
    print(describe(plan), flush=True)
    return plan


PLAN = plan_of_this_run()


class BuildKernels(build_ext):
    """Hands the one extension to ninja."""

    def build_extension(self, extension):
        output = Path(self.get_ext_fullpath(extension.name))
        try:
            build(PLAN, output)
        except (BuildError, FetchError) as error:
            raise SystemExit(f"flash-attn: {error}") from None


class AbiWheel(bdist_wheel):
    """cp310-abi3 with kernels, py3-none without."""

    def finalize_options(self):
        if PLAN.archs:
            self.py_limited_api = "cp310"
        super().finalize_options()


class SdistWithHeaders(sdist):
    """Puts the CUTLASS headers in, so that a source distribution builds offline."""

    def run(self):
        try:
            fetch_cutlass()
        except FetchError as error:
            raise SystemExit(f"flash-attn: {error}") from None
        super().run()


setup(
    ext_modules=[Extension("flash_attn._C", [], py_limited_api=True)] if PLAN.archs else [],
    cmdclass={"build_ext": BuildKernels, "bdist_wheel": AbiWheel, "sdist": SdistWithHeaders},
)
