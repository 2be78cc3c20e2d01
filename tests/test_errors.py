"""Bad input: each raises, and the message names the argument, what it got, and what is accepted."""

from __future__ import annotations

import pytest
import torch
from bad_cache_input import CACHE_CASES
from bad_input import CALLS, CASES, HALF, dense, int32, rotary
from bad_options import OPTION_CASES
from torch.utils._python_dispatch import TorchDispatchMode

import flash_attn

BAD = [
    pytest.param(call, bad, id=f"{call}-{bad.name.replace(' ', '_')}")
    for bad in [*CASES, *OPTION_CASES, *CACHE_CASES]
    for call in bad.calls
]


@pytest.mark.parametrize(("call", "bad"), BAD)
def test_message(device, call, bad):
    function, make = CALLS[call]
    arguments = make(device)
    arguments.update(bad.change(arguments))
    with pytest.raises(bad.error) as raised:
        function(**arguments)
    assert raised.type is bad.error
    for words in bad.says:
        assert words in str(raised.value)
    assert raised.value.__context__ is None or raised.value.__suppress_context__  # all there is


class Seen(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(("call", "bad"), [case for case in BAD if "meta" in case.id])
def test_message_to_an_observer(device, call, bad):
    """The dispatcher serves a call without data if one of its tensors has none."""
    with Seen():
        test_message(device, call, bad)


@pytest.mark.parametrize("call", CALLS)
def test_the_unchanged_calls_are_good(device, needs, call):
    """Otherwise the cases above could raise for another reason."""
    function, make = CALLS[call]
    with needs(*(["kvcache"] if call == "cache" else [])):
        assert function(**make(device)).isfinite().all()
    if call == "cache":
        with needs("kvcache"):
            assert function(**make(device), **rotary(device)).isfinite().all()


DENSE = "(batch, seqlen, {}, heads, head_dim)"


@pytest.mark.parametrize(
    ("function", "name", "shape", "accepted", "others"),
    [
        (flash_attn.flash_attn_qkvpacked_func, "qkv", (2, 6, 2, 4, 32), DENSE.format(3), ()),
        (flash_attn.flash_attn_qkvpacked_func, "qkv", (2, 6, 4, 32), DENSE.format(3), ()),
        (flash_attn.flash_attn_kvpacked_func, "kv", (2, 6, 3, 4, 32), DENSE.format(2), (2, 6)),
        (
            flash_attn.flash_attn_varlen_qkvpacked_func,
            "qkv",
            (12, 2, 4, 32),
            "(total, 3, heads, head_dim)",
            (),
        ),
        (
            flash_attn.flash_attn_varlen_kvpacked_func,
            "kv",
            (12, 3, 4, 32),
            "(total, 2, heads, head_dim)",
            (12,),
        ),
    ],
)
def test_packed_message(device, function, name, shape, accepted, others):
    packed = torch.zeros(shape, device=device, dtype=HALF)
    arguments = {name: packed}
    if others:
        arguments["q"] = torch.zeros(*others, 4, 32, device=device, dtype=HALF)
    ends = int32(device, 0, 12)
    if function is flash_attn.flash_attn_varlen_qkvpacked_func:
        arguments |= {"cu_seqlens": ends, "max_seqlen": 12}
    if function is flash_attn.flash_attn_varlen_kvpacked_func:
        arguments |= {f"cu_seqlens_{x}": ends for x in "qk"}
        arguments |= {f"max_seqlen_{x}": 12 for x in "qk"}
    with pytest.raises(ValueError) as raised:
        function(**arguments)
    assert f"{name}: got shape {shape}" in str(raised.value)
    assert accepted in str(raised.value)


def test_packed_needs_a_tensor():
    with pytest.raises(TypeError, match="qkv: got list"):
        flash_attn.flash_attn_qkvpacked_func([1])


# --- Addresses ------------------------------------------------------------------------------------


def test_address_between_two_elements():
    memory = bytearray(2 * 6 * 4 * 32 * 2 + 1)
    misaligned = torch.frombuffer(memory, dtype=HALF, offset=1).view(2, 6, 4, 32)
    arguments = dense("cpu") | {"q": misaligned}
    with pytest.raises(ValueError, match=r"q: got address 0x.*a multiple of 2 is needed"):
        flash_attn.flash_attn_func(**arguments)


def test_address_that_is_no_multiple_of_16_bytes(cuda):
    x = torch.zeros(2 * 6 * 4 * 32 + 1, device=cuda, dtype=HALF)[1:].view(2, 6, 4, 32)
    with pytest.raises(ValueError, match=r"k: got address 0x.*16 bytes"):
        flash_attn.flash_attn_func(**dense(cuda) | {"k": x, "v": x})


def test_rows_that_are_no_multiple_of_16_bytes_apart(cuda):
    x = torch.zeros(2, 6, 4, 33, device=cuda, dtype=HALF)[..., :32]
    with pytest.raises(ValueError, match=r"q: got strides .*16 bytes"):
        flash_attn.flash_attn_func(**dense(cuda) | {"q": x})


def test_cuda_takes_half_precision_only(cuda):
    arguments = {name: x.float() for name, x in dense(cuda).items()}
    with pytest.raises(ValueError, match=r"q: got dtype torch.float32; accepted on cuda are"):
        flash_attn.flash_attn_func(**arguments)


def test_unsupported_gpu(monkeypatch):
    """Turing, seen from a machine that may have no GPU at all."""
    from flash_attn import backend

    backend.check_gpu.cache_clear()
    monkeypatch.setattr(backend, "library", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    with pytest.raises(NotImplementedError, match=r"Tesla T4 .* 7\.5; 8\.0 .* is needed"):
        backend.check_gpu(torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    backend.check_gpu(torch.device("cuda", 0))
    backend.check_gpu.cache_clear()


def test_unsupported_device(monkeypatch):
    q = torch.empty(2, 6, 4, 32, device="meta", dtype=HALF)
    assert flash_attn.flash_attn_func(q, q, q).shape == q.shape  # shapes only, but accepted
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        q = torch.empty(2, 6, 4, 32, device="xpu", dtype=HALF)
        with pytest.raises(ValueError, match=r"q: got device xpu.*cpu and cuda"):
            flash_attn.flash_attn_func(q, q, q)


def test_no_backward_through_pages():
    q = torch.randn(4, 2, 32, requires_grad=True)
    pages = torch.randn(2, 4, 2, 32)
    ends = int32("cpu", 0, 4)
    table = int32("cpu", 1)[None]
    out = flash_attn.flash_attn_varlen_func(q, pages, pages, ends, ends, 4, 4, block_table=table)
    with pytest.raises(NotImplementedError, match="no backward through block_table"):
        out.sum().backward()
