"""The words of the compiled library's checks: ``require`` in ``csrc/api``.

It checks what a kernel needs so as not to fault, and reports an argument, a code and operands. Of a
call of a public function, ``checks.py`` says what is wrong, in the words of every backend
(``dispatch/calls.py``). These words are for operations that are called directly, and for what
Python cannot see, such as a tensor whose storage is freed. What no kernel serves, the library says
in words of its own (``kNotImplemented``).
"""

from __future__ import annotations

import re

_REFUSED = re.compile(r"flash_attn: refused: ([^|]+)\|(\w+)((?:\|[^|\n]*)*)")

# code → text after the argument's name; {} are the operands
WORDS = {
    "address": "got address {}; a multiple of 16 bytes is needed",
    "descale": "got shape {}; float32 (batch, heads_k) = ({}, {}), or the cache's shape without "
    "its last dimension, is needed",
    "device": "it is not on the CUDA device of the call's other tensors",
    "dims": "got {} dimensions; {} are needed",
    "dtype": "got dtype {}; {} is needed",
    "excludes": "it goes with no {}",
    "head_dim": "got head_dim {}; a multiple of {} is needed",
    "least": "got {}; {} or more is needed",
    "memory": "it has no memory: its storage is freed",
    "needs": "it needs {}",
    "pages": "int32 ({}, pages) with stride 1 in a row is needed",
    "range": "got {}; {} to {} is needed",
    "shape": "got shape {}, which does not go with {} of shape {}",
    "slopes": "fp32 (heads,) or (batch, heads) = ({}, {}) is needed",
    "stride": "got stride {} in dimension {}; a multiple of {} is needed",
    "table": "got shape {}; one row or more of at most head_dim / 2 numbers, of q's dtype, without "
    "gaps, and the same for cos and sin, are needed",
    "unit_stride": "got stride {} in the last dimension; 1 is needed",
    "vector": "a contiguous {} tensor of {} entries is needed",
    "with": "it comes together with {}",
    "written": "got stride 0 in dimension {}, which cannot be written",
}


def worded(message: str) -> str | None:
    """The message in words, if it is a refusal."""
    found = _REFUSED.search(message)
    if found is None:
        return None
    argument, code, operands = found.groups()
    return f"flash_attn: {argument}: {WORDS[code].format(*operands.split('|')[1:])}"
