"""RMSNorm and LayerNorm with their surroundings, against the plain formulas in float64."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from flash_attn.ops import layer_norm as layer_norm_module
from flash_attn.ops import rms_norm as rms_norm_module
from flash_attn.ops.triton.layer_norm import (
    RMSNorm,
    layer_norm_fn,
    layer_norm_linear_fn,
    layer_norm_ref,
    rms_norm_fn,
)

ROWS, HIDDEN, EPS = (2, 5), 24, 1e-4
HALF = torch.bfloat16


def tensor(*shape, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype).requires_grad_()


def plain_norm(z, weight, bias, is_rms):
    if not is_rms:
        z = z - z.mean(-1, keepdim=True)
    y = z / (z.square().mean(-1, keepdim=True) + EPS).sqrt() * weight
    return y if bias is None else y + bias


def check_gradients(outputs, expected, inputs):
    """Both have the same values and the same gradients for the same random output gradients."""
    douts = [torch.randn_like(t) for t in expected]
    for got, want in zip(outputs, expected, strict=True):
        torch.testing.assert_close(got, want)
    got = torch.autograd.grad(outputs, inputs, douts)
    want = torch.autograd.grad(expected, inputs, douts)
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w)


@pytest.mark.parametrize("is_rms", [True, False])
@pytest.mark.parametrize(
    ("with_residual", "with_x1", "with_rowscale", "with_weight1"),
    [c for c in itertools.product([False, True], repeat=4) if not (c[1] and c[2])],
)
def test_formula_and_gradients(is_rms, with_residual, with_x1, with_rowscale, with_weight1):
    torch.manual_seed(0)
    x, residual, x1 = (tensor(*ROWS, HIDDEN) for _ in range(3))
    weight, bias, weight1, bias1 = (tensor(HIDDEN) for _ in range(4))
    rowscale = tensor(*ROWS)
    z, inputs, options = x, [x, weight, bias], {}
    if with_rowscale:
        z, options["rowscale"] = z * rowscale[..., None], rowscale
        inputs.append(rowscale)
    if with_x1:
        z, options["x1"] = z + x1, x1
        inputs.append(x1)
    if with_residual:
        z, options["residual"] = z + residual, residual
        inputs.append(residual)
    expected = [plain_norm(z, weight, bias, is_rms)]
    if with_weight1:
        options |= {"weight1": weight1, "bias1": bias1}
        inputs += [weight1, bias1]
        expected.append(plain_norm(z, weight1, bias1, is_rms))
    fn = rms_norm_fn if is_rms else layer_norm_fn
    outputs = fn(x, weight, bias, eps=EPS, prenorm=True, **options)
    check_gradients(outputs, [*expected, z], inputs)


@pytest.mark.parametrize("is_rms", [True, False])
def test_zero_centered_weight(is_rms):
    x, weight = tensor(*ROWS, HIDDEN), tensor(HIDDEN)
    out = layer_norm_fn(x, weight, None, eps=EPS, zero_centered_weight=True, is_rms_norm=is_rms)
    check_gradients([out], [plain_norm(x, weight + 1, None, is_rms)], [x, weight])


@pytest.mark.parametrize("fn", [rms_norm_fn, layer_norm_fn])
def test_dropout_masks(fn):
    p = 0.3
    x, x1, residual = (tensor(4, 500) for _ in range(3))
    weight = tensor(500)
    y, z, mask, mask1 = fn(
        x, weight, None, residual, x1, dropout_p=p, prenorm=True, eps=EPS, return_dropout_mask=True
    )
    expected_z = x * mask / (1 - p) + x1 * mask1 / (1 - p) + residual
    expected = plain_norm(expected_z, weight, None, fn is rms_norm_fn)
    check_gradients([y, z], [expected, expected_z], [x, x1, residual, weight])
    assert abs(mask.double().mean() - (1 - p)) < 0.05
    assert not torch.equal(mask, mask1)
    *_, no_mask, no_mask1 = fn(x, weight, None, return_dropout_mask=True)
    assert no_mask is None
    assert no_mask1 is None


@pytest.mark.parametrize("return_mask", [False, True])
def test_everything_dropped(return_mask):
    x, residual, weight = tensor(4, HIDDEN), tensor(4, HIDDEN), tensor(HIDDEN)
    with torch.no_grad():
        x[0, 0] = float("inf") if return_mask else 0.0  # torch's own dropout multiplies
    y, z, *masks = rms_norm_fn(
        x, weight, None, residual, dropout_p=1.0, prenorm=True, eps=EPS,
        return_dropout_mask=return_mask,
    )  # fmt: skip
    assert not return_mask or not masks[0].any()
    expected = [plain_norm(residual, weight, None, True), residual]
    (dx,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
    assert (dx == 0).all()
    check_gradients([y, z], expected, [residual, weight])


@pytest.mark.parametrize("residual_dtype", [None, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("residual_in_fp32", [False, True])
def test_dtypes_and_single_rounding(residual_dtype, residual_in_fp32):
    x = torch.randn(8, HIDDEN).bfloat16()
    weight = torch.randn(HIDDEN)
    residual = None if residual_dtype is None else torch.randn(8, HIDDEN, dtype=residual_dtype)
    y, z = rms_norm_fn(
        x, weight, None, residual, eps=EPS, prenorm=True, residual_in_fp32=residual_in_fp32
    )
    assert y.dtype == torch.bfloat16
    default = torch.float32 if residual_in_fp32 else torch.bfloat16
    assert z.dtype == (residual_dtype or default)
    exact = x.double() if residual is None else x.double() + residual.double()
    expected = plain_norm(exact, weight.double(), None, True).bfloat16()
    torch.testing.assert_close(y, expected, rtol=2**-8, atol=1e-6)


def test_out_dtype_and_preallocated_outputs():
    x, residual = torch.randn(3, HIDDEN).bfloat16(), torch.randn(3, HIDDEN)
    weight = torch.ones(HIDDEN)
    assert rms_norm_fn(x, weight, None, out_dtype=torch.float32).dtype == torch.float32
    out, residual_out = torch.empty(3, HIDDEN), torch.empty(3, HIDDEN)
    y, z = rms_norm_fn(x, weight, None, residual, prenorm=True, out=out, residual_out=residual_out)
    assert y is out
    assert z is residual_out
    torch.testing.assert_close(residual_out, x.float() + residual)
    alone = torch.empty(3, HIDDEN)
    y = rms_norm_fn(x, weight, None, residual, residual_out=alone)
    assert torch.equal(y.float(), out.bfloat16().float())
    assert torch.equal(alone, residual_out)


@pytest.mark.parametrize("prenorm", [False, True])
def test_norm_then_linear(prenorm):
    x, residual = tensor(*ROWS, HIDDEN), tensor(*ROWS, HIDDEN)
    norm_weight, norm_bias, linear_bias = tensor(HIDDEN), tensor(HIDDEN), tensor(7)
    linear_weight = tensor(7, HIDDEN)
    inputs = [x, residual, norm_weight, norm_bias, linear_weight, linear_bias]
    out = layer_norm_linear_fn(
        x, norm_weight, norm_bias, linear_weight, linear_bias, residual, EPS, prenorm
    )
    z = x + residual
    expected = F.linear(plain_norm(z, norm_weight, norm_bias, False), linear_weight, linear_bias)
    check_gradients(out if prenorm else [out], [expected, z] if prenorm else [expected], inputs)


@pytest.mark.parametrize("is_rms", [True, False])
def test_dropout_add_norm(is_rms):
    module = rms_norm_module if is_rms else layer_norm_module
    fn = module.dropout_add_rms_norm if is_rms else module.dropout_add_layer_norm
    x, residual, weight, bias = tensor(4, HIDDEN), tensor(4, HIDDEN), tensor(HIDDEN), tensor(HIDDEN)
    rowscale, layerscale = tensor(4), tensor(HIDDEN)
    y, z, mask = fn(
        x, residual, weight, bias, 0.5, EPS, rowscale, layerscale, prenorm=True,
        return_dropout_mask=True,
    )  # fmt: skip
    expected_z = x * rowscale[:, None] * layerscale * mask / 0.5 + residual
    expected = plain_norm(expected_z, weight, bias, is_rms)
    check_gradients(
        [y, z], [expected, expected_z], [x, residual, weight, bias, rowscale, layerscale]
    )


@pytest.mark.parametrize("is_rms", [True, False])
def test_parallel_residual(is_rms):
    module = rms_norm_module if is_rms else layer_norm_module
    kind = "rms" if is_rms else "layer"
    fn = getattr(module, f"dropout_add_{kind}_norm_parallel_residual")
    x0, x1, residual = (tensor(4, HIDDEN) for _ in range(3))
    w0, b0, w1, b1 = (tensor(HIDDEN) for _ in range(4))
    z = x0 + x1 + residual
    outputs = fn(x0, x1, residual, w0, b0, w1, b1, 0.0, EPS, prenorm=True)
    expected = [plain_norm(z, w0, b0, is_rms), plain_norm(z, w1, b1, is_rms), z]
    check_gradients(outputs, expected, [x0, x1, residual, w0, b0, w1, b1])
    assert fn(x0, None, None, w0, b0, None, None, 0.0, EPS)[1] is None


def test_modules():
    x, residual = torch.randn(3, HIDDEN), torch.randn(3, HIDDEN)
    expected = F.rms_norm(x + residual, (HIDDEN,), eps=1e-5)
    y, z = RMSNorm(HIDDEN)(x, residual, prenorm=True)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(z, x + residual)
    torch.testing.assert_close(RMSNorm(HIDDEN, zero_centered_weight=True)(x, residual), expected)
    torch.testing.assert_close(rms_norm_module.DropoutAddRMSNorm(HIDDEN)(x, residual), expected)
    torch.testing.assert_close(
        rms_norm_module.RMSNorm(HIDDEN)(x), F.rms_norm(x, (HIDDEN,), eps=1e-5)
    )
    dropping = RMSNorm(HIDDEN, dropout_p=0.5)
    assert not torch.equal(dropping(x), F.rms_norm(x, (HIDDEN,), eps=1e-5))
    torch.testing.assert_close(dropping.eval()(x), F.rms_norm(x, (HIDDEN,), eps=1e-5))
    layer = layer_norm_module.DropoutAddLayerNorm(HIDDEN, prenorm=True)
    torch.testing.assert_close(layer(x, residual)[0], F.layer_norm(x + residual, (HIDDEN,)))


def test_half_precision_with_a_float32_weight(recwarn):
    x, weight = torch.randn(*ROWS, HIDDEN, dtype=torch.bfloat16), torch.rand(HIDDEN)
    out = rms_norm_module.rms_norm(x, weight, EPS)
    assert out.dtype == torch.bfloat16
    expected = plain_norm(x.double(), weight.double(), None, is_rms=True)
    torch.testing.assert_close(out.double(), expected, rtol=2**-8, atol=0)
    assert not recwarn.list  # torch's own has no fused way and says so


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """torch's norm of a GPU wants one dtype; that of a CPU takes wider parameters, too."""
    on_cpu = F.layer_norm

    def layer_norm(x, shape, weight, bias, eps):
        assert {t.dtype for t in (x, weight, bias) if t is not None} == {x.dtype}
        return on_cpu(x, shape, weight, bias, eps)

    monkeypatch.setattr(F, "layer_norm", layer_norm)


@pytest.mark.parametrize("dtypes", [(HALF, torch.float32), (torch.float32, HALF), (HALF, HALF)])
@pytest.mark.parametrize("bias_dtype", [None, HALF, torch.float32])
def test_layer_norm_of_any_dtypes(as_on_a_gpu, dtypes, bias_dtype):
    x, weight = (torch.randn(*shape).to(t) for shape, t in zip(((4, HIDDEN), (HIDDEN,)), dtypes))
    bias = None if bias_dtype is None else torch.randn(HIDDEN).to(bias_dtype)
    out = layer_norm_module.layer_norm(x, weight, bias, EPS)
    assert out.dtype == x.dtype
    wide = None if bias is None else bias.double()
    expected = plain_norm(x.double(), weight.double(), wide, is_rms=False)
    atol = 1e-6 if x.dtype == HALF else 1e-5
    torch.testing.assert_close(out.double(), expected, rtol=2**-8, atol=atol)


def test_layer_norm_of_two_dtypes_on_a_gpu(cuda):
    x, weight = torch.randn(4, HIDDEN, dtype=HALF, device=cuda), torch.ones(HIDDEN, device=cuda)
    out = layer_norm_module.layer_norm(x, weight, None, EPS)
    torch.testing.assert_close(out, F.layer_norm(x, (HIDDEN,), eps=EPS))


def test_zero_centered_weights_keep_their_bits():
    """In 16 bits 1 + weight would be 1 for most of them."""
    x, weight = torch.randn(4, HIDDEN).to(HALF), (1e-3 * torch.randn(HIDDEN)).to(HALF)
    out = rms_norm_fn(x, weight, None, eps=EPS, zero_centered_weight=True)
    expected = plain_norm(x.double(), 1 + weight.double(), None, is_rms=True)
    assert torch.equal(out, expected.to(HALF))


@pytest.mark.parametrize("is_rms", [True, False])
def test_factors_of_flattened_rows(is_rms):
    x, weight = torch.randn(*ROWS, HIDDEN), torch.ones(HIDDEN)
    rows = torch.rand(ROWS)
    for function in (layer_norm_fn, layer_norm_ref):
        expected = function(x, weight, None, rowscale=rows, is_rms_norm=is_rms)
        got = function(x, weight, None, rowscale=rows.flatten(), is_rms_norm=is_rms)
        assert torch.equal(got, expected)
    fn = (
        rms_norm_module.dropout_add_rms_norm if is_rms else layer_norm_module.dropout_add_layer_norm
    )
    assert torch.equal(
        fn(x, None, weight, None, 0.0, EPS, rowscale=rows.flatten()),
        fn(x, None, weight, None, 0.0, EPS, rowscale=rows),
    )


@pytest.mark.parametrize(
    "module",
    [
        lambda **where: layer_norm_module.DropoutAddLayerNorm(HIDDEN, **where),
        lambda **where: rms_norm_module.DropoutAddRMSNorm(HIDDEN, **where),
        lambda **where: rms_norm_module.RMSNorm(HIDDEN, **where),
        lambda **where: RMSNorm(HIDDEN, zero_centered_weight=True, **where),
    ],
)
def test_initialisation_on_the_meta_device(module):
    """As FSDP does it: memory first, and then what it is filled with."""
    expected, later = module(), module(device="meta").to_empty(device="cpu")
    for parameter in later.parameters():
        torch.nn.init.constant_(parameter, torch.nan)
    later.reset_parameters()
    for name, parameter in expected.named_parameters():
        assert torch.equal(later.get_parameter(name), parameter)


def test_bad_input():
    x, weight = torch.randn(2, 3, HIDDEN), torch.ones(HIDDEN)
    with pytest.raises(ValueError, match="weight: got shape"):
        rms_norm_fn(x, torch.ones(HIDDEN + 1), None)
    for p in (-0.1, 1.5):
        with pytest.raises(ValueError, match=f"dropout_p: got {p}; 0 to 1 is needed"):
            rms_norm_fn(x, weight, None, dropout_p=p, return_dropout_mask=True)
    for shape in ((2,), (3, 2), (2, 3, 1)):
        with pytest.raises(ValueError, match=r"rowscale: got shape .* \(2, 3\) or \(6,\)"):
            rms_norm_fn(x, weight, None, rowscale=torch.ones(shape))
    with pytest.raises(ValueError, match="rowscale with x1"):
        rms_norm_fn(x, weight, None, x1=x, rowscale=torch.ones(2, 3))
