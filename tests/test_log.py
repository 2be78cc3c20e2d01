"""FLASH_ATTN_LOG and the logger: which calls leave a line, and where."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize("value", ["1", "true", "0", "false", ""])
def test_log(value):
    program = (
        "import torch, flash_attn as f; q = torch.zeros(1, 4, 2, 8);"
        "[f.flash_attn_func(q, q, q, causal=c) for c in (True, True, False)];"
        "f.flash_attn_with_kvcache(q, q, q, cache_seqlens=2);"
        "c = torch.tensor([0, 4], dtype=torch.int32);"
        "f.flash_attn_varlen_func(q[0], q[0], q[0], c, c, 4, 4)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env={**os.environ, "FLASH_ATTN_LOG": value},
    )
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("flash_attn: ")]
    if value not in ("1", "true"):
        assert not lines
        return
    assert len(lines) == 4  # one per distinct call
    assert ", causal" in lines[0]
    assert ", causal" not in lines[1]
    assert "_flash_attn_with_kvcache" in lines[2]
    assert "_flash_attn_varlen_forward" in lines[3]
    assert all("-> cpu" in line for line in lines)


LISTENER = """
import logging, torch
{before}
import flash_attn as f
q = torch.zeros(1, 4, 2, 8)
f.flash_attn_func(q, q, q)
"""


@pytest.mark.parametrize(
    ("before", "value", "expected"),
    [
        ("logging.getLogger('flash_attn').setLevel('INFO'); logging.basicConfig()", "", "INFO:"),
        ("logging.basicConfig()", "1", "INFO:flash_attn:_flash_attn_forward: q (1, 4, 2, 8)"),
        ("logging.basicConfig(level='DEBUG')", "", ""),  # asks for everything, not for this
        ("logging.basicConfig(); logging.disable()", "1", ""),
    ],
)
def test_lines_go_where_the_program_sends_them(before, value, expected):
    program = LISTENER.format(before=before)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True,
        env={**os.environ, "FLASH_ATTN_LOG": value},
    )  # fmt: skip
    lines = [line for line in done.stderr.splitlines() if "flash_attn" in line]
    assert len(lines) == bool(expected)
    assert all(line.startswith(expected) for line in lines)
