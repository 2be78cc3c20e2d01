"""How many compilers may run at once, and how long they will take."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from build_tools.probe import BuildError

# Peak resident memory of one nvcc on the largest attention kernels (cicc and ptxas run one after
# the other); the build report has the figure per file, so a kernel that outgrows this shows up.
GIB_PER_JOB = 3.5
# Left for the rest of the machine: a build must not push a desktop or a test run into swap.
GIB_RESERVED = 1.0


def available_gib(root: Path = Path("/")) -> float:
    """Free memory, as the kernel estimates it, or less if a container's limit is nearer."""
    meminfo = (root / "proc/meminfo").read_text()
    free = int(re.search(r"^MemAvailable:\s*(\d+) kB", meminfo, re.MULTILINE)[1]) * 1024
    return min([free, *_container_memory(root)]) / 2**30


def _container_memory(root: Path) -> list[int]:
    version_2 = ("memory.max", "memory.current")
    version_1 = ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes")
    left = []
    for names in (version_2, version_1):
        try:
            limit, used = (int((root / "sys/fs/cgroup" / name).read_text()) for name in names)
            left.append(limit - used)
        except (OSError, ValueError):  # no such controller, or "max"
            continue
    return left


def cores(root: Path = Path("/")) -> int:
    count = len(os.sched_getaffinity(0))
    try:
        quota, period = (root / "sys/fs/cgroup/cpu.max").read_text().split()
        count = min(count, max(1, round(int(quota) / int(period))))
    except (OSError, ValueError):
        pass
    return count


def job_count(free_gib: float, core_count: int, env: Mapping[str, str] = os.environ) -> int:
    """MAX_JOBS if set, else as many as cores and free memory allow; never less than one."""
    limit = env.get("MAX_JOBS", "").strip()
    if limit:
        if not limit.isdigit() or int(limit) < 1:
            raise BuildError(f'MAX_JOBS is "{limit}"; accepted: a whole number from 1.')
        return int(limit)
    by_memory = int((free_gib - GIB_RESERVED) / (GIB_PER_JOB * nvcc_threads(env)))
    return max(1, min(core_count, by_memory))


def nvcc_threads(env: Mapping[str, str] = os.environ) -> int:
    """Architectures that one nvcc compiles side by side; each takes the memory of a job."""
    value = env.get("NVCC_THREADS", "").strip() or "1"
    if not value.isdigit() or int(value) < 1:
        raise BuildError(f'NVCC_THREADS is "{value}"; accepted: a whole number from 1.')
    return int(value)
