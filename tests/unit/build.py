"""Compile csrc/core and its bindings with the host's C++ compiler, in seconds, to build/unit."""

from pathlib import Path
from types import ModuleType

from tests import host_build

BINDINGS = Path(__file__).resolve().parent
OUT = host_build.ROOT / "build" / "unit"
MODULE = "flash_core"
FLAGS = [
    "-std=c++20",
    "-fPIC",
    "-fvisibility=hidden",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-Wno-unknown-pragmas",  # unroll
    # Undefined behaviour in a header stops the run at the test that reached it. Traps, because the
    # sanitizer's own runtime library is not installed everywhere.
    "-fsanitize=signed-integer-overflow,shift,integer-divide-by-zero,bounds,float-cast-overflow",
    "-fsanitize-undefined-trap-on-error",
]


def load() -> ModuleType:
    """The module with the bindings, compiled first where necessary.

    Raises Unavailable without a compiler or pybind11, and RuntimeError with the compiler's
    messages when it rejects the sources.
    """
    return host_build.load(build(), MODULE)


def build() -> Path:
    """Compile what is out of date and return the path of the module."""
    flags = [*FLAGS, f"-I{host_build.CSRC}", *host_build.python_flags()]
    bindings = sorted(BINDINGS.glob("*.cpp"))
    headers = [
        *host_build.CSRC.glob("core/*.h"),
        *host_build.CSRC.glob("params/*.h"),
        *host_build.CSRC.glob("plan/**/*.h"),
        host_build.CSRC / "launch" / "counter_arena.h",
    ]
    plans = sorted(host_build.CSRC.glob("plan/*.cpp"))

    def make(target: Path) -> None:
        # As one source, because most of the time goes into reading pybind11: 7 seconds, not 35.
        together = OUT / f"{MODULE}.cpp"
        together.write_text("".join(f'#include "{source}"\n' for source in bindings))
        sources = [str(source) for source in (together, *plans)]
        host_build.run([host_build.compiler(), *flags, "-shared", *sources, "-o", str(target)])

    return host_build.build_once(
        OUT, MODULE, flags, [*bindings, *headers, *plans, *BINDINGS.glob("*.h")], make
    )


if __name__ == "__main__":
    print(build())
