"""Calls of kernels on the host, each with what flash_attn.explain says of it: a program.

It prints the calls that ran on anything else, by what launches say of themselves.
"""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

import flash_attn
from flash_attn import backend
from tests.kernels import library

Call = tuple[Callable, list[Tensor], dict]
NO_KERNEL = (None, None)
LAUNCHES = re.compile(r"-> (\w+) \(tile (\d+)x(\d+)")


def tokens(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.bfloat16)


def ends(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def pages(choice: Callable, seqlen: int, batch: int, *head: int) -> tuple[Tensor, Tensor, Tensor]:
    """k, v and a table."""
    size = choice([1, 8, 16, 48, 64, 80])
    count = -(-seqlen // size)
    table = torch.randint(0, count + 3, (batch, count), dtype=torch.int32)
    return tokens(count + 3, size, *head), tokens(count + 3, size, *head), table


def maybe_codes(choice: Callable, k: Tensor, v: Tensor, batch: int, options: dict):
    """k and v, sometimes as codes; then options get a descale."""
    if choice([True, True, False]):
        return k, v
    of_heads, of_rows = torch.ones(batch, k.shape[2]), torch.ones(k.shape[:3])
    options["k_descale"] = choice([None, 0.5, of_heads, of_rows])
    return k.to(torch.float8_e4m3fn), v.to(torch.float8_e4m3fn)


def dense(choice: Callable, sq: int, sk: int, h: int, hk: int, d: int, options: dict) -> Call:
    batch = choice([1, 2])
    q, k, v = tokens(batch, sq, h, d), *(tokens(batch, sk, hk, d) for _ in "kv")
    return flash_attn.flash_attn_func, [q, k, v], options


def packed(choice: Callable, sq: int, sk: int, h: int, hk: int, d: int, options: dict) -> Call:
    queries = [sq, *(choice([0, 1, sq]) for _ in range(choice([0, 1, 4])))]
    keys = [sk, *(choice([1, sk // 2, sk]) for _ in queries[1:])]
    options = options | {"cu_seqlens_q": ends(queries), "cu_seqlens_k": ends(keys)}
    options |= {"max_seqlen_q": choice([sq, 1000]), "max_seqlen_k": sk}
    if choice([True, False]):
        k, v, options["block_table"] = pages(choice, sk, len(queries), hk, d)
        k, v = maybe_codes(choice, k, v, len(queries), options)
    else:
        k, v = (tokens(sum(keys), hk, d) for _ in "kv")
    return flash_attn.flash_attn_varlen_func, [tokens(sum(queries), h, d), k, v], options


def cached(choice: Callable, sq: int, sk: int, h: int, hk: int, d: int, options: dict) -> Call:
    batch = choice([1, 3])
    options = {name: x for name, x in options.items() if name != "batch_invariant"}
    options |= {"cache_seqlens": torch.full((batch,), 5, dtype=torch.int32)}
    options["num_splits"] = choice([0, 0, 1, 3])
    if choice([True, False]):
        k, v, options["block_table"] = pages(choice, sk, batch, hk, d)
    else:
        k, v = (tokens(batch, sk, hk, d) for _ in "kv")
    k, v = maybe_codes(choice, k, v, batch, options)
    return flash_attn.flash_attn_with_kvcache, [tokens(batch, sq, h, d), k, v], options


def call(seed: int) -> Call:
    choice = random.Random(seed).choice
    torch.manual_seed(seed)
    hk = choice([1, 2])
    h, d = hk * choice([1, 2, 4, 8]), choice([64, 64, 96, 100, 128, 128, 256, 320, 512])
    sq, sk = choice([1, 1, 2, 5, 9, 20, 70]), seed % 40 + choice([1, 1000])
    options: dict = {"causal": choice([True, False])}
    options |= choice([{}, {}, {"window_size": (seed, 30)}, {"window_size": (2**40, 2**40)}])
    options |= choice([{}, {}, {}, {"softcap": 5.0}, {"alibi_slopes": torch.rand(h)}])
    options |= choice([{}, {}, {}, {"batch_invariant": True}])
    return choice([dense, packed, packed, cached])(choice, sq, sk, h, hk, d, options)


def launched(function: Callable, tensors: list[Tensor], options: dict) -> set[tuple]:
    """(kernel, (rows, keys) of its tile); of a call that no kernel serves, as explain has it."""
    lines: list[str] = []
    library.module().trace_to(lines.append)
    try:
        function(*tensors, **options)
    except NotImplementedError:
        return {NO_KERNEL}
    finally:
        library.module().trace_to(None)
    return {(name, (int(m), int(n))) for name, m, n in LAUNCHES.findall("\n".join(lines))}


def on_a_gpu(x: Tensor) -> Tensor:
    with FakeTensorMode():
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda")


def explained(function: Callable, tensors: list[Tensor], options: dict) -> set[tuple]:
    options = {n: on_a_gpu(x) if isinstance(x, Tensor) else x for n, x in options.items()}
    kvcache = function is flash_attn.flash_attn_with_kvcache
    choice = flash_attn.explain(*map(on_a_gpu, tensors), **options, kvcache=kvcache)
    found = {(choice.kernel, choice.tile)}
    if choice.few_kernel:
        (row,) = (v for v in backend.compiled_variants() if v["name"] == choice.few_kernel)
        found.add((choice.few_kernel, (row["block_m"], row["block_n"])))
    return found


def simulate(patch: pytest.MonkeyPatch, sm: int) -> None:
    """A GPU, for explain, like that of the library."""
    on_a_gpu(torch.empty(1))  # asks for a GPU the first time, and is to find out that there is none
    patch.setattr(backend, "library", library.module())
    patch.setattr(backend, "cuda_problem", lambda: "")
    patch.setattr(backend, "_missing", set())  # has all, where nothing was compiled for GPUs
    patch.setattr(torch.cuda, "is_available", lambda: True)
    patch.setattr(torch.cuda, "get_device_capability", lambda device=None: divmod(sm, 10))
    gpu = SimpleNamespace(
        multi_processor_count=library.DEVICES[sm][1], L2_cache_size=library.L2_BYTES
    )
    patch.setattr(torch.cuda, "get_device_properties", lambda device=None: gpu)


def main(sm: int, count: int) -> None:
    """The last line is how many were compared."""
    seen = 0
    with pytest.MonkeyPatch.context() as patch, library.serving(patch, sm):
        for seed in range(count):
            problem = call(seed)
            with pytest.MonkeyPatch.context() as gpu:
                simulate(gpu, sm)
                said = explained(*problem)
            ran = launched(*problem)
            seen += bool(ran)
            if ran and ran != said:
                print(seed, [tuple(x.shape) for x in problem[1]], "ran", ran, "said", said)
    print(seen)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
