"""The rotary operation on every backend gives the bits that torch's operations give on the CPU."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from flash_attn.dispatch import rotary as dispatched
from flash_attn.dispatch.rotary import Turn, kernel_takes
from flash_attn.layers.rotary import (
    RotaryEmbedding,
    apply_rotary_emb,
    apply_rotary_emb_kv_,
    apply_rotary_emb_qk,
    apply_rotary_emb_qkv_,
)
from flash_attn.ops.triton.rotary import apply_rotary

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
OFFSETS = [0, 5, torch.tensor([0, 7], dtype=torch.int32), torch.tensor([3, 1])]
# head_dim, rotary_dim: whole runs of 16 bytes, with channels that do not turn, and neither.
DIMS = [(64, 64), (40, 16), (48, 32), (40, 24), (17, 16), (7, 2), (16, 0)]


def tables(rotary_dim, dtype, positions=32, device="cpu"):
    theta = 100.0 ** (-torch.arange(0, rotary_dim, 2) / max(rotary_dim, 1))
    angles = torch.outer(torch.arange(positions), theta).to(device)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def on_torch(x, cos, sin, offsets=0, cu_seqlens=None, interleaved=False, conjugate=False):
    """The reference, on the CPU."""
    x, cos, sin = x.detach().cpu(), cos.cpu(), sin.cpu()
    on_device = isinstance(offsets, torch.Tensor)
    places = (0, offsets.cpu()) if on_device else (offsets, None)
    out = torch.empty_like(x)
    cu_seqlens = None if cu_seqlens is None else cu_seqlens.cpu()
    dispatched.on_torch(
        out, x, None, None, None, None, cos, sin, None, None, *places, cu_seqlens, interleaved,
        conjugate,
    )  # fmt: skip
    return out


def assert_same(got, want):
    assert got.dtype == want.dtype
    assert torch.equal(got.detach().cpu(), want.detach().cpu())


def assert_same_with_gradients(outs, wants, leaves):
    douts = [torch.randn_like(x) for x in outs]
    grads = (torch.autograd.grad(found, leaves, douts) for found in (outs, wants))
    for got, want in [*zip(outs, wants), *zip(*grads)]:
        assert_same(got, want)


class Calls(TorchDispatchMode):
    """Counts calls of the operation."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.flash_attn._rotary.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_bits(device, dtype, interleaved, dims):
    head_dim, rotary_dim = dims
    for table_dtype in {dtype, torch.float32, torch.float64}:
        cos, sin = tables(rotary_dim, table_dtype)
        for offsets in OFFSETS:
            x = torch.randn(2, 6, 5, head_dim, dtype=dtype)
            want = on_torch(x, cos, sin, offsets, interleaved=interleaved)
            place = offsets.to(device) if isinstance(offsets, torch.Tensor) else offsets
            call = (cos.to(device), sin.to(device), interleaved)
            x, kept = x.to(device), x
            got = apply_rotary_emb(x, *call, seqlen_offsets=place)
            assert_same(got, want)
            assert_same(x, kept)
            assert apply_rotary_emb(x, *call, inplace=True, seqlen_offsets=place) is x
            assert_same(x, want)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("offsets", [0, 2, torch.tensor([3, 0, 9, 1], dtype=torch.int32)])
def test_packed_sequences(device, interleaved, offsets):
    """One of them empty; two rows behind the last."""
    cos, sin = tables(32, torch.float32)
    ends = torch.tensor([0, 4, 4, 11, 12], dtype=torch.int32)
    x = torch.randn(14, 3, 40, dtype=torch.bfloat16)
    want = on_torch(x, cos, sin, offsets, ends, interleaved)
    place = offsets.to(device) if isinstance(offsets, torch.Tensor) else offsets
    got = apply_rotary_emb(
        x.to(device), cos.to(device), sin.to(device), interleaved, False, place, ends.to(device), 7
    )
    assert_same(got, want)


@pytest.mark.parametrize("dims", [(32, 32), (40, 16), (24, 12)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("own_tables", [False, True])
@pytest.mark.parametrize("kind", ["qkv", "gqa", "kv", "q and k"])
def test_parts_and_their_gradients_in_one_call(device, dims, dtype, own_tables, kind):
    head_dim, rotary_dim = dims
    cos, sin = tables(rotary_dim, torch.float32)
    own = (0.5 * cos, 0.5 * sin) if own_tables and kind != "kv" else (None, None)
    heads = {"qkv": (5, 5, 5), "gqa": (6, 2, 2), "kv": (2, 2), "q and k": (6, 2)}[kind]
    parts = [torch.randn(2, 6, h, head_dim, dtype=dtype) for h in heads]
    douts = [torch.randn_like(part) for part in parts]

    def expected(values, conjugate):
        turned = {"kv": [(cos, sin), None], "q and k": [(cos, sin)] * 2}.get(
            kind, [(cos, sin), (cos, sin), None]
        )
        if own[0] is not None:
            turned[1] = own
        return [
            on_torch(x, *table, 3, conjugate=conjugate) if table else x
            for x, table in zip(values, turned)
        ]

    def pack(values):
        axis_is_new = kind in ("qkv", "kv")
        packed = torch.stack(values, 2) if axis_is_new else torch.cat(values, 2)
        return packed.to(device)

    move = [t if t is None else t.to(device) for t in (cos, sin, *own)]
    with Calls() as calls:
        if kind == "q and k":
            leaves = [part.to(device).requires_grad_() for part in parts]
            outs = apply_rotary_emb_qk(*leaves, *move, seqlen_offsets=3)
            grads = torch.autograd.grad(outs, leaves, [d.to(device) for d in douts])
            got = torch.cat(outs, 2), torch.cat(grads, 2)
        else:
            leaf = pack(parts).requires_grad_()
            if kind == "kv":
                out = apply_rotary_emb_kv_(leaf * 1, *move[:2], seqlen_offsets=3)
            else:
                n = heads[0] if kind == "gqa" else None
                out = apply_rotary_emb_qkv_(leaf * 1, *move, seqlen_offsets=3, num_heads_q=n)
            got = out, torch.autograd.grad(out, leaf, pack(douts))[0]
    assert calls.count == 2
    assert_same(got[0], pack(expected(parts, False)))
    assert_same(got[1], pack(expected(douts, True)))


def q_and_k(device) -> list[torch.Tensor]:
    return [torch.randn(2, 6, h, 24, dtype=torch.bfloat16, device=device) for h in (4, 2)]


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("views", [False, True])
def test_q_and_k_are_apply_rotary_emb_of_each(device, inplace, views):
    """Where autograd does not let one function write into both, too."""
    cos, sin = (t.to(device) for t in tables(16, torch.float32))
    leaves = [x.requires_grad_() for x in q_and_k(device)]

    def inputs():
        return [(x * 1).unflatten(1, (2, 3)).flatten(1, 2) if views else x * 1 for x in leaves]

    q, k = inputs()
    outs = apply_rotary_emb_qk(q, k, cos, sin, inplace=inplace)
    assert (outs[0].data_ptr() == q.data_ptr()) == inplace
    wants = [apply_rotary_emb(x, cos, sin) for x in inputs()]
    assert_same_with_gradients(outs, wants, leaves)
    with pytest.raises(ValueError, match="but for heads"):
        apply_rotary_emb_qk(q, k[:, :5], cos, sin)


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("wanted", [0, 1])
def test_what_needs_no_gradient_gets_none(device, inplace, wanted):
    """Of q and k that turn in one call; what turns in place stays a tensor without a graph."""
    cos, sin = (t.to(device) for t in tables(16, torch.float32))
    q, k = q_and_k(device)
    leaf = (q, k)[wanted].requires_grad_()
    inputs = [x * 1 if x is leaf else x for x in (q, k)]
    outs = apply_rotary_emb_qk(*inputs, cos, sin, inplace=inplace)
    assert not inputs[1 - wanted].requires_grad
    assert not outs[1 - wanted].requires_grad
    dout = torch.randn_like(leaf)
    (gradient,) = torch.autograd.grad(outs[wanted], leaf, dout)
    assert_same(gradient, on_torch(dout, cos, sin, conjugate=True))


def test_the_module_turns_q_and_kv_in_one_call(device):
    rotary = RotaryEmbedding(16, scale_base=512.0, device=device)
    q = torch.randn(2, 6, 4, 24, dtype=torch.float16, device=device)
    kv = torch.randn(2, 6, 2, 2, 24, dtype=torch.float16, device=device)
    packed = torch.cat((q, kv[:, :, 0], kv[:, :, 1]), dim=2)
    with Calls() as calls:
        q, kv = rotary(q, kv, seqlen_offset=2)
    assert calls.count == 1
    packed = rotary(packed, seqlen_offset=2, num_heads_q=4)
    assert_same(torch.cat((q, kv.flatten(2, 3)), dim=2), packed)


@pytest.mark.parametrize("interleaved", [False, True])
def test_any_strides(device, interleaved):
    """Slices, heads before rows, and rows that begin anywhere, whose neighbours stay."""
    cos, sin = tables(32, torch.float32)
    for make in (
        lambda t: t[:, :6, 2:7, :40],
        lambda t: t[:, :6, 2:7, 1:41],
        lambda t: t.transpose(1, 2)[:, :6, :5, 8:48],
        lambda t: t[1:2, 3:9, 1:4, 8:48],
    ):
        whole = torch.randn(2, 9, 9, 64, dtype=torch.bfloat16)
        want = whole.clone()
        make(want).copy_(on_torch(make(whole), cos, sin, 1, interleaved=interleaved))
        for inplace in (False, True):
            x = whole.to(device)
            place = {"interleaved": interleaved, "seqlen_offsets": 1, "inplace": inplace}
            got = apply_rotary_emb(make(x), cos.to(device), sin.to(device), **place)
            assert_same(got, make(want))
            assert_same(x, want if inplace else whole)


def test_what_the_kernel_leaves_to_torch(device):
    """Heads that share memory, a last stride that is not 1, tables of two widths."""
    cos, sin = (t.to(device) for t in tables(16, torch.float32))
    x = torch.randn(2, 6, 1, 24, dtype=torch.bfloat16, device=device)
    assert_same(apply_rotary_emb(x.expand(-1, -1, 3, -1), cos, sin)[:, :, 1:2],
                on_torch(x, cos, sin))  # fmt: skip
    strided = torch.randn(2, 6, 24, 3, dtype=torch.bfloat16, device=device).transpose(2, 3)
    want = on_torch(strided, cos, sin)
    if device == "cuda":
        assert_same(apply_rotary_emb(strided, cos, sin), want)
        apply_rotary_emb(strided, cos, sin, inplace=True)
        assert_same(strided, want)


def test_which_tensors_the_kernel_takes():
    cos, sin = tables(16, torch.float32)
    turn = Turn(cos, sin, None, None, None, None, 0, True)
    x = torch.randn(2, 6, 3, 24, dtype=torch.bfloat16)
    assert kernel_takes([x, x[:, ::2]], turn)
    assert not kernel_takes([x.double(), x.double()], turn)
    assert not kernel_takes([x, x.half()], turn)
    assert not kernel_takes([x, x[..., :16]], turn)
    assert not kernel_takes([x.transpose(2, 3)], turn)
    assert kernel_takes([x], turn._replace(cos_k=cos, sin_k=sin))
    assert not kernel_takes([x], turn._replace(cos_k=cos[:, :4], sin_k=sin[:, :4]))


def test_tables_with_a_row_for_each_token(device):
    cos, sin = tables(16, torch.float32)
    rows = torch.tensor([4, 0])[:, None] + torch.arange(5)
    x = torch.randn(2, 5, 3, 24, dtype=torch.bfloat16)
    want = on_torch(x, cos, sin, torch.tensor([4, 0]))
    each = cos[rows].to(device), sin[rows].to(device)
    assert_same(apply_rotary_emb(x.to(device), *each), want)
    same = cos[None, :5].to(device), sin[None, :5].to(device)
    assert_same(apply_rotary_emb(x.to(device), *same), on_torch(x, cos, sin))
    strided = [torch.stack((t, t), -1)[..., 0] for t in each]
    assert_same(apply_rotary_emb(x.to(device), *strided), want)


FAR = [-1, -(2**31), 30, 2**31 - 1]


@pytest.mark.parametrize("far", FAR)
def test_any_positions(device, request, far):
    """A CPU looks and refuses; the kernel takes the nearest row there is."""
    cos, sin = tables(16, torch.float32)
    x = torch.randn(2, 6, 3, 16, dtype=torch.bfloat16)
    place = {"seqlen_offsets": torch.tensor([far, 1], dtype=torch.int32, device=device)}
    call = (x.to(device), cos.to(device), sin.to(device))
    if request.node.callspec.params["device"] == "cpu":
        with pytest.raises(ValueError, match="position"):
            apply_rotary_emb(*call, **place)
        return
    got = apply_rotary_emb(*call, **place)
    rows = (torch.tensor([far, 1])[:, None] + torch.arange(6)).clamp(0, 31)
    assert_same(got, on_torch(x, cos[rows], sin[rows]))


@pytest.mark.parametrize("ends", [[0, 99, -7, 6], [-5, 3, 3, 2**31 - 1], [9, 2, 1, 0]])
def test_any_cu_seqlens(device, request, ends):
    if request.node.callspec.params["device"] == "cpu":
        pytest.skip("what torch's operations do with them is theirs")
    cos, sin = (t.to(device) for t in tables(16, torch.float32))
    x = torch.randn(6, 3, 16, dtype=torch.bfloat16, device=device)
    ends = torch.tensor(ends, dtype=torch.int32, device=device)
    out = apply_rotary_emb(x, cos, sin, seqlen_offsets=31, cu_seqlens=ends)
    norms = [t.float().norm(dim=-1) for t in (out, x)]
    torch.testing.assert_close(*norms, rtol=2e-2, atol=0)


def test_nothing_to_turn(device):
    cos, sin = (t.to(device) for t in tables(16, torch.bfloat16))
    for shape in ((0, 6, 3, 16), (2, 0, 3, 16), (2, 6, 0, 16)):
        x = torch.zeros(shape, dtype=torch.bfloat16, device=device)
        assert apply_rotary_emb(x, cos, sin).shape == shape
    x = torch.ones(3, 2, 16, dtype=torch.bfloat16, device=device)
    none = torch.zeros(1, dtype=torch.int32, device=device)
    assert_same(apply_rotary_emb(x, cos, sin, cu_seqlens=none), x)


EMPTY = [(0, 6, 3, 16), (2, 0, 3, 16), (2, 6, 0, 16)]


@pytest.mark.parametrize("shape", EMPTY, ids=str)
@pytest.mark.parametrize("inplace", [False, True])
def test_gradients_of_nothing(device, shape, inplace):
    """Those of a sum have stride 0 in every dimension, those of a row's weights in all but one, and
    torch makes neither contiguous where there is no element."""
    cos, sin = (t.to(device) for t in tables(16, torch.bfloat16))
    leaf = torch.zeros(shape, dtype=torch.bfloat16, device=device, requires_grad=True)
    row = torch.ones(shape[-1], dtype=torch.bfloat16, device=device)
    for dout in (row[0].expand(shape), row.expand(shape), torch.zeros_like(leaf)):
        out = apply_rotary_emb(leaf * 1, cos, sin, inplace=inplace)
        (gradient,) = torch.autograd.grad(out, leaf, dout)
        assert gradient.shape == shape
        q, k = (leaf * 1 for _ in "qk")
        outs = apply_rotary_emb_qk(q, k, cos, sin, inplace=inplace)
        (gradient,) = torch.autograd.grad(outs, leaf, (dout, dout))
        assert gradient.shape == shape
        no_angles = cos.new_zeros(1).expand(0, 8)
        if shape[1] == 0:
            assert apply_rotary_emb(dout, no_angles, no_angles).shape == shape


def test_writes_are_counted(device):
    cos, sin = (t.to(device) for t in tables(16, torch.bfloat16))
    x = torch.randn(2, 6, 3, 16, dtype=torch.bfloat16, device=device)
    apply_rotary(x, cos, sin)
    assert x._version == 0
    apply_rotary(x, cos, sin, inplace=True)
    assert x._version == 1
    w = torch.ones((), dtype=torch.bfloat16, device=device, requires_grad=True)
    y = w * x
    apply_rotary(x, cos, sin, inplace=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_conjugate_and_autocast(device):
    cos, sin = tables(16, torch.float32)
    x = torch.randn(2, 6, 3, 24, dtype=torch.bfloat16)
    call = (x.to(device), cos.to(device), sin.to(device))
    assert_same(apply_rotary(*call, conjugate=True), on_torch(x, cos, sin, conjugate=True))
    with torch.autocast(device, torch.float16):
        assert_same(apply_rotary(*call), on_torch(x, cos, sin))


def test_the_operation_is_well_formed(device):
    cos, sin = (t.to(device) for t in tables(16, torch.float32))
    x, k, v = (torch.randn(2, 6, 3, 24, dtype=torch.bfloat16, device=device) for _ in range(3))
    out = [torch.empty_like(x) for _ in range(3)]
    args = (out[0], x, out[1], k, out[2], v, cos, sin, None, None, 2, None, None, False, True)
    torch.library.opcheck(torch.ops.flash_attn._rotary, args)


@pytest.mark.parametrize("inplace", [False, True])
def test_compiled(device, inplace):
    cos, sin = (t.to(device) for t in tables(16, torch.float32))
    leaves = [x.requires_grad_() for x in q_and_k(device)]

    def step(q, k):
        return apply_rotary_emb_qk(q * 1, k * 1, cos, sin, inplace=inplace)

    torch._dynamo.reset()
    outs = torch.compile(step, fullgraph=True, backend="aot_eager")(*leaves)
    wants = step(*leaves)
    assert_same_with_gradients(outs, wants, leaves)


def test_more_elements_than_an_int_counts(cuda, need_memory):
    need_memory(12)
    tokens = 2**31 // (32 * 128) + 1000
    x = torch.randn(1, tokens, 32, 128, dtype=torch.bfloat16, device=cuda)
    cos, sin = tables(128, torch.bfloat16, positions=tokens, device=cuda)
    want = on_torch(x[:, -3:], cos, sin, tokens - 3)
    assert_same(apply_rotary_emb(x, cos, sin, inplace=True)[:, -3:], want)


def test_one_kernel(cuda):
    cos, sin = tables(64, torch.float32, device=cuda)
    q, k = (torch.randn(2, 32, h, 64, dtype=torch.bfloat16, device=cuda) for h in (8, 2))
    apply_rotary_emb_qk(q, k, cos, sin)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        apply_rotary_emb_qk(q, k, cos, sin)
        torch.cuda.synchronize()
    kernels = [event.key for event in profile.key_averages() if "rotary" in event.key]
    assert len(kernels) == 1
