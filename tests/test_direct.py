"""Operations past the dispatcher: the same results, and no observer of them misses one."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import nullcontext

import numpy
import pytest
import torch
from compare import assert_bitwise
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.profiler import profile
from torch.utils._python_dispatch import TorchDispatchMode

from flash_attn import backend, flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from flash_attn.call import in_order
from flash_attn.dispatch import calls, direct, ops, rotary
from flash_attn.layers.rotary import apply_rotary_emb
from tests.commands import run

BF16 = torch.bfloat16


def tokens(device: str, *shape: int) -> Tensor:
    return torch.randn(*shape, 2, 64, dtype=BF16, device=device)


def attention(device: str, **options):
    """The forward and, by autograd, the backward."""
    leaves = [tokens(device, 2, 40).requires_grad_() for _ in range(3)]
    out, lse = flash_attn_func(*leaves, causal=True, return_lse=True, **options)
    return out, lse, *torch.autograd.grad((out, lse), leaves, (out.detach(), lse.detach()))


def packed(device: str):
    leaves = [tokens(device, 40).requires_grad_() for _ in range(3)]
    ends = torch.tensor([0, 8, 40], dtype=torch.int32, device=device)
    out = flash_attn_varlen_func(*leaves, ends, ends, 32, 32, causal=True)
    return out, *torch.autograd.grad(out, leaves, out.detach())


def append(device: str):
    caches = [tokens(device, 2, 64) for _ in range(2)]
    tables = [torch.randn(64, 16, dtype=BF16, device=device) for _ in range(2)]
    used = torch.tensor([5, 7], dtype=torch.int32, device=device)
    new = [tokens(device, 2, 1) for _ in range(2)]
    out = flash_attn_with_kvcache(tokens(device, 2, 1), *caches, *new, *tables, used, causal=True)
    return out, *caches


def turn(device: str):
    tables = [torch.randn(40, 16, dtype=BF16, device=device) for _ in range(2)]
    return (apply_rotary_emb(tokens(device, 2, 40), *tables),)


CALLS: dict[str, tuple[Callable, set]] = {
    "attention": (attention, {ops.forward, ops.backward.default}),
    "dropout": (lambda device: attention(device, dropout_p=0.25), {ops.forward}),
    "sinks": (lambda device: attention(device, s_aux=torch.ones(2, device=device)), {ops.forward}),
    "packed": (packed, {ops.varlen_forward, ops.varlen_backward.default}),
    "append": (append, {ops.with_kvcache}),
    "turn": (turn, {rotary._operation.default}),
}


@pytest.fixture
def served(monkeypatch) -> list:
    """Operations in the order of their direct calls, of those that were served."""
    done = []

    def counting(operation, function):
        def call(*args):
            results = function(*args)
            if results is not NotImplemented:
                done.append(operation)
            return results

        return call

    watched = {
        operation: (counting(operation, function), arrange)
        for operation, (function, arrange) in direct._functions.items()
    }
    monkeypatch.setattr(direct, "_functions", watched)
    return done


@pytest.mark.parametrize("name", CALLS)
def test_the_same_as_by_the_dispatcher(device, served, monkeypatch, name):
    call, operations = CALLS[name]
    torch.manual_seed(0)
    results = call(device)
    assert operations <= set(served) or device == "cpu"
    monkeypatch.setattr(direct, "enabled", False)
    torch.manual_seed(0)
    for number, (got, expected) in enumerate(zip(results, call(device), strict=True)):
        assert_bitwise(str(number), got, expected)


# --- What observes --------------------------------------------------------------------------------


class SeenByDispatch(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


class SeenByFunction(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


OBSERVERS = {
    "none": nullcontext,
    "dispatch mode": SeenByDispatch,
    "function mode": SeenByFunction,
    "profiler": lambda: profile(activities=[torch.profiler.ProfilerActivity.CPU]),
}


@pytest.fixture
def asked(monkeypatch) -> list:
    """The arguments of each direct call of the forward, none of which is served."""
    calls = []

    def refuse(*args):
        calls.append(args)
        return NotImplemented

    entry = refuse, in_order(ops.forward.default._schema)
    monkeypatch.setattr(direct, "enabled", True)
    monkeypatch.setattr(direct, "_functions", {ops.forward: entry})
    return calls


@pytest.mark.parametrize("name", OBSERVERS)
@pytest.mark.parametrize("recorded", [False, True])
def test_observers(asked, name, recorded):
    q = torch.randn(1, 4, 2, 8, requires_grad=recorded)
    with OBSERVERS[name]():
        flash_attn_func(q, q, q)
    assert len(asked) == (name == "none")


def test_a_compiler_observes(asked):
    q = torch.randn(1, 4, 2, 8)
    torch.compile(flash_attn_func, backend="aot_eager", fullgraph=True)(q, q, q)
    assert not asked


def test_a_transform_observes(asked):
    q = torch.randn(3, 1, 4, 2, 8)
    torch.vmap(flash_attn_func)(q, q, q)
    torch.func.functionalize(flash_attn_func)(*q)
    assert not asked


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
def test_a_tracer_observes(asked):
    q = torch.randn(1, 4, 2, 8)
    traced = torch.jit.trace(lambda q: flash_attn_func(q, q, q), q, check_trace=False)
    assert not asked
    assert "_flash_attn_forward" in str(traced.inlined_graph)


def test_all_arguments_by_position(asked):
    q = torch.randn(1, 4, 2, 8)
    sinks = torch.zeros(2)
    flash_attn_func(q, q, q, 0.0, 0.5, True, (3, 4), 5.0, s_aux=sinks, deterministic=True)
    rest = (None, False, sinks, None, False, True, False, False, 0)
    assert asked == [(q, q, q, 0.0, 0.5, True, 3, 4, 5.0, *rest)]


# --- Where there are none -------------------------------------------------------------------------


class Library:
    """Stands in for flash_attn._C."""

    def _flash_attn_forward(self, *args):
        return NotImplemented

    def use_torch(self, *args) -> None:
        pass

    def cuda_version(self) -> int:
        return 13000


@pytest.fixture
def registers(monkeypatch) -> Callable[[], bool]:
    """Whether the library's forward is called directly."""
    monkeypatch.setattr(direct, "_functions", {})
    monkeypatch.setattr(backend, "library", Library())
    monkeypatch.setattr(direct, "enabled", True)
    monkeypatch.setattr(torch.version, "cuda", "13.0")

    def register() -> bool:
        direct.register(ops.forward.default)
        return direct.is_on()

    return register


def test_the_library_s_function_is_called(registers):
    assert registers()
    assert direct._functions.keys() == {ops.forward, ops.forward.default}


def test_turned_off_none_is_called(registers, monkeypatch):
    assert registers()
    monkeypatch.setattr(direct, "enabled", False)
    assert not direct.is_on()
    assert direct.call(ops.forward, (), {}) is NotImplemented


@pytest.mark.parametrize("check", ["0", "1"])
def test_checks_of_contents_turn_it_off(check):
    program = "from flash_attn.dispatch import direct; print(direct.enabled)"
    said = run(sys.executable, "-c", program, FLASH_ATTN_CHECK=check).stdout
    assert said.split() == [str(check == "0")]


def test_of_another_cuda_there_are_none(registers, monkeypatch):
    """Python's checks refuse it, and a direct call would leave them out."""
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert not registers()


def raising(*args):
    raise TypeError("other arguments")


@pytest.mark.parametrize("to_handles", [None, raising, lambda tensors: [1], lambda tensors: []])
def test_with_other_handles_there_are_none(registers, monkeypatch, to_handles):
    monkeypatch.setattr(torch._C._aoti, "unsafe_alloc_void_ptrs_from_tensors", to_handles)
    assert not registers()


@pytest.mark.parametrize(
    "to_tensors", [None, raising, lambda handles: [], lambda handles: [torch.empty(0), None]]
)
def test_with_other_tensors_there_are_none(registers, monkeypatch, to_tensors):
    monkeypatch.setattr(torch._C._aoti, "alloc_tensors_by_stealing_from_void_ptrs", to_tensors)
    assert not registers()


def test_a_torch_without_that_interface_has_none(registers, monkeypatch):
    monkeypatch.delattr(torch._C, "_aoti")
    assert not registers()


# --- What the functions refuse --------------------------------------------------------------------


class Derived(Tensor):
    pass


def forward(device: str) -> tuple[Callable, list]:
    """The function, if there is one for this device's tensors, and arguments that it takes."""
    q = tokens(device, 1, 16)
    if not calls._on_gpu(q):
        pytest.skip("there are no kernels for the CPU backend to call")
    arguments = (q, q, q, 0.0, 0.125, True, -1, -1, 0.0, None, False)
    function, arrange = direct._functions[ops.forward]
    return function, list(arrange(arguments, {}))


@pytest.mark.parametrize(
    ("at", "make"),
    [
        (0, lambda x: x.as_subclass(Derived)),
        (0, lambda x: x.to("meta")),
        (2, lambda x: None),
        (4, lambda x: numpy.float32(x)),
        (5, lambda x: 1),
        (6, lambda x: numpy.int64(x)),
        (9, lambda x: 1.0),
    ],
)
def test_refused(device, at, make):
    function, arguments = forward(device)
    out, lse, probs, rng_state = function(*arguments)
    assert (out.shape, lse.shape, probs, rng_state) == (arguments[0].shape, (1, 2, 16), None, None)
    arguments[at] = make(arguments[at])
    assert function(*arguments) is NotImplemented
    assert function(*arguments[:-1]) is NotImplemented


def unwritten_zeros(like: Tensor) -> Tensor:
    return torch._efficientzerotensor(like.shape, dtype=like.dtype, device=like.device)


@pytest.mark.parametrize("make", [unwritten_zeros, torch._to_functional_tensor])
def test_refused_without_memory(device, make):
    """Whose address is 0. The dispatcher knows what they are."""
    function, arguments = forward(device)
    arguments[0] = make(arguments[0])
    assert function(*arguments) is NotImplemented


def test_a_freed_tensor_is_a_value_error(device):
    """As that of a parameter of FSDP between its uses."""
    function, arguments = forward(device)
    q, k, v = (x.clone() for x in arguments[:3])
    k.untyped_storage().resize_(0)
    assert function(q, k, v, *arguments[3:]) is NotImplemented
    with pytest.raises(ValueError, match=r"^flash_attn: k: it has no memory"):
        flash_attn_func(q, k, v)


def test_what_is_wrong_is_a_value_error(device):
    function, arguments = forward(device)
    arguments[1] = arguments[1][:, :, :, :32]
    with pytest.raises(ValueError, match=r"^flash_attn: refused: k\|shape\|"):
        function(*arguments)


def test_a_parameter_is_a_tensor(device):
    function, arguments = forward(device)
    expected = function(*arguments)[0]
    arguments[0] = torch.nn.Parameter(arguments[0])
    out = function(*arguments)[0]
    assert not out.requires_grad
    assert_bitwise("out", out, expected)


def test_nothing_is_kept(device):
    function, arguments = forward(device)
    q = arguments[0].clone()
    arguments[0] = q
    results = function(*arguments)
    kept = [weakref.ref(x) for x in (q, *results[:2])]
    del q, results, arguments
    gc.collect()
    assert [x() for x in kept] == [None] * 3


def test_threads(cuda):
    """The interpreter is free while the function runs. (One thread at a time has the emulation.)"""
    function, arguments = forward(cuda)
    expected, outs = function(*arguments)[0], []

    def run():
        outs.extend(function(*arguments)[0] for _ in range(8))

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(outs) == 32
    for out in outs:
        assert_bitwise("out", out, expected)
