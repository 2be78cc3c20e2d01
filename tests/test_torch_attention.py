"""torch's attention operators on these kernels, and its registry that puts them there."""

from __future__ import annotations

import inspect
import sys
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from compare import assert_accurate, assert_bitwise, assert_lse
from reference import attention_ref, gradients, standard_attention
from torch import Tensor
from torch.library import opcheck
from torch.nested._internal import sdpa as jagged
from torch.nn import attention
from torch.nn.attention.varlen import varlen_attn

from flash_attn import flash_attn_func, flash_attn_varlen_func, torch_attention
from flash_attn.dispatch import private
from tests.commands import run

ATEN = torch.ops.aten
BF16 = torch.bfloat16
SDPA = ATEN._scaled_dot_product_flash_attention
HEADS, HEADS_K, HEAD_DIM = 4, 2, 64
LENGTHS_Q, LENGTHS_K = (9, 1, 20), (33, 40, 20)
VARLEN = inspect.signature(varlen_attn).parameters

needs_pages = pytest.mark.skipif("block_table" not in VARLEN, reason="this torch has no pages here")


@pytest.fixture
def served(device):
    """The device, for which torch's operators run these kernels; there is no CPU kernel of theirs
    otherwise."""
    handle = torch_attention.Override(torch.device(device).type.upper())
    yield device
    handle.remove()


def ints(device: str, values) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def ends(device: str, lengths) -> Tensor:
    return ints(device, [sum(lengths[:i]) for i in range(len(lengths) + 1)])


def leaves(device: str, *shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.randn(x, device=device).to(BF16).requires_grad_() for x in shapes]


def packed(device: str) -> list[Tensor]:
    q, k = sum(LENGTHS_Q), sum(LENGTHS_K)
    return leaves(device, (q, HEADS, HEAD_DIM), *2 * [(k, HEADS_K, HEAD_DIM)])


def varlen(q: Tensor, k: Tensor, v: Tensor, **options):
    """out, log-sum-exp of torch's function."""
    cu_q, cu_k = ends(q.device, LENGTHS_Q), ends(q.device, LENGTHS_K)
    if "enable_gqa" in VARLEN:
        options["enable_gqa"] = True
    aux = attention.varlen.AuxRequest(lse=True)
    with attention.sdpa_kernel(attention.SDPBackend.FLASH_ATTENTION):
        return varlen_attn(
            q, k, v, cu_q, cu_k, max(LENGTHS_Q), max(LENGTHS_K), return_aux=aux, **options
        )


def same_gradients(inputs: tuple[Tensor, ...], out: Tensor, expected: Tensor) -> None:
    dout = torch.randn_like(out)
    for x, y in zip(*(torch.autograd.grad(o, inputs, dout) for o in (out, expected))):
        torch.testing.assert_close(x, y, atol=1e-2, rtol=1e-2)  # sums in any order


# --- Registration ---------------------------------------------------------------------------------


def kernel() -> str:
    """What serves the operator for CUDA tensors."""
    table = torch._C._dispatch_dump("aten::_flash_attention_forward").splitlines()
    return next((line for line in table if line.startswith("CUDA: ")), "")


@pytest.mark.skipif(
    not hasattr(attention, "restore_flash_attention_impl"), reason="this torch cannot restore"
)
def test_torch_activates_and_restores():
    before = kernel()
    assert "flash_attn" in attention.list_flash_attention_impls()
    assert "torch_attention.py" not in before
    attention.activate_flash_attention_impl("flash_attn")
    try:
        assert attention.current_flash_attention_impl() == "flash_attn"
        assert "torch_attention.py" in kernel()
    finally:
        attention.restore_flash_attention_impl()
    assert kernel() == before


def test_a_torch_without_the_registry(monkeypatch):
    """Asking says which one is needed."""
    monkeypatch.delattr(attention, "register_flash_attention_impl")
    monkeypatch.setattr(torch, "__version__", "2.9.1+cu130")
    assert not torch_attention.has_registry()
    with pytest.raises(RuntimeError, match=r"torch 2\.9\.1\+cu130 has no .* torch >= 2\.10 is"):
        torch_attention.register()


def test_the_import_needs_no_registry():
    program = (
        "import torch.nn.attention as attention; del attention.register_flash_attention_impl;"
        "import flash_attn; print(flash_attn.flash_attn_func.__name__)"
    )
    assert run(sys.executable, "-c", program).stdout.strip() == "flash_attn_func"


@pytest.mark.parametrize("name", torch_attention._OPERATORS)
def test_signatures_are_those_of_the_operators(name):
    if not hasattr(ATEN, name):
        pytest.skip("this torch has no such operator")
    schema = getattr(ATEN, name).default._schema.arguments
    taken = inspect.signature(torch_attention._OPERATORS[name])
    names = [a.name for a in schema]
    if any(p.kind is p.VAR_POSITIONAL for p in taken.parameters.values()):
        names = [name for name in names if name in taken.parameters]
        assert [n for n in taken.parameters if n not in ("args", "kwargs")] == names
        return
    assert [n for n in taken.parameters if n in names] == names
    by_name = {a.name for a in schema if a.kwarg_only}
    assert by_name == {
        n for n, p in taken.parameters.items() if p.kind is p.KEYWORD_ONLY and n in names
    }


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
def test_sdpa_on_a_gpu(causal):
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    q, k, v = leaves("cuda", *3 * [(2, HEADS, 40, HEAD_DIM)])
    attention.activate_flash_attention_impl("flash_attn")
    with attention.sdpa_kernel(attention.SDPBackend.FLASH_ATTENTION):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    rows = [x.transpose(1, 2) for x in (q, k, v)]
    expected = flash_attn_func(*rows, causal=causal).transpose(1, 2)
    assert_bitwise("out", out, expected)
    same_gradients((q, k, v), out, expected)
    if hasattr(attention, "restore_flash_attention_impl"):
        attention.restore_flash_attention_impl()


# --- Dense ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("heads_k", [HEADS, HEADS_K])
@pytest.mark.parametrize("causal", [False, True])
def test_dense(served, causal, heads_k):
    q, k, v = leaves(served, (2, 20, HEADS, HEAD_DIM), *2 * [(2, 33, heads_k, HEAD_DIM)])
    dout = torch.randn_like(q)

    def ours(q, k, v):
        rows = (x.transpose(1, 2) for x in (q, k, v))
        out, lse, *_ = SDPA(*rows, 0.0, causal, scale=0.2)
        return out.transpose(1, 2), lse

    def written_out(function, q, k, v):
        return function(q, k, v, softmax_scale=0.2, causal=causal)[:2]

    inputs = {"q": q, "k": k, "v": v}
    out, lse, got = gradients(ours, inputs, dout)
    ref = gradients(partial(written_out, attention_ref), inputs, dout, dtype=torch.float64)
    std = gradients(partial(written_out, standard_attention), inputs, dout)
    assert_accurate("out", out, ref[0], std[0])
    assert_lse("lse", lse, ref[1])
    for name in inputs:
        assert_accurate(f"d{name}", got[name], ref[2][name], std[2][name])


def test_dropout_is_that_of_the_backward_and_of_the_seed(served):
    q, k, v = leaves(served, *3 * [(2, HEADS, 24, HEAD_DIM)])
    p = 0.25
    torch.manual_seed(5)
    out, _, _, _, _, _, state, _, probs = SDPA(q, k, v, p, False, True)
    assert state.dtype == torch.uint64
    torch.manual_seed(5)
    assert_bitwise("again", SDPA(q, k, v, p)[0], out)
    assert not torch.equal(SDPA(q, k, v, p)[0], out)

    keep = ~torch.signbit(probs)
    assert 0.1 < 1 - keep.float().mean().item() < 0.4
    rows = {name: x.transpose(1, 2) for name, x in (("q", q), ("k", k), ("v", v))}

    def written_out(function, q, k, v):
        return function(q, k, v, dropout_p=p, keep_mask=keep)[:2]

    dout = torch.randn_like(rows["q"])
    ref = gradients(partial(written_out, attention_ref), rows, dout, dtype=torch.float64)
    std = gradients(partial(written_out, standard_attention), rows, dout)
    assert_accurate("out", out.transpose(1, 2), ref[0], std[0])
    got = torch.autograd.grad(out, (q, k, v), dout.transpose(1, 2))
    for name, gradient in zip(rows, got):
        assert_accurate(name, gradient.transpose(1, 2), ref[2][name], std[2][name], factor=3)


@pytest.mark.parametrize(
    "layout",
    [
        lambda x: x,
        lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        lambda x: x.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3),
        lambda x: torch.cat([x, x], -1)[..., :HEAD_DIM],
    ],
    ids=["heads first", "rows first", "batch inside", "a slice"],
)
def test_results_lie_as_torch_says(served, layout):
    """Inductor relies on the strides that the fake implementation has."""
    inputs = [
        layout(x.detach()).requires_grad_() for x in leaves(served, *3 * [(2, 4, 16, HEAD_DIM)])
    ]
    out = SDPA(*inputs)[0]
    assert out.stride() == torch.empty_like(inputs[0]).stride()
    opcheck(SDPA.default, (*inputs, 0.0, True), test_utils=("test_schema", "test_faketensor"))
    for x, dx in zip(inputs, torch.autograd.grad(out, inputs, torch.randn_like(out))):
        assert dx.stride() == torch.empty_like(x).stride()


def test_what_torch_records_is_not_recorded_twice(served):
    q, k, v = leaves(served, *3 * [(2, 16, 4, HEAD_DIM)])
    call = torch_attention.flash_attention_forward
    out, lse, *_ = call(q, k, v, None, None, 16, 16, 0.0, False, False)
    assert not out.requires_grad
    assert not lse.requires_grad


def test_rows_that_kernels_cannot_load_are_copied(served):
    q, k, v = (x.detach()[..., 1:] for x in leaves(served, *3 * [(2, 4, 16, HEAD_DIM + 1)]))
    expected = SDPA(*(x.contiguous() for x in (q, k, v)))[0]
    turned = [x.transpose(2, 3).contiguous().transpose(2, 3) for x in (q, k, v)]
    assert_bitwise("no unit stride", SDPA(*turned)[0], expected)
    if served == "cuda":
        assert_bitwise("unaligned", SDPA(q, k, v)[0], expected)


def test_deterministic_algorithms(served, monkeypatch):
    seen = []
    backward = private.backward
    monkeypatch.setattr(private, "backward", lambda *a: seen.append(a[1]) or backward(*a))
    q, k, v = leaves(served, *3 * [(1, 2, 8, HEAD_DIM)])
    for wanted in (False, True):
        torch.use_deterministic_algorithms(wanted)
        try:
            SDPA(q, k, v)[0].sum().backward()
        finally:
            torch.use_deterministic_algorithms(False)
    assert [options.deterministic for options in seen] == [False, True]


# --- Packed ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (7, 2)])
@pytest.mark.skipif("enable_gqa" not in VARLEN, reason="this torch has no GQA and windows here")
def test_varlen(served, window):
    q, k, v = packed(served)
    out, lse = varlen(q, k, v, window_size=window, scale=0.2)
    cu_q, cu_k = ends(served, LENGTHS_Q), ends(served, LENGTHS_K)
    expected, expected_lse = flash_attn_varlen_func(
        q, k, v, cu_q, cu_k, max(LENGTHS_Q), max(LENGTHS_K), softmax_scale=0.2,
        window_size=window, return_lse=True,
    )  # fmt: skip
    torch.testing.assert_close(out, expected, atol=1e-2, rtol=1e-2)
    assert_lse("lse", lse, expected_lse)
    same_gradients((q, k, v), out, expected)


def test_jagged(served, monkeypatch):
    if served != "cuda":  # torch looks at the GPU before it takes this back end
        flash = attention.SDPBackend.FLASH_ATTENTION
        monkeypatch.setattr(jagged, "_select_sdp_backend", lambda *_: flash)
    q, k, v = leaves(served, *3 * [(sum(LENGTHS_Q), HEADS, HEAD_DIM)])
    cu = ends(served, LENGTHS_Q)
    rows = (torch.nested.nested_tensor_from_jagged(x, cu.long()) for x in (q, k, v))
    with attention.sdpa_kernel(attention.SDPBackend.FLASH_ATTENTION):
        out = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in rows), is_causal=True)
    out = out.transpose(1, 2).values()
    expected = flash_attn_varlen_func(q, k, v, cu, cu, 20, 20, causal=True)
    assert_bitwise("out", out, expected)
    same_gradients((q, k, v), out, expected)


@needs_pages
@pytest.mark.parametrize("num_splits", [None, 1])
def test_pages_and_used_keys(served, num_splits):
    pages, used = 8, [30, 5, 20]
    q = packed(served)[0].detach()
    k, v = (x.detach() for x in leaves(served, *2 * [(pages, 16, HEADS_K, HEAD_DIM)]))
    table = ints(served, [[3, 0, 1], [2, -1, -1], [7, 5, -1]])
    cu_q = ends(served, LENGTHS_Q)
    expected = flash_attn_varlen_func(
        q, k.clone(), v.clone(), cu_q, ends(served, used), max(LENGTHS_Q), 48, causal=True,
        block_table=table,
    )  # fmt: skip
    given = {"seqused_k": ints(served, used), "block_table": table, "num_splits": num_splits}
    call = partial(
        varlen_attn, q, k, v, cu_q, None, max(LENGTHS_Q), 48, enable_gqa=True,
        window_size=(-1, 0), **given,
    )  # fmt: skip
    torch.testing.assert_close(call(), expected, atol=1e-2, rtol=1e-2)
    out = torch.empty_like(q)
    result = attention.varlen.varlen_attn_out(out, *call.args, **call.keywords)
    assert result is out
    assert_bitwise("out", out, call())


@needs_pages
def test_one_split_is_batch_invariant(served):
    q, k, v = (x.detach() for x in packed(served))
    together, _ = varlen(q, k, v, num_splits=1)
    rows, keys = slice(9, 10), slice(33, 73)
    alone = varlen_attn(
        q[rows], k[keys], v[keys], ints(served, [0, 1]), ints(served, [0, 40]), 1, 40,
        enable_gqa=True, num_splits=1,
    )  # fmt: skip
    assert_bitwise("out", together[rows], alone)


@needs_pages
@pytest.mark.parametrize(("given", "invariant"), [(None, False), (1, True), (3, False)])
def test_splits_are_passed_on(served, monkeypatch, given, invariant):
    seen = []
    forward = private.forward
    monkeypatch.setattr(private, "forward", lambda *a: seen.append(a) or forward(*a))
    varlen(*(x.detach() for x in packed(served)), num_splits=given)
    ((_, _, _, options, _, _, num_splits),) = seen
    assert (options.batch_invariant, num_splits) == (invariant, given or 0)


def test_alibi(served):
    q, k, v = (x.detach() for x in leaves(served, *3 * [(2, 16, HEADS, HEAD_DIM)]))
    slopes = torch.rand(HEADS, device=served)
    out = ATEN._flash_attention_forward(
        q, k, v, None, None, 16, 16, 0.0, True, False, alibi_slopes=slopes
    )[0]
    assert_bitwise("out", out, flash_attn_func(q, k, v, causal=True, alibi_slopes=slopes))


# --- What raises ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["alibi_slopes", "seqused_k", "block_table"])
def test_a_gradient_that_torch_would_get_wrong(served, name):
    q, k, v = packed(served)
    cu_q, cu_k = ends(served, LENGTHS_Q), ends(served, LENGTHS_K)
    given = {
        "alibi_slopes": torch.rand(HEADS, device=served),
        "seqused_k": ints(served, [1, 2, 3]),
        "block_table": ints(served, [[0], [1], [2]]),
    }[name]
    call = torch_attention.flash_attention_forward
    with pytest.raises(NotImplementedError, match=f"{name}: .*no_grad"):
        call(q, k, v, cu_q, cu_k, 20, 40, 0.0, False, False, **{name: given})


@pytest.mark.parametrize(
    ("cu", "rest", "says"),
    [
        ((False, True), {}, "cum_seq_q: got None"),
        ((True, False), {}, "cum_seq_k: got None"),
        ((False, False), {"seqused_k": True}, "cum_seq_q: got None"),
    ],
)
def test_lengths_that_are_missing(served, cu, rest, says):
    q, k, v = (x.detach() for x in packed(served))
    cu_seqs = [ends(served, x) if given else None for x, given in zip((LENGTHS_Q, LENGTHS_K), cu)]
    rest = {name: ints(served, [1, 2, 3]) for name in rest}
    with pytest.raises(ValueError, match=says):
        ATEN._flash_attention_forward(q, k, v, *cu_seqs, 20, 40, 0.0, False, False, **rest)


# --- Compilers ------------------------------------------------------------------------------------


def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # (b, h, s, d)
    return SDPA(q * 2, k, v, 0.0, True)[0].transpose(1, 2).flatten(2)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled(served, backend):
    torch._dynamo.reset()
    q, k, v = leaves(served, *3 * [(2, HEADS, 16, HEAD_DIM)])
    out = torch.compile(layer, fullgraph=True, backend=backend)(q, k, v)
    expected = layer(q, k, v)
    torch.testing.assert_close(out, expected)
    same_gradients((q, k, v), out, expected)


def test_compiled_varlen(served):
    torch._dynamo.reset()
    if "enable_gqa" not in VARLEN:
        pytest.skip("this torch has no GQA here")
    q, k, v = packed(served)
    call = partial(varlen, window_size=(-1, 0))
    out, _ = torch.compile(call, fullgraph=True, backend="aot_eager")(q, k, v)
    expected, _ = call(q, k, v)
    assert_bitwise("out", out, expected)
    same_gradients((q, k, v), out, expected)


def test_exported(served):
    class Layer(torch.nn.Module):
        def forward(self, q, k, v):
            return layer(q, k, v)

    q, k, v = (x.detach() for x in leaves(served, *3 * [(2, HEADS, 16, HEAD_DIM)]))
    program = torch.export.export(Layer(), (q, k, v))
    assert SDPA.default in {node.target for node in program.graph.nodes}
    assert_bitwise("out", program.module()(q, k, v), layer(q, k, v))
