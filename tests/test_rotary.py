"""Rotary embedding: the formula in float64 by loops, the gradient, and every way to call it."""

import pytest
import torch

from flash_attn.layers.rotary import (
    RotaryEmbedding,
    apply_rotary_emb,
    apply_rotary_emb_kv_,
    apply_rotary_emb_qk,
    apply_rotary_emb_qkv_,
    apply_rotary_emb_torch,
)
from flash_attn.ops.triton.rotary import apply_rotary


def angle_tables(positions=32, rotary_dim=16, dtype=torch.float64):
    theta = 100.0 ** (-torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim)
    angles = torch.outer(torch.arange(positions, dtype=torch.float64), theta)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate_by_complex_numbers(x, cos, sin, interleaved, positions):
    """x (b, s, h, d), positions (b, s) -> (b, s, h, d), all float64."""
    half = cos.shape[1]
    pairs = [(2 * i, 2 * i + 1) if interleaved else (i, half + i) for i in range(half)]
    turn = torch.complex(cos.double(), sin.double())[positions][:, :, None]  # (b, s, 1, half)
    out = x.double().clone()
    for i, (a, b) in enumerate(pairs):
        z = torch.complex(x[..., a].double(), x[..., b].double()) * turn[..., i]
        out[..., a], out[..., b] = z.real, z.imag
    return out


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [16, 24])
@pytest.mark.parametrize("offsets", [0, 5, torch.tensor([0, 7], dtype=torch.int32)])
@pytest.mark.parametrize("inplace", [False, True])
def test_formula_and_gradient(interleaved, rotary_dim, offsets, inplace):
    torch.manual_seed(0)
    cos, sin = angle_tables(rotary_dim=rotary_dim)
    leaf = torch.randn(2, 6, 3, 24, dtype=torch.float64, requires_grad=True)
    out = apply_rotary_emb(leaf * 1, cos, sin, interleaved, inplace, offsets)
    start = offsets.long()[:, None] if isinstance(offsets, torch.Tensor) else offsets
    positions = torch.arange(6).expand(2, 6) + start
    expected = rotate_by_complex_numbers(leaf.detach(), cos, sin, interleaved, positions)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)

    dout = torch.randn_like(out)
    kept = dout.clone()
    (dx,) = torch.autograd.grad(out, leaf, dout)
    back = rotate_by_complex_numbers(dout, cos, -sin, interleaved, positions)
    torch.testing.assert_close(dx, back, rtol=0, atol=1e-12)
    assert torch.equal(dout, kept), "the caller's gradient was overwritten"


@pytest.mark.parametrize("inplace", [False, True])
def test_gradcheck(inplace):
    cos, sin = angle_tables(positions=4, rotary_dim=4)
    x = torch.randn(1, 4, 2, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda t: apply_rotary_emb(t * 1, cos, sin, inplace=inplace), x)


def test_inplace_writes_into_x():
    cos, sin = angle_tables()
    x = torch.randn(1, 6, 2, 16, dtype=torch.float64)
    expected = apply_rotary_emb(x, cos, sin)
    assert apply_rotary_emb(x, cos, sin, inplace=True).data_ptr() == x.data_ptr()
    torch.testing.assert_close(x, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("interleaved", [False, True])
def test_sixteen_bit_input_is_rounded_once(device, dtype, interleaved):
    cos, sin = angle_tables(dtype=torch.float32)
    x = torch.randn(2, 8, 2, 16, dtype=dtype)
    out = apply_rotary_emb(*(t.to(device) for t in (x, cos, sin)), interleaved).cpu()
    exact = rotate_by_complex_numbers(x, cos, sin, interleaved, torch.arange(8).expand(2, 8))
    torch.testing.assert_close(out, exact.to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize("interleaved", [False, True])
def test_textbook_formula_agrees(interleaved):
    cos, sin = angle_tables(positions=6)
    x = torch.randn(2, 6, 3, 24, dtype=torch.float64)
    torch.testing.assert_close(
        apply_rotary_emb_torch(x, cos, sin, interleaved), apply_rotary_emb(x, cos, sin, interleaved)
    )


@pytest.mark.parametrize("offsets", [0, torch.tensor([3, 0, 9, 1], dtype=torch.int32)])
def test_packed_sequences_equal_each_alone(offsets):
    cos, sin = angle_tables()
    lengths = [4, 0, 7, 1]
    cu_seqlens = torch.tensor([0, 4, 4, 11, 12], dtype=torch.int32)
    x = torch.randn(14, 2, 24, dtype=torch.float64, requires_grad=True)  # two rows past the end
    out = apply_rotary_emb(x, cos, sin, seqlen_offsets=offsets, cu_seqlens=cu_seqlens, max_seqlen=7)
    for i, length in enumerate(lengths):
        rows = slice(int(cu_seqlens[i]), int(cu_seqlens[i + 1]))
        first = int(offsets[i]) if isinstance(offsets, torch.Tensor) else offsets
        if length:
            alone = apply_rotary_emb(x[None, rows], cos, sin, seqlen_offsets=first)[0]
            torch.testing.assert_close(out[rows], alone)
    torch.testing.assert_close(out[12:], x[12:])
    dout = torch.randn_like(out)
    (dx,) = torch.autograd.grad(out, x, dout)
    forward_again = apply_rotary_emb(
        dx, cos, sin, seqlen_offsets=offsets, cu_seqlens=cu_seqlens, max_seqlen=7
    )
    torch.testing.assert_close(forward_again, dout)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("heads_k", [None, 1, 2])
def test_packed_qkv_in_place(interleaved, heads_k):
    """heads_k None: (b, s, 3, h, d); else GQA-packed (b, s, h + 2 heads_k, d)."""
    cos, sin = angle_tables()
    heads = 4
    shape = (2, 6, 3, heads, 24) if heads_k is None else (2, 6, heads + 2 * heads_k, 24)
    leaf = torch.randn(shape, dtype=torch.float64, requires_grad=True)

    def split(t):
        return t.unbind(2) if heads_k is None else t.split([heads, heads_k, heads_k], dim=2)

    q, k, v = split(leaf)
    expected = [apply_rotary_emb(t, cos, sin, interleaved, seqlen_offsets=3) for t in (q, k)] + [v]
    packed = leaf * 1
    out = apply_rotary_emb_qkv_(
        packed,
        cos,
        sin,
        interleaved=interleaved,
        seqlen_offsets=3,
        num_heads_q=None if heads_k is None else heads,
    )
    assert out.data_ptr() == packed.data_ptr()
    grads = [torch.randn_like(t) for t in expected]
    for got, want in zip(split(out), expected, strict=True):
        torch.testing.assert_close(got, want)
    (got,) = torch.autograd.grad(split(out), leaf, grads)
    (want,) = torch.autograd.grad(expected, leaf, grads)
    torch.testing.assert_close(got, want)


def test_packed_kv_in_place():
    cos, sin = angle_tables()
    leaf = torch.randn(2, 6, 2, 3, 24, dtype=torch.float64, requires_grad=True)
    out = apply_rotary_emb_kv_(leaf * 1, cos, sin)
    torch.testing.assert_close(out[:, :, 0], apply_rotary_emb(leaf[:, :, 0], cos, sin))
    torch.testing.assert_close(out[:, :, 1], leaf[:, :, 1])
    dout = torch.randn_like(out)
    (dkv,) = torch.autograd.grad(out, leaf, dout)
    torch.testing.assert_close(dkv[:, :, 1], dout[:, :, 1])
    torch.testing.assert_close(dkv[:, :, 0], apply_rotary_emb(dout[:, :, 0], cos, -sin))


# Each rotates x, or parts of it, in place; with the shape of x.
IN_PLACE = {
    "whole": ((2, 6, 3, 24), lambda x, *t: apply_rotary_emb(x, *t, inplace=True)),
    "view": ((2, 8, 3, 24), lambda x, *t: apply_rotary_emb(x[:, 1:7], *t, inplace=True)),
    "qkv": ((2, 6, 3, 4, 24), lambda x, *t: apply_rotary_emb_qkv_(x, *t)),
    "gqa": ((2, 6, 8, 24), lambda x, *t: apply_rotary_emb_qkv_(x, *t, num_heads_q=4)),
    "kv": ((2, 6, 2, 4, 24), lambda x, *t: apply_rotary_emb_kv_(x, *t)),
}


@pytest.mark.parametrize("kind", IN_PLACE)
@pytest.mark.parametrize("backend", [None, "aot_eager"])
@pytest.mark.parametrize("is_leaf", [True, False])
def test_in_place_on_what_requires_a_gradient(kind, backend, is_leaf):
    """A leaf's gradient is that of the values it had."""
    shape, function = IN_PLACE[kind]
    tables = angle_tables()
    leaf = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    twin = leaf.detach().clone().requires_grad_()
    expected = function(twin * 1, *tables)
    dout = torch.randn_like(expected)
    (dtwin,) = torch.autograd.grad(expected, twin, dout)

    x = leaf if is_leaf else leaf * 1
    torch._dynamo.reset()
    compiled = torch.compile(function, backend=backend, fullgraph=True) if backend else function
    out = compiled(x, *tables)
    torch.testing.assert_close(out, expected)
    rotated = x[:, 1:7] if kind == "view" else x
    torch.testing.assert_close(rotated, expected, msg="not written in place")
    (dleaf,) = torch.autograd.grad(out, leaf, dout)
    torch.testing.assert_close(dleaf, dtwin)


@pytest.mark.parametrize("kind", IN_PLACE)
def test_in_place_rotation_is_linear(kind):
    """Its gradient does not depend on x, and has one of its own, which gradgradcheck takes."""
    shape, function = IN_PLACE[kind]
    shape = (1, shape[1], *shape[2:-1], 4)
    tables = angle_tables(rotary_dim=2)
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda t: function(t * 1, *tables), x)


@pytest.mark.parametrize("kind", IN_PLACE)
def test_in_place_under_the_transforms_of_torch_func(kind):
    shape, function = IN_PLACE[kind]
    tables = angle_tables()
    x = torch.randn(shape, dtype=torch.float64)
    out, derive = torch.func.vjp(lambda t: function(t * 1, *tables), x)
    leaf = x.clone().requires_grad_()
    expected = function(leaf * 1, *tables)
    torch.testing.assert_close(out, expected)
    dout = torch.randn_like(out)
    torch.testing.assert_close(derive(dout), torch.autograd.grad(expected, leaf, dout))
    batch = torch.stack((x, -x))
    mapped = torch.vmap(lambda t: function(t * 1, *tables))(batch)
    torch.testing.assert_close(mapped, torch.stack((expected, -expected)))


def test_apply_rotary_conjugate_undoes():
    cos, sin = angle_tables()
    x = torch.randn(2, 6, 3, 24, dtype=torch.float64)
    there = apply_rotary(x, cos, sin, seqlen_offsets=2)
    torch.testing.assert_close(apply_rotary(there, cos, sin, seqlen_offsets=2, conjugate=True), x)


def test_scores_depend_on_distance_alone():
    """The point of the embedding: q at i times k at j equals q at i + n times k at j + n."""
    rotary = RotaryEmbedding(16)
    rotary._update_cos_sin_cache(64, dtype=torch.float64)
    cos, sin = rotary._cos_cached, rotary._sin_cached
    q, k = torch.randn(2, 1, 1, 1, 16, dtype=torch.float64)
    scores = [
        (
            apply_rotary_emb(q, cos, sin, seqlen_offsets=3 + n)
            * apply_rotary_emb(k, cos, sin, seqlen_offsets=n)
        ).sum()
        for n in (0, 11, 40)
    ]
    torch.testing.assert_close(scores[0], scores[1], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(scores[0], scores[2], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scale_base", [None, 512.0])
def test_module_packed_and_separate_agree(scale_base):
    rotary = RotaryEmbedding(16, scale_base=scale_base)
    qkv = torch.randn(2, 6, 3, 4, 24)
    q, kv = qkv[:, :, 0].clone(), qkv[:, :, 1:].clone()
    q, kv = rotary(q, kv, seqlen_offset=2)
    packed = rotary(qkv.clone(), seqlen_offset=2)
    torch.testing.assert_close(packed, torch.cat((q.unsqueeze(2), kv), dim=2))
    if scale_base is not None:
        q_alone = apply_rotary_emb(
            qkv[:, :, 0], rotary._cos_cached, rotary._sin_cached, seqlen_offsets=2
        )
        torch.testing.assert_close(q, q_alone)
        assert not torch.equal(rotary._cos_cached, rotary._cos_k_cached)


def test_xpos_scales_cancel_at_distance_zero():
    rotary = RotaryEmbedding(16, scale_base=512.0)
    x = torch.randn(1, 6, 1, 16)
    qkv = rotary(torch.stack((x, x, x), dim=2))
    torch.testing.assert_close((qkv[:, :, 0] * qkv[:, :, 1]).sum(-1), (x * x).sum(-1))


def test_module_tables_grow_and_survive_a_cast():
    rotary = RotaryEmbedding(16)
    exact = RotaryEmbedding(16)
    exact._update_cos_sin_cache(600)
    rotary = rotary.to(torch.bfloat16)
    rotary._update_cos_sin_cache(8)
    rotary._update_cos_sin_cache(600)
    torch.testing.assert_close(rotary._cos_cached, exact._cos_cached, rtol=0, atol=0)
    assert "inv_freq" not in rotary.state_dict()


@pytest.mark.parametrize("scale_base", [None, 512.0])
def test_initialisation_on_the_meta_device(scale_base):
    """As FSDP does it: memory first, and then what it is filled with."""
    expected = RotaryEmbedding(16, scale_base=scale_base)
    later = RotaryEmbedding(16, scale_base=scale_base, device="meta").to_empty(device="cpu")
    for buffer in later.buffers():
        buffer.fill_(torch.nan)
    later.reset_parameters()
    for name, buffer in expected.named_buffers():
        assert torch.equal(later.get_buffer(name), buffer)


def test_tables_made_in_inference_mode_do_not_break_training():
    rotary = RotaryEmbedding(8)
    with torch.inference_mode():
        rotary(torch.randn(1, 4, 3, 2, 8))
    x = torch.randn(1, 4, 3, 2, 8, requires_grad=True)
    rotary(x * 1).sum().backward()
    assert x.grad is not None


def test_varlen_module():
    rotary = RotaryEmbedding(8)
    cu_seqlens = torch.tensor([0, 3, 8], dtype=torch.int32)
    qkv = torch.randn(8, 3, 2, 8)
    expected = torch.cat([rotary(qkv[None, a:b].clone())[0] for a, b in ((0, 3), (3, 8))])
    torch.testing.assert_close(rotary(qkv.clone(), cu_seqlens=cu_seqlens, max_seqlen=5), expected)


def test_compiles_without_graph_breaks():
    cos, sin = angle_tables(dtype=torch.float32)
    x = torch.randn(2, 6, 3, 24)
    compiled = torch.compile(apply_rotary_emb, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, cos, sin), apply_rotary_emb(x, cos, sin))


def test_bad_input_says_what_and_why():
    cos, sin = angle_tables(positions=4)
    with pytest.raises(ValueError, match=r"rotate 16 channels.*head dimension of 8"):
        apply_rotary_emb(torch.randn(1, 2, 1, 8), cos, sin)
    with pytest.raises(ValueError, match="sin: got shape"):
        apply_rotary_emb(torch.randn(1, 2, 1, 16), cos, sin[:2])
    with pytest.raises(ValueError, match="cos: got 4 positions; 5 are needed"):
        apply_rotary_emb(torch.randn(1, 3, 1, 16), cos, sin, seqlen_offsets=2)
    with pytest.raises(ValueError, match="cos: got 4 positions; 5 are needed"):
        apply_rotary_emb(torch.randn(1, 3, 1, 16), cos, sin, seqlen_offsets=torch.tensor([2]))
    with pytest.raises(ValueError, match="seqlen_offsets: got -1"):
        apply_rotary_emb(torch.randn(1, 3, 1, 16), cos, sin, seqlen_offsets=-1)
    with pytest.raises(ValueError, match="a token at position -1"):
        apply_rotary_emb(torch.randn(1, 3, 1, 16), cos, sin, seqlen_offsets=torch.tensor([-1]))
    with pytest.raises(ValueError, match=r"seqlen_offsets: got shape \(2,\); \(1,\) is needed"):
        apply_rotary_emb(torch.randn(1, 3, 1, 16), cos, sin, seqlen_offsets=torch.zeros(2))
    with pytest.raises(ValueError, match=r"cu_seqlens: got shape \(1, 2\)"):
        apply_rotary_emb(torch.randn(3, 1, 16), cos, sin, cu_seqlens=torch.zeros(1, 2))
    with pytest.raises(ValueError, match="num_heads_q 3"):
        apply_rotary_emb_qkv_(torch.randn(1, 3, 6, 16), cos, sin, num_heads_q=3)
    with pytest.raises(ValueError, match="kv: got shape"):
        apply_rotary_emb_kv_(torch.randn(1, 3, 3, 2, 16), cos, sin)
    with pytest.raises(ValueError, match="rotate in pairs"):
        RotaryEmbedding(7)


NUMPY = r"got ndarray; a torch\.Tensor is needed"


@pytest.mark.parametrize("function", [apply_rotary_emb, apply_rotary, apply_rotary_emb_torch])
def test_arrays_are_no_tensors(function):
    cos, sin = angle_tables()
    x = torch.randn(1, 3, 1, 16)
    for name, call in {
        "x": (x.numpy(), cos, sin),
        "cos": (x, cos.numpy(), sin),
        "sin": (x, cos, sin.numpy()),
    }.items():
        with pytest.raises(TypeError, match=f"^{name}: {NUMPY}"):
            function(*call)


def test_arrays_are_no_tensors_in_other_places():
    cos, sin = angle_tables()
    x, qkv, kv = torch.randn(3, 2, 16), torch.randn(1, 3, 3, 2, 16), torch.randn(1, 3, 2, 2, 16)
    with pytest.raises(TypeError, match=f"^cu_seqlens: {NUMPY}"):
        apply_rotary_emb(x, cos, sin, cu_seqlens=torch.tensor([0, 3]).numpy())
    with pytest.raises(TypeError, match=f"^qkv: {NUMPY}"):
        apply_rotary_emb_qkv_(qkv.numpy(), cos, sin)
    with pytest.raises(TypeError, match=f"^kv: {NUMPY}"):
        apply_rotary_emb_kv_(kv.numpy(), cos, sin)
    rotary = RotaryEmbedding(16)
    for name, call in {"qkv": (qkv.numpy(),), "kv": (x[None], kv.numpy())}.items():
        with pytest.raises(TypeError, match=f"^{name}: {NUMPY}"):
            rotary(*call)
    with pytest.raises(TypeError, match=f"^k: {NUMPY}"):
        apply_rotary_emb_qk(x[None], x[None].numpy(), cos, sin)
    with pytest.raises(TypeError, match=f"^sin: {NUMPY}"):
        apply_rotary_emb_qk(x[None], x[None], cos, sin, cos, sin.numpy())


def test_places_are_integers():
    cos, sin = angle_tables()
    x = torch.randn(1, 3, 1, 16)
    said = r"seqlen_offsets: got dtype torch\.float32; int32 or int64 is needed"
    with pytest.raises(ValueError, match=said):
        apply_rotary_emb(x, cos, sin, seqlen_offsets=torch.ones(1))
    with pytest.raises(ValueError, match=r"cu_seqlens: got dtype torch\.float64"):
        apply_rotary_emb(x[0], cos, sin, cu_seqlens=torch.tensor([0.0, 3.0]).double())


def test_module_arguments_by_position():
    """The fifth is the device."""
    rotary = RotaryEmbedding(16, 100.0, True, 512.0, "meta")
    assert rotary.inv_freq.is_meta
    assert rotary.scale.is_meta
    assert rotary.interleaved
    assert rotary.pos_idx_in_fp32


def test_a_program_has_no_tables_of_the_module():
    """Nor the module any of the tracer's."""
    rotary = RotaryEmbedding(16, scale_base=512.0)
    program = torch.export.export(
        rotary,
        (torch.randn(2, 6, 3, 4, 24),),
        dynamic_shapes=({1: torch.export.Dim("seqlen", min=2, max=64)},),
        strict=False,
    )
    assert rotary._cos_cached is None
    qkv = torch.randn(2, 40, 3, 4, 24)
    torch.testing.assert_close(program.module()(qkv.clone()), rotary(qkv.clone()))


def test_a_table_with_a_row_for_each_token():
    cos, sin = angle_tables(rotary_dim=8)
    x = torch.randn(2, 5, 3, 8, dtype=torch.float64)
    starts = torch.tensor([4, 0])
    rows = starts[:, None] + torch.arange(5)
    expected = apply_rotary_emb(x, cos, sin, seqlen_offsets=starts)
    torch.testing.assert_close(apply_rotary_emb(x, cos[rows], sin[rows]), expected)
    first = apply_rotary_emb(x, cos[:5], sin[:5])
    torch.testing.assert_close(apply_rotary_emb(x, cos[None, :5], sin[None, :5]), first)
    for bad in (cos[None], cos[rows].expand(3, 2, 5, 4)[0, :1].expand(3, 5, 4)):
        with pytest.raises(
            ValueError, match=r"cos: got shape .* needs a row for each token, \(2, 5"
        ):
            apply_rotary_emb(x, bad, bad)
    with pytest.raises(ValueError, match=r"cos: got shape .* is needed, or"):
        apply_rotary_emb(x, cos[0], sin[0])
    ends = torch.tensor([0, 5], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"with cu_seqlens; .* a row for each position"):
        apply_rotary_emb(x[0], cos[rows], sin[rows], cu_seqlens=ends)
