"""Writes csrc/plan/machines/<name>.h."""

from __future__ import annotations

import re

import numpy as np

from benchmarks.tune.model import Model

_MEMORY_AND_SOCKET = re.compile(r"^(\d+GB|HBM\w*|SXM\d*)$")
_HEAD = """\
// {gpu}: {sms} SMs, {mib:.0f} MiB of L2; numbers as `make tune` writes them.
#pragma once

#include "plan/machine.h"

namespace flash::plan {{
"""
_KERNELS = {
    "Backward": "tiles, KV-persistent, ordered dQ",
    "Forward": "the row's tile, its second one, pack-GQA, pack-GQA with splits",
    "ForwardCodes": "the same of codes",
    "ForwardFp8": "the row's tile, its second one, where products are of codes",
    "Decode": "pieces, of 16 bits and of codes",
}


def _member(direction: str) -> str:
    """Of Machine: forward_codes for ForwardCodes."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", direction).lower()


def name_of(gpu: str) -> str:
    """h100 for NVIDIA H100 80GB HBM3."""
    words = re.split(r"[ _-]", gpu.removeprefix("NVIDIA "))
    return "_".join(word for word in words if not _MEMORY_AND_SOCKET.match(word)).lower()


def _number(x: float) -> str:
    """With four digits, as a float of C++."""
    text = np.format_float_scientific(x, precision=3, trim="-", exp_digits=1).replace("e+", "e")
    if -3 < np.log10(max(x, 1e-9)) < 4:
        text = np.format_float_positional(float(text), trim="0")
    return f"{text}f"


def _bytes(count: int) -> str:
    return f"{count >> 20} << 20" if count % 2**20 == 0 else str(count)


def _tables(model: Model, constant: str) -> list[str]:
    """Rows of {head dim, head dim of v, {fixed, step}, …}."""
    rows: dict[tuple[str, ...], list[float]] = {}
    for name, number in zip(model.names, model.numbers):
        if name.count("/"):
            rows.setdefault(tuple(name.split("/")[:3]), []).append(float(number))
    lines = []
    for direction, kernels in _KERNELS.items():
        lines += [f"// {{fixed, step}} of: {kernels}.",
                  f"inline constexpr RowTimes {constant}{direction}[] = {{"]  # fmt: skip
        for (of, d, dv), numbers in rows.items():
            if of == _member(direction):
                pairs = zip(numbers[::2], numbers[1::2])
                texts = [f"{{{_number(b)}, {_number(s)}}}" if s else "{}" for b, s in pairs]
                lines.append(f"    {{{d}, {dv}, {{{', '.join(texts)}}}}},")
        lines += ["};", ""]
    return lines


def text_of(model: Model, gpu: str, name: str) -> str:
    constant = constant_of(name)
    numbers = [
        f"    .{n} = {_number(x)}," for n, x in zip(model.names, model.numbers) if "/" not in n
    ]
    return "\n".join([
        _HEAD.format(gpu=gpu, sms=model.sm_count, mib=model.l2_bytes / 2**20),
        *_tables(model, constant),
        f"inline constexpr Machine {constant} = {{",
        "    .sm = 90,",
        f"    .sm_count = {model.sm_count},",
        f"    .l2_bytes = {_bytes(model.l2_bytes)},",
        *numbers,
        *(f"    .{_member(direction)} = {constant}{direction}," for direction in _KERNELS),
        "};",
        "",
        "}  // namespace flash::plan",
        "",
    ])  # fmt: skip


def constant_of(name: str) -> str:
    return "k" + "".join(part.capitalize() for part in name.split("_"))
