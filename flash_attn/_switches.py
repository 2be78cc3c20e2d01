"""Every environment variable: what it takes, and what is read of it.

The one table, of the code and of docs/switches.md. It imports nothing of the package, because the
build reads it by path, without torch.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

_ON = ("1", "true", "yes", "on")
_OFF = ("0", "false", "no", "off")
FLAG = "`1`, `true`, `yes`, `on`; `0`, `false`, `no`, `off`"


class Switch(NamedTuple):
    name: str
    accepts: str
    default: str
    meaning: str


#: Read once, when the package is imported.
AT_RUN_TIME = (
    Switch(
        "FLASH_ATTN_LOG", FLAG, "off",
        "sets the level of the logger `flash_attn` to `INFO`: one line for each new problem, with "
        "the kernel that serves it and what is slow about that",
    ),
    Switch(
        "FLASH_ATTN_CHECK", FLAG, "off",
        "looks at what index tensors contain before each kernel on a GPU, too, as the CPU backend "
        "always does, and raises where it lies outside",
    ),
    Switch(
        "FLASH_ATTN_ARCH", "`80`, `90`", "the newest that the GPU runs",
        "calls take kernels of this family alone, to compare families on one GPU (linear attention "
        "where it has some)",
    ),
)  # fmt: skip

#: Read by the build.
AT_BUILD_TIME = (
    Switch(
        "FLASH_ATTN_CUDA_ARCHS", "a list such as `80;90a`; `native`; `none`",
        "`native` with a GPU and nvcc, else `none`",
        "which GPUs kernels are compiled for; `native`: those of this machine. `make wheel` has a "
        "[list](install.md#platforms) of its own",
    ),
    Switch(
        "FLASH_ATTN_TORCH_DIR", "a folder", "the target environment's",
        "the torch to build for: its own folder, or the one it is in",
    ),
    Switch(
        "FLASH_ATTN_STRICT", FLAG, "on with nvcc 13.0, by which the table was tuned; else off",
        "lost speed (register spills, serialised wgmma, an ignored setmaxnreg) is an error; else "
        "it is reported",
    ),
    Switch(
        "FLASH_ATTN_LINEINFO", FLAG, "off",
        "source lines in the kernels, for profilers and compute-sanitizer",
    ),
    Switch("MAX_JOBS", "a whole number from 1", "by cores, and free memory / 3.5 GiB",
           "compilers at a time"),
    Switch("NVCC_THREADS", "a whole number from 1", "1",
           "architectures that one nvcc compiles side by side"),
    Switch("CUDA_HOME", "a folder", "`CUDA_PATH`, nvcc on `PATH`, then `/usr/local/cuda`",
           "the CUDA toolkit; a folder without `bin/nvcc` is passed over"),
    Switch("CXX", "a command", "`g++`, then `c++`", "the host compiler"),
    Switch("CCACHE_DIR", "a folder", "ccache's own", "where ccache, if installed, keeps objects"),
)  # fmt: skip


def flag(name: str, env: Mapping[str, str] = os.environ) -> bool | None:
    """What a variable of yes or no says; None where it is not set, or empty.

    Raises:
        ValueError: any other value.
    """
    value = env.get(name, "").strip().lower()
    if value in _ON or value in _OFF:
        return value in _ON
    if not value:
        return None
    raise ValueError(f"{name}: got {env[name]!r}; accepted: {', '.join(_ON)}, or {', '.join(_OFF)}")


def check_arch(env: Mapping[str, str] = os.environ) -> None:
    """FLASH_ATTN_ARCH is read by the compiled library; 0 says nothing, as an empty one does.

    Raises:
        ValueError: a family that there is not.
    """
    value = env.get("FLASH_ATTN_ARCH", "")
    if value not in ("", "0", "80", "90"):
        raise ValueError(
            f"FLASH_ATTN_ARCH: got {value!r}; there are kernels of the families 80 and 90"
        )
