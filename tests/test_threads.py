"""Each public function as the first thing that a thread does with the GPU.

Nothing has bound the device's context to such a thread: the allocator has memory at hand, and the
current device is the right one already.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from functools import partial

import pytest
import torch

import flash_attn
from flash_attn import flash_attn_interface

BF16 = torch.bfloat16


def calls(device: str) -> dict[str, Callable[[], object]]:
    """Calls whose inputs exist already."""
    qkv = torch.randn(2, 160, 3, 4, 64, dtype=BF16, device=device)
    q, k, v = qkv.unbind(2)
    packed = qkv.flatten(0, 1)
    cu = torch.tensor([0, 150, 320], dtype=torch.int32, device=device)
    lengths = (cu, cu, 170, 170)
    out, lse = flash_attn.flash_attn_func(q, k, v, causal=True, return_lse=True)
    used = torch.tensor([100, 37], dtype=torch.int32, device=device)
    cos = torch.randn(160, 16, dtype=BF16, device=device)
    table = torch.arange(22, dtype=torch.int32, device=device).view(2, 11)
    pages = torch.randn(2, 22, 16, 4, 64, dtype=BF16, device=device)
    masked = dict(causal=True)
    cached = dict(masked, cache_seqlens=used)
    new = dict(k=k[:, :3], v=v[:, :3], rotary_cos=cos, rotary_sin=cos)

    def backward():
        gradients = [torch.empty_like(q) for _ in range(3)]
        flash_attn_interface._flash_attn_backward(
            out, q, k, v, out, lse, *gradients, 0.0, 0.125, True, -1, -1, 0.0, None, True
        )
        return gradients

    def varlen_backward():
        gradients = [torch.empty_like(packed[:, 0]) for _ in range(3)]
        flash_attn_interface._flash_attn_varlen_backward(
            out.flatten(0, 1), *packed.unbind(1), out.flatten(0, 1),
            lse.transpose(0, 1).flatten(1).contiguous(), *gradients, *lengths, 0.0, 0.125, True,
            -1, -1, 0.0, None, True,
        )  # fmt: skip
        return gradients

    def append():
        k_cache, v_cache = k.clone(), v.clone()
        out = flash_attn.flash_attn_with_kvcache(q[:, :3], k_cache, v_cache, **cached, **new)
        return out, k_cache, v_cache

    f = flash_attn
    return {
        "dense": partial(f.flash_attn_func, q, k, v, **masked),
        "probabilities": partial(f.flash_attn_func, q, k, v, **masked, return_attn_probs=True),
        "qkvpacked": partial(f.flash_attn_qkvpacked_func, qkv, **masked),
        "kvpacked": partial(f.flash_attn_kvpacked_func, q, qkv[:, :, 1:], **masked),
        "varlen": partial(f.flash_attn_varlen_func, *packed.unbind(1), *lengths, **masked),
        "varlen qkvpacked": partial(
            f.flash_attn_varlen_qkvpacked_func, packed, cu, 170, **masked
        ),
        "varlen kvpacked": partial(
            f.flash_attn_varlen_kvpacked_func, packed[:, 0], packed[:, 1:], *lengths, **masked
        ),
        "pages": partial(
            f.flash_attn_varlen_func, packed[:, 0], *pages, *lengths, **masked, block_table=table
        ),
        "cache": partial(f.flash_attn_with_kvcache, q[:, :1], k, v, **cached),
        "long cache call": partial(f.flash_attn_with_kvcache, q, k, v, **cached),
        "append": append,
        "backward": backward,
        "varlen backward": varlen_backward,
    }  # fmt: skip


def in_a_thread(call: Callable[[], object]) -> object:
    """What the call gives, or raises, as the first work of a new thread."""
    got: list[object] = []

    def work() -> None:
        try:
            got.append(call())
        except BaseException as error:  # for the thread that asked
            got.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if isinstance(got[0], BaseException):
        raise got[0]
    return got[0]


def tensors(results: object) -> list[torch.Tensor]:
    return [results] if isinstance(results, torch.Tensor) else list(results)


def assert_same(results: object, expected: object) -> None:
    for ours, theirs in zip(tensors(results), tensors(expected), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


NAMES = (
    "dense", "probabilities", "qkvpacked", "kvpacked", "varlen", "varlen qkvpacked",
    "varlen kvpacked", "pages", "cache", "long cache call", "append", "backward",
    "varlen backward",
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_first_work_of_a_thread(device, name):
    call = calls(device)[name]
    expected = call()
    call()  # leaves memory at hand
    if device == "cuda":
        torch.cuda.synchronize()
    assert_same(in_a_thread(call), expected)


@pytest.mark.parametrize("name", NAMES)
def test_on_another_device(cuda, name):
    """Threads begin with device 0 as the current one."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    call, other = calls("cuda:1")[name], calls("cuda:0")[name]
    expected, expected_of_other = call(), other()
    call()  # leaves memory at hand
    torch.cuda.synchronize("cuda:1")
    torch.cuda.synchronize("cuda:0")

    def one_after_the_other():
        return call(), other(), call()

    assert_same(in_a_thread(call), expected)
    for results, theirs in zip(
        in_a_thread(one_after_the_other), (expected, expected_of_other, expected), strict=True
    ):
        assert_same(results, theirs)


def test_a_thread_that_lost_its_context(cuda):
    """As after another library that restores what it found."""
    driver = ctypes.CDLL("libcuda.so.1")
    call = calls(cuda)["dense"]
    expected = call()
    torch.cuda.synchronize()

    def work():
        first = call()
        assert driver.cuCtxSetCurrent(None) == 0
        return first, call()

    for out in in_a_thread(work):
        assert_same(out, expected)


@pytest.mark.parametrize("name", ["dense", "varlen", "cache", "append"])
def test_first_work_of_a_thread_is_captured(cuda, name):
    """Into a graph that another thread captures, with memory at hand in the graph's pool."""
    call = calls(cuda)[name]
    expected = call()
    torch.cuda.synchronize()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()

    def work():
        with torch.cuda.stream(stream):
            return call()

    with torch.cuda.graph(graph, stream=stream):
        for x in tensors(call()):
            x.zero_()
        results = in_a_thread(work)
    graph.replay()
    torch.cuda.synchronize()
    assert_same(results, expected)
