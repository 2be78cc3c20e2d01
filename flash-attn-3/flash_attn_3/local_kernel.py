"""A folder that the `kernels` package loads instead of a kernel of its hub.

    python -m flash_attn_3.local_kernel FOLDER [REPOSITORY]

Models that list `kernels-community/vllm-flash-attn3` alone (gpt-oss) then run on these kernels: the
command prints the variable that has to be set for it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

REPOSITORY = "kernels-community/vllm-flash-attn3"
MODULE = "from flash_attn_interface import *  # made by python -m flash_attn_3.local_kernel\n"
# The id is the name that the module gets in sys.modules, which must be no one else's.
METADATA = {
    "id": "local_kernel_of_flash_attn_3",
    "name": "flash-attn-3",
    "version": 1,
    "license": "BSD-3-Clause",
    "python-depends": [],
    "backend": {"type": "cpu"},
}


def write(folder: Path, repository: str = REPOSITORY) -> str:
    """Returns the value of LOCAL_KERNELS."""
    if ":" in str(folder.absolute()):
        raise ValueError(f"{folder}: LOCAL_KERNELS separates its entries by colons")
    variant = folder / "build" / "torch-universal"
    variant.mkdir(parents=True, exist_ok=True)
    (variant / "__init__.py").write_text(MODULE)
    (variant / "metadata.json").write_text(json.dumps(METADATA, indent=1) + "\n")
    return f"{repository}={folder.absolute()}"


def main(argv: list[str]) -> int:
    if len(argv) not in (1, 2) or argv[0].startswith("-"):
        print(__doc__, file=sys.stderr)
        return 2
    print(f"export LOCAL_KERNELS={write(Path(argv[0]), *argv[1:])}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
