"""Feed-forward layers, activations and linears against torch's own formulas and gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from flash_attn.modules.mlp import FusedMLP, GatedMlp, Mlp
from flash_attn.ops import activations, fused_dense
from flash_attn.ops.triton.mlp import FusedDenseSqreluDense, fused_dense_sqrelu_dense_function


def test_mlp():
    mlp = Mlp(8, return_residual=True)
    assert mlp.fc1.out_features == 32
    assert mlp.fc2.out_features == 8
    x = torch.randn(3, 8)
    out, same = mlp(x)
    assert same is x
    torch.testing.assert_close(out, mlp.fc2(F.gelu(mlp.fc1(x))))
    other = Mlp(8, 5, 3, activation=F.relu, bias1=False, bias2=False, dtype=torch.float64)
    assert {n: tuple(p.shape) for n, p in other.named_parameters()} == {
        "fc1.weight": (5, 8),
        "fc2.weight": (3, 5),
    }
    assert other(x.double()).dtype == torch.float64


@pytest.mark.parametrize("activation", [F.sigmoid, F.silu, F.gelu])
def test_gated_mlp(activation):
    mlp = GatedMlp(12, activation=activation, multiple_of=10).double()
    assert mlp.fc1.out_features == 2 * 40  # 8 / 3 · 12 = 32, rounded up
    x = torch.randn(2, 5, 12, dtype=torch.float64, requires_grad=True)
    y, gate = mlp.fc1(x).split(40, dim=-1)
    expected = mlp.fc2(y * activation(gate))
    out = mlp(x)
    torch.testing.assert_close(out, expected)
    dout = torch.randn_like(out)
    ours, theirs = (torch.autograd.grad(o, [x, *mlp.parameters()], dout) for o in (out, expected))
    for a, b in zip(ours, theirs):
        torch.testing.assert_close(a, b)


DERIVATIVES = {
    "gelu": (activations.gelu_fwd, activations.gelu_bwd),
    "relu": (F.relu, activations.relu_bwd),
    "sqrelu": (activations.sqrelu_fwd, activations.sqrelu_bwd),
}


@pytest.mark.parametrize("name", DERIVATIVES)
def test_derivatives(name):
    forward, backward = DERIVATIVES[name]
    x = torch.randn(50, dtype=torch.float64, requires_grad=True)
    g = torch.randn_like(x)
    (expected,) = torch.autograd.grad(forward(x), x, g)
    torch.testing.assert_close(backward(g, x.detach()), expected)


def test_gelu_with_a_bias():
    y, bias = torch.randn(2, 4, 6, requires_grad=True), torch.randn(6, requires_grad=True)
    expected = F.gelu(y + bias, approximate="tanh")
    g = torch.randn_like(y)
    gradients = torch.autograd.grad(expected, (y, bias), g)
    for function in (activations.bias_gelu, activations.bias_gelu_impl):
        out = function(y, bias)
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(torch.autograd.grad(out, (y, bias), g), gradients)
    torch.testing.assert_close(activations.fast_gelu_impl(y + bias), expected)
    # Both gradients, as in the 2.8 package, and for backward passes of the caller's own: the one of
    # y alone, of two rows, would unpack into what looks like both.
    y, bias = y.detach()[0, :2], bias.detach()
    grad_y, grad_bias = activations.bias_gelu_back(g[0, :2], y, bias)
    torch.testing.assert_close(grad_y, activations.gelu_bwd(g[0, :2], y + bias))
    torch.testing.assert_close(grad_bias, grad_y.sum(0))


def test_gelu_with_a_bias_rounds_once_to_the_dtype_of_each_argument():
    y, g = (torch.randn(64, 64).bfloat16() for _ in "yg")
    bias = torch.randn(64)
    wide = activations.gelu_fwd(y.float() + bias)
    assert torch.equal(activations.bias_gelu(y, bias), wide.bfloat16())
    exact_y, exact_bias = activations.bias_gelu_back(g.double(), y.double(), bias.double())
    grad_y, grad_bias = activations.bias_gelu_back(g, y, bias)
    assert (grad_y.dtype, grad_bias.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(grad_y.double(), exact_y, rtol=2**-8, atol=1e-6)
    torch.testing.assert_close(grad_bias.double(), exact_bias, rtol=1e-5, atol=1e-5)
    assert activations.gelu_bwd(g.float(), y).dtype == torch.bfloat16


def test_squared_relu():
    x = torch.tensor([-2.0, 0.0, 3.0])
    assert activations.sqrelu_fwd(x).tolist() == [0.0, 0.0, 9.0]


def test_swiglu():
    x, y = (torch.randn(3, 4, dtype=torch.float64, requires_grad=True) for _ in "xy")
    torch.testing.assert_close(activations.swiglu(x, y), F.silu(x) * y)
    torch.autograd.gradcheck(activations.swiglu, (x, y))


def test_swiglu_rounds_once():
    x, y = (torch.randn(4096).bfloat16() for _ in "xy")
    exact = (F.silu(x.double()) * y.double()).bfloat16()
    assert torch.equal(activations.swiglu(x, y), exact)


@pytest.mark.parametrize("activation", fused_dense.ACTIVATIONS)
@pytest.mark.parametrize("checkpoint_lvl", [0, 1])
def test_fused_mlp(activation, checkpoint_lvl):
    torch.manual_seed(0)
    mlp = FusedMLP(
        6, 10, 4, activation=activation, checkpoint_lvl=checkpoint_lvl, return_residual=True
    )
    x = torch.randn(2, 6, requires_grad=True)
    out, same = mlp(x)
    assert same is x
    hidden = mlp.fc1(x)
    wanted = {
        "gelu_approx": lambda: F.gelu(hidden, approximate="tanh"),
        "relu": lambda: F.relu(hidden),
        "sqrelu": lambda: F.relu(hidden) ** 2,
    }[activation]()
    expected = mlp.fc2(wanted)
    torch.testing.assert_close(out, expected)
    ours, theirs = (torch.autograd.grad(o.sum(), [x, *mlp.parameters()]) for o in (out, expected))
    for a, b in zip(ours, theirs):
        torch.testing.assert_close(a, b)


def test_checkpointing_keeps_nothing_in_between():
    def keeps(level: int) -> bool:
        sizes = []

        def pack(x):
            sizes.append(x.numel())
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            FusedMLP(4, 512, checkpoint_lvl=level)(torch.randn(64, 4, requires_grad=True))
        return 64 * 512 in sizes

    assert keeps(0)
    assert not keeps(1)


def test_unknown_activation():
    for make in (FusedMLP, lambda *args, **kw: fused_dense.ParallelFusedMLP(*args, **kw)):
        with pytest.raises(ValueError, match="activation: got 'tanh'; accepted are gelu_approx"):
            make(4, activation="tanh")


def test_dense():
    layer = fused_dense.FusedDense(4, 3, return_residual=True)
    x = torch.randn(2, 4)
    out, same = layer(x)
    torch.testing.assert_close(out, F.linear(x, layer.weight, layer.bias))
    assert same is x
    torch.testing.assert_close(fused_dense.fused_dense_func(x, layer.weight), x @ layer.weight.t())


def test_squared_relu_layer():
    layer = FusedDenseSqreluDense(4, 6)
    x = torch.randn(2, 4)
    expected = layer.fc2(F.relu(layer.fc1(x)) ** 2)
    torch.testing.assert_close(layer(x), expected)
    fc1, fc2 = layer.fc1, layer.fc2
    ours = fused_dense_sqrelu_dense_function(x, fc1.weight, fc1.bias, fc2.weight, fc2.bias)
    torch.testing.assert_close(ours, expected)
