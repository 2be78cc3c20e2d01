"""The public functions: signatures, what they return, how q, k and v may be packed, dispatches."""

from __future__ import annotations

import copy
import inspect
import pickle

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

import flash_attn
from flash_attn import flash_attn_interface
from flash_attn.call import Lengths
from flash_attn.dispatch.calls import resolved

REQUIRED = inspect.Parameter.empty
TAIL = {
    "dropout_p": 0.0,
    "softmax_scale": None,
    "causal": False,
    "window_size": (-1, -1),
    "softcap": 0.0,
    "alibi_slopes": None,
    "deterministic": False,
    "return_attn_probs": False,
}
OURS = {
    "s_aux": None,
    "batch_invariant": False,
    "return_lse": False,
    "return_softmax_lse": False,
    "return_max_logits": False,
}
DESCALES = {"k_descale": None, "v_descale": None}
OF_CODES = DESCALES | {"q_descale": None, "out_dtype": None, "fp8_products": False}
LENGTHS = ["cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"]


def required(*names: str) -> dict:
    return dict.fromkeys(names, REQUIRED)


# name: (positional parameters with their defaults, in order; keyword-only ones)
SIGNATURES = {
    "flash_attn_func": ({**required("q", "k", "v"), **TAIL}, OURS | OF_CODES),
    "flash_attn_qkvpacked_func": ({**required("qkv"), **TAIL}, OURS),
    "flash_attn_kvpacked_func": ({**required("q", "kv"), **TAIL}, OURS),
    "flash_attn_varlen_func": (
        {**required("q", "k", "v", *LENGTHS), **TAIL, "block_table": None},
        OURS | OF_CODES | {"qv": None},
    ),
    "flash_attn_varlen_qkvpacked_func": (
        {**required("qkv", "cu_seqlens", "max_seqlen"), **TAIL},
        OURS,
    ),
    "flash_attn_varlen_kvpacked_func": ({**required("q", "kv", *LENGTHS), **TAIL}, OURS),
    "flash_attn_with_kvcache": (
        {
            **required("q", "k_cache", "v_cache"),
            "k": None,
            "v": None,
            "rotary_cos": None,
            "rotary_sin": None,
            "cache_seqlens": None,
            "cache_batch_idx": None,
            "cache_leftpad": None,
            "block_table": None,
            "softmax_scale": None,
            "causal": False,
            "window_size": (-1, -1),
            "softcap": 0.0,
            "rotary_interleaved": True,
            "alibi_slopes": None,
            "num_splits": 0,
            "return_softmax_lse": False,
        },
        {"s_aux": None, "return_lse": False, **DESCALES, "qv": None},
    ),
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name):
    positional, keyword_only = SIGNATURES[name]
    function = getattr(flash_attn, name)
    assert function is getattr(flash_attn_interface, name)
    spec = inspect.getfullargspec(function)
    assert spec.varargs is None
    assert spec.varkw == "unknown"  # to say what was meant: test_keywords.py
    parameters = inspect.signature(function).parameters.values()
    plain = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert [(p.name, p.default) for p in plain] == list(positional.items())
    extra = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
    assert extra == keyword_only


@pytest.mark.parametrize("name", SIGNATURES)
def test_docstring_names_every_argument(name):
    document = inspect.getdoc(getattr(flash_attn, name))
    if "Arguments:" not in document:
        pytest.fail(f"{name} documents no arguments")
    if "The others" in document:  # those of the function it refers to
        assert ":func:`flash_attn" in document
        names = [n for n, default in SIGNATURES[name][0].items() if default is REQUIRED]
        names = [n for n in names if n not in LENGTHS]
    else:
        names = [*SIGNATURES[name][0], *SIGNATURES[name][1]]
    for argument in names:
        assert argument in document


# --- Results ----------------------------------------------------------------------------------


def qkv(device: str, *shape: int, heads_k: int | None = None, grad: bool = False) -> list[Tensor]:
    """q (*shape, 4, 32) and k, v (*shape, heads_k, 32), bf16."""
    heads = [4, heads_k or 4, heads_k or 4]
    return [
        torch.randn(*shape, h, 32, device=device, dtype=torch.bfloat16, requires_grad=grad)
        for h in heads
    ]


def cu(device: str, *ends: int) -> Tensor:
    return torch.tensor([0, *ends], dtype=torch.int32, device=device)


def test_dense_results(device):
    q, k, v = qkv(device, 2, 7, heads_k=2)
    out = flash_attn.flash_attn_func(q, k, v)
    assert isinstance(out, Tensor)
    assert out.shape == q.shape
    assert out.dtype == q.dtype
    assert out.is_contiguous()
    with_lse = flash_attn.flash_attn_func(q, k, v, return_lse=True)
    assert len(with_lse) == 2
    assert torch.equal(with_lse[0], out)
    lse = with_lse[1]
    assert lse.shape == (2, 4, 7)
    assert lse.dtype == torch.float32
    assert lse.is_contiguous()


def test_attention_probabilities_are_the_third_result(device, needs):
    q, k, v = qkv(device, 2, 7)
    with needs("attn_probs"):
        out, lse, probabilities = flash_attn.flash_attn_func(q, k, v, return_attn_probs=True)
        assert out.shape == q.shape
        assert lse.shape == (2, 4, 7)
        assert probabilities.shape == (2, 4, 7, 7)
        ones = torch.ones(2, 4, 7, device=device)
        torch.testing.assert_close(probabilities.float().sum(-1), ones, atol=0.02, rtol=0)


def test_varlen_results(device):
    q, k, v = qkv(device, 9, heads_k=2)
    ends = cu(device, 4, 9)
    out, lse = flash_attn.flash_attn_varlen_func(q, k, v, ends, ends, 5, 5, return_lse=True)
    assert out.shape == q.shape
    assert lse.shape == (4, 9)
    by_tensor = flash_attn.flash_attn_varlen_func(
        q, k, v, ends, ends, torch.tensor(5), torch.tensor(5)
    )
    assert torch.equal(by_tensor, out)


def test_max_seqlen_on_a_gpu_is_not_waited_for():
    with FakeTensorMode():  # a value that is read raises here
        q = torch.empty(30, 2, 8, device="cuda")
        pages = torch.empty(7, 16, 2, 8, device="cuda")
        table = torch.empty(3, 5, dtype=torch.int32, device="cuda")
        longest = torch.empty((), dtype=torch.int32, device="cuda")
        assert resolved(Lengths(None, None, longest, 11), q, q, None)[2:] == (30, 11)
        assert resolved(Lengths(None, None, 9, longest), q, pages, table)[2:] == (9, 80)


def test_cache_seqlens_as_int(device, needs):
    q, k, v = qkv(device, 2, 7)
    with needs("kvcache"):
        expected = flash_attn.flash_attn_with_kvcache(
            q, k, v, cache_seqlens=cu(device, 5)[1:].expand(2).contiguous()
        )
        out = flash_attn.flash_attn_with_kvcache(q, k, v, cache_seqlens=5)
        assert isinstance(out, Tensor)
        assert torch.equal(out, expected)
        out, lse = flash_attn.flash_attn_with_kvcache(
            q, k, v, cache_seqlens=5, return_softmax_lse=True
        )
        assert torch.equal(out, expected)
        assert lse.shape == (2, 4, 7)


def test_seeded_dropout_repeats(device, needs):
    q, k, v = qkv(device, 2, 40)
    with needs("dropout"):
        outs = []
        for seed in (1, 1, 2):
            torch.manual_seed(seed)
            outs.append(flash_attn.flash_attn_func(q, k, v, 0.5))
        assert torch.equal(outs[0], outs[1])
        assert not torch.equal(outs[0], outs[2])


def test_autocast_leaves_inputs_alone():
    q, k, v = (x.float() for x in qkv("cpu", 2, 7))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert flash_attn.flash_attn_func(q, k, v).dtype == torch.float32


def test_no_grad_and_inference_mode(device):
    q, k, v = qkv(device, 2, 7, grad=True)
    expected = flash_attn.flash_attn_func(q, k, v)
    assert expected.requires_grad
    with torch.no_grad():
        out = flash_attn.flash_attn_func(q, k, v)
    assert not out.requires_grad
    assert torch.equal(out, expected)
    with torch.inference_mode():
        out = flash_attn.flash_attn_func(q, k, v)
        assert out.is_inference()
        assert torch.equal(out, expected)


class Attention(torch.nn.Module):
    """A module that holds the function and its results, to be copied."""

    def __init__(self, device: str):
        super().__init__()
        self.attention = flash_attn.flash_attn_qkvpacked_func
        self.weight = torch.nn.Parameter(
            torch.randn(1, 5, 3, 2, 32, device=device, dtype=torch.bfloat16)
        )

    def forward(self) -> Tensor:
        return self.attention(self.weight, causal=True)


def test_modules_copy_and_pickle(device, needs):
    module = Attention(device)
    with needs("backward"):
        module().float().sum().backward()
        for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
            assert torch.equal(twin(), module())
            twin.zero_grad()
            twin().float().sum().backward()
            assert torch.equal(twin.weight.grad, module.weight.grad)


def test_gradients_have_no_second_derivative(device, needs):
    q, k, v = qkv(device, 1, 5, grad=True)
    out = flash_attn.flash_attn_func(q, k, v)
    with needs("backward"):
        (gradient,) = torch.autograd.grad(out.float().sum(), q, create_graph=True)
        loss = gradient.float().square().sum() + q.float().sum()
        with pytest.raises(RuntimeError, match="no second derivative"):
            loss.backward()


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
def test_forward_mode_raises(device, mode):
    """Rather than losing the tangents."""
    q, k, v = qkv(device, 1, 5)
    with mode(), forward_ad.dual_level():
        dual = forward_ad.make_dual(q, torch.ones_like(q))
        with pytest.raises(NotImplementedError, match="jvp"):
            flash_attn.flash_attn_func(dual, k, v)


def test_backward_twice(device, needs):
    packed = torch.randn(1, 5, 3, 2, 32, device=device, dtype=torch.bfloat16)
    packed.requires_grad_()
    loss = flash_attn.flash_attn_qkvpacked_func(packed).float().square().sum()
    with needs("backward"):
        loss.backward(retain_graph=True)
        once = packed.grad.clone()
        loss.backward()
        assert torch.equal(packed.grad, once * 2)


def test_a_gradient_without_rows(device, needs):
    """Reductions hand back one number, expanded to the shape of out with strides of 0."""
    q, k, v = qkv(device, 1, 5, grad=True)
    out = flash_attn.flash_attn_func(q, k, v)
    dout = torch.ones((), device=device, dtype=out.dtype).expand_as(out)
    with needs("backward"):
        expanded = torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
        dense = torch.autograd.grad(out, (q, k, v), dout.contiguous())
        for ours, expected in zip(expanded, dense):
            assert torch.equal(ours, expected)


def test_only_the_lse_is_differentiated(device, needs):
    q, k, v = qkv(device, 1, 5, grad=True)
    _, lse = flash_attn.flash_attn_func(q, k, v, return_lse=True)
    with needs("backward"):
        lse.sum().backward()
        scores = torch.einsum("bqhd,bkhd->bhqk", q.float(), k.float()) * 32**-0.5
        expected = torch.autograd.grad(scores.logsumexp(-1).sum(), (q, k))
        torch.testing.assert_close(q.grad, expected[0], atol=1e-2, rtol=1e-2)
        torch.testing.assert_close(k.grad, expected[1], atol=1e-2, rtol=1e-2)
        assert not v.grad.any()


def test_only_wanted_gradients(device, needs):
    for wanted in range(3):
        inputs = qkv(device, 1, 5)
        inputs[wanted].requires_grad_()
        with needs("backward"):
            flash_attn.flash_attn_func(*inputs).float().sum().backward()
            assert [x.grad is not None for x in inputs] == [i == wanted for i in range(3)]


# --- Packed -----------------------------------------------------------------------------------


PACKED = {
    "qkv": (3, lambda x, **kw: flash_attn.flash_attn_qkvpacked_func(x[0], **kw)),
    "kv": (2, lambda x, **kw: flash_attn.flash_attn_kvpacked_func(x[1], x[0], **kw)),
    "varlen qkv": (
        3,
        lambda x, **kw: flash_attn.flash_attn_varlen_qkvpacked_func(
            x[0].flatten(0, 1), cu(x[0].device.type, 6, 12), 6, **kw
        ).unflatten(0, (2, 6)),
    ),
    "varlen kv": (
        2,
        lambda x, **kw: flash_attn.flash_attn_varlen_kvpacked_func(
            x[1].flatten(0, 1), x[0].flatten(0, 1), *[cu(x[0].device.type, 6, 12)] * 2, 6, 6, **kw
        ).unflatten(0, (2, 6)),
    ),
}


def packed_inputs(device: str, n: int) -> list[Tensor]:
    """[packed (2, 6, n, 4, 32), q (2, 6, 4, 32)], leaves."""
    shapes = [(2, 6, n, 4, 32), (2, 6, 4, 32)]
    make = {"device": device, "dtype": torch.bfloat16, "requires_grad": True}
    return [torch.randn(shape, **make) for shape in shapes]


class Recorder(TorchDispatchMode):
    """Remembers the operations that are dispatched, and their arguments."""

    def __init__(self):
        super().__init__()
        self.calls: list[tuple[str, tuple]] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.calls.append((str(function), args))
        return function(*args, **(kwargs or {}))

    def names(self) -> list[str]:
        return [name for name, _ in self.calls]


@pytest.mark.parametrize("kind", PACKED)
def test_packed_matches_separate(device, needs, kind):
    n, call = PACKED[kind]
    inputs = packed_inputs(device, n)
    out = call(inputs, causal=True)
    separate = [x.detach().clone().requires_grad_() for x in inputs[0].unbind(2)]
    if n == 2:
        separate.insert(0, inputs[1].detach().clone().requires_grad_())
    expected = flash_attn.flash_attn_func(*separate, causal=True)
    torch.testing.assert_close(out, expected)
    with needs("backward"):
        dout = torch.randn_like(out)
        out.backward(dout)
        expected.backward(dout)
        torch.testing.assert_close(
            inputs[0].grad, torch.stack([x.grad for x in separate[-n:]], dim=2)
        )
        if n == 2:
            torch.testing.assert_close(inputs[1].grad, separate[0].grad)


@pytest.mark.parametrize("kind", PACKED)
def test_packed_gradient_is_the_buffer_that_was_written(device, needs, kind):
    n, call = PACKED[kind]
    inputs = packed_inputs(device, n)
    out = call(inputs)
    with needs("backward"):
        with Recorder() as recorder:
            out.backward(torch.ones_like(out))
        (arguments,) = [args for name, args in recorder.calls if "backward" in name]
        written = arguments[6:9][-n:]
        storage = inputs[0].grad.untyped_storage().data_ptr()
        assert [x.untyped_storage().data_ptr() for x in written] == [storage] * n
        assert inputs[0].grad.is_contiguous()
        assert not {"aten.stack.default", "aten.cat.default"} & set(recorder.names())


def test_packed_gradient_survives_a_hook(device, needs):
    """A hook that replaces one slice's gradient breaks the pattern; the result is stacked."""
    from flash_attn.api.qkv_packed import unpack

    packed, _ = packed_inputs(device, 3)
    q, k, v = unpack(packed)
    k.register_hook(lambda gradient: gradient * 2)
    with needs("backward"):
        flash_attn.flash_attn_func(q, k, v).float().sum().backward()
        plain = packed.detach().clone().requires_grad_()
        flash_attn.flash_attn_qkvpacked_func(plain).float().sum().backward()
        factor = torch.tensor([1.0, 2.0, 1.0], device=device).view(3, 1, 1)
        torch.testing.assert_close(packed.grad.float(), plain.grad.float() * factor)


# --- Dispatch ---------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_one_dispatch_per_forward(device, mode):
    q, k, v = qkv(device, 2, 6, heads_k=2)
    with mode(), Recorder() as recorder:
        flash_attn.flash_attn_func(q, k, v, causal=True)
    assert recorder.names() == ["flash_attn._flash_attn_forward.default"]


def test_one_dispatch_per_training_step(device, needs):
    q, k, v = qkv(device, 2, 6, heads_k=2, grad=True)
    with needs("backward"):
        with Recorder() as recorder:
            out = flash_attn.flash_attn_func(q, k, v, causal=True)
            out.backward(torch.ones_like(out))
        ours = [name for name in recorder.names() if name.startswith("flash_attn.")]
        assert ours == [
            "flash_attn._flash_attn_forward.default",
            "flash_attn._flash_attn_backward.default",
        ]


@pytest.mark.parametrize("deterministic", [False, True])
def test_deterministic_reaches_the_backward(device, needs, deterministic):
    q, k, v = qkv(device, 6, grad=True)
    ends = cu(device, 6)
    with needs("backward"):
        with Recorder() as recorder:
            outs = [
                flash_attn.flash_attn_func(q[None], k[None], v[None], deterministic=deterministic),
                flash_attn.flash_attn_varlen_func(
                    q, k, v, ends, ends, 6, 6, deterministic=deterministic
                ),
            ]
            for out in outs:
                out.backward(torch.ones_like(out))
        calls = {n: a for n, a in recorder.calls if n.startswith("flash_attn.") and "backward" in n}
        assert len(calls) == 2
        for name, arguments in calls.items():
            operation = getattr(torch.ops.flash_attn, name.split(".")[1]).default
            schema = [argument.name for argument in operation._schema.arguments]
            assert arguments[schema.index("deterministic")] is deterministic


def test_one_dispatch_per_varlen_and_cache_call(device, needs):
    q, k, v = qkv(device, 9)
    ends = cu(device, 4, 9)
    with Recorder() as recorder:
        flash_attn.flash_attn_varlen_func(q, k, v, ends, ends, 5, 5)
    assert recorder.names() == ["flash_attn._flash_attn_varlen_forward.default"]
    q, k, v = qkv(device, 2, 7)
    with needs("kvcache"):
        with Recorder() as recorder:
            flash_attn.flash_attn_with_kvcache(q, k, v, causal=True)
        assert recorder.names() == ["flash_attn._flash_attn_with_kvcache.default"]
