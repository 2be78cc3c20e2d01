"""What autograd makes of a call: no second derivative unnoticed, nothing lost under torch.vmap."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad, functional
from torch.utils.checkpoint import checkpoint

import flash_attn
from flash_attn import flash_attn_interface

OPS = torch.ops.flash_attn
FIXED = (0.3, True, -1, -1, 0.0, None)  # scale, causal, window, softcap, alibi
NO_SECOND = "flash_attn has no second derivative"

# Each takes x (2, 6, 32), fp32, and returns the shape of x.
CALLS = {
    "dense": lambda x: attend(x, flash_attn.flash_attn_func),
    "varlen": lambda x: attend(x.flatten(0, 1), varlen(x.device)).view_as(x),
    "qkvpacked": lambda x: packed(x, 3, flash_attn.flash_attn_qkvpacked_func),
    "kvpacked": lambda x: packed(x, 2, partial(flash_attn.flash_attn_kvpacked_func, heads(x))),
    "sinks": lambda x: attend(x, partial(flash_attn.flash_attn_func, s_aux=x.mean((0, 1))[:2])),
    "lse": lambda x: x * flash_attn.flash_attn_func(*qkv(x), return_lse=True)[1].sum(),
}
CHECKPOINTED = {"checkpointed": lambda x: checkpoint(CALLS["dense"], x, use_reentrant=False)}


def heads(x: Tensor) -> Tensor:
    return x.bfloat16().unflatten(-1, (2, 16))


def qkv(x: Tensor) -> list[Tensor]:
    return [heads(x) for _ in "qkv"]


def attend(x: Tensor, function) -> Tensor:
    return function(*qkv(x)).flatten(-2).float()


def packed(x: Tensor, n: int, function) -> Tensor:
    return function(torch.stack(qkv(x)[:n], dim=-3)).flatten(-2).float()


def varlen(device: torch.device):
    ends = torch.tensor([0, 5, 12], dtype=torch.int32, device=device)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash_attn.flash_attn_varlen_func(q, k, v, ends, ends, 7, 7)

    return call


def example(device: str, *shape: int) -> Tensor:
    return torch.randn(*shape, device=device)


# --- Second derivatives -----------------------------------------------------------------------


@pytest.mark.parametrize("call", CALLS | CHECKPOINTED)
def test_a_second_derivative_raises_beside_another_path(device, needs, call):
    """As in a residual block: what leads elsewhere too must not carry the rest along in silence."""
    x, weight = example(device, 2, 6, 32), example(device, 32, 32).requires_grad_()
    with needs("backward", "sinks"):
        y = x @ weight
        loss = (y + (CALLS | CHECKPOINTED)[call](y)).square().sum()
        (gradient,) = torch.autograd.grad(loss, weight, create_graph=True)
        with pytest.raises(RuntimeError, match=NO_SECOND):
            torch.autograd.grad(gradient.sum(), weight)


@pytest.mark.parametrize("product", [functional.hvp, functional.vhp])
def test_products_with_the_hessian_raise(device, needs, product):
    x = example(device, 2, 6, 32)
    with needs("backward"), pytest.raises(RuntimeError, match=NO_SECOND):
        product(lambda y: (y + CALLS["dense"](y)).square().sum(), x, x)


@pytest.mark.parametrize("wanted", ["q", "k", "v", "dout"])
def test_a_gradient_depends_on_every_input(device, needs, wanted):
    """dq too depends on k, v and the gradient of the output."""
    x = {name: heads(example(device, 2, 6, 32)) for name in ("q", "k", "v", "dout")}
    for tensor in (x["q"], x[wanted]):
        tensor.requires_grad_()
    with needs("backward"):
        out = flash_attn.flash_attn_func(x["q"], x["k"], x["v"])
        (dq,) = torch.autograd.grad(out, x["q"], x["dout"], create_graph=True)
        with pytest.raises(RuntimeError, match=NO_SECOND):
            torch.autograd.grad(dq.float().sum() + x[wanted].float().sum(), x[wanted])


def test_create_graph_alone_does_not_raise(device, needs):
    """Nor does a derivative of something that only multiplies the gradient."""
    q = heads(example(device, 2, 6, 32)).requires_grad_()
    factor = torch.ones(16, device=device, requires_grad=True)
    with needs("backward"):
        out = flash_attn.flash_attn_func(q, q, q)
        (plain,) = torch.autograd.grad(out.float().sum(), q, retain_graph=True)
        (gradient,) = torch.autograd.grad(out.float().sum(), q, create_graph=True)
        assert torch.equal(gradient, plain)
        (dfactor,) = torch.autograd.grad((gradient * factor).sum(), factor)
        torch.testing.assert_close(dfactor, plain.float().sum((0, 1, 2)))


# --- torch.vmap -------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
@pytest.mark.parametrize("call", CALLS)
def test_vmap_keeps_the_gradient(device, needs, call):
    x = example(device, 3, 2, 6, 32).requires_grad_()

    def block(y: Tensor) -> Tensor:
        return y + CALLS[call](y)

    with needs("backward", "sinks"):
        out, expected = torch.vmap(block)(x), torch.stack([block(part) for part in x])
        torch.testing.assert_close(out, expected)
        dout = torch.randn_like(out)
        ours, theirs = (torch.autograd.grad(result, x, dout)[0] for result in (out, expected))
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.jacrev])
def test_gradients_inside_transforms_raise(device, transform):
    """Rather than being lost."""
    x = example(device, 3, 2, 6, 32)

    def loss(y: Tensor) -> Tensor:
        return CALLS["dense"](y).square().sum()

    for function, argument in (
        (transform(loss), x[0]),
        (torch.vmap(transform(loss)), x),
        (transform(lambda y: torch.vmap(loss)(y).sum()), x),
    ):
        with pytest.raises(RuntimeError, match=r"no torch\.func\.grad.* torch\.autograd\.grad"):
            function(argument)


@pytest.mark.parametrize("transform", [torch.func.jacfwd, torch.func.hessian])
def test_forward_mode_inside_transforms_raises(device, transform):
    x = example(device, 2, 6, 32)
    with pytest.raises(RuntimeError, match="no forward-mode derivative"):
        transform(lambda y: CALLS["dense"](y).square().sum())(x)


def test_jvp_raises(device):
    """Rather than being lost: an operation without a rule returns a tensor without tangent."""
    x = example(device, 2, 6, 32)
    with pytest.raises(RuntimeError, match="no forward-mode derivative"):
        torch.func.jvp(CALLS["dense"], (x,), (x,))
    with forward_ad.dual_level():
        with pytest.raises(RuntimeError, match="no forward-mode derivative"):
            CALLS["dense"](forward_ad.make_dual(x, x))
        torch.testing.assert_close(CALLS["dense"](x), CALLS["dense"](x.clone()))


def test_a_tensor_that_outlives_a_transform(device, needs):
    """torch.func wraps tensors; one that escapes is as good as what is in it."""
    q, k = (
        torch.randn(1, 8, 2, 32, dtype=torch.bfloat16, device=device, requires_grad=True)
        for _ in range(2)
    )
    escaped = []

    def leak(x):
        escaped.append(x)
        return x.square().sum()

    torch.func.grad(leak)(q)
    with needs("backward"):
        for got, expected in zip(
            torch.autograd.grad(flash_attn.flash_attn_func(escaped[0], k, k).sum(), (q, k)),
            torch.autograd.grad(flash_attn.flash_attn_func(q, k, k).sum(), (q, k)),
        ):
            assert torch.equal(got, expected)


def test_functional_call_is_a_call(device, needs):
    class Attention(torch.nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return CALLS["dense"](super().forward(x))

    module, x = Attention(32, 32, device=device), example(device, 2, 6, 32)
    weights = {name: torch.zeros_like(p) for name, p in module.named_parameters()}
    with needs("backward"):
        assert module(x).any()
        assert not torch.func.functional_call(module, weights, (x,)).any()


# --- Operations that write gradients are not recorded -------------------------------------------


@pytest.mark.parametrize("varlen", [False, True])
@pytest.mark.parametrize("raw", [False, True])
def test_backward_leaves_no_graph(device, needs, varlen, raw):
    q = example(device, 12, 2, 16).bfloat16().requires_grad_()
    ends = torch.tensor([0, 5, 12], dtype=torch.int32, device=device)
    name = "_flash_attn_varlen_backward" if varlen else "_flash_attn_backward"
    lengths = (ends, ends, 7, 7) if varlen else ()
    with needs("backward"):
        if varlen:
            out, lse = flash_attn.flash_attn_varlen_func(q, q, q, *lengths, return_lse=True)
        else:
            q = q.view(2, 6, 2, 16)
            out, lse = flash_attn.flash_attn_func(q, q, q, return_lse=True)
        buffers = [torch.empty_like(x, requires_grad=False) for x in (q, q, q)]
        backward = getattr(OPS if raw else flash_attn_interface, name)
        softmax_d = backward(out, q, q, q, out, lse, *buffers, *lengths, 0.0, *FIXED, False)
        for written in (softmax_d, *buffers):
            assert not written.requires_grad
            assert written.grad_fn is None
