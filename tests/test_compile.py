"""The operations under torch's transformations: opcheck, compile, export, checkpointing."""

from __future__ import annotations

import copy
import functools
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import AotEagerAndRecordGraphs
from torch.library import opcheck
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import flash_attn

OPS = torch.ops.flash_attn
HEADS, HEAD_DIM = 4, 32
SCORES = (0.3, True, -1, -1, 0.0, None)  # scale, causal, window, softcap, alibi


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(params=["aot_eager", "inductor"])
def compiler(request) -> str:
    if request.param == "inductor" and shutil.which("c++") is None:
        pytest.skip("inductor needs a C++ compiler")
    return request.param


def leaf(device: str, *shape: int, grad: bool = True) -> Tensor:
    return torch.randn(*shape, device=device, dtype=torch.bfloat16, requires_grad=grad)


def qkv(device: str, *shape: int, heads_k: int = 2, grad: bool = True) -> list[Tensor]:
    return [leaf(device, *shape, h, HEAD_DIM, grad=grad) for h in (HEADS, heads_k, heads_k)]


def cu(device: str, *ends: int) -> Tensor:
    return torch.tensor([0, *ends], dtype=torch.int32, device=device)


# --- opcheck: schema, fake implementation, autograd, tracing ------------------------------------


def check(operation, args: tuple, kwargs: dict | None = None) -> None:
    """opcheck, after one plain call: opcheck would wrap the error of a missing kernel."""
    kwargs = kwargs or {}
    result = operation(*args, **kwargs)
    if isinstance(result, tuple) and result[0].requires_grad:
        result[0].float().sum().backward()
    opcheck(operation, args, kwargs)


def test_opcheck_forward(device, needs):
    q, k, v = qkv(device, 2, 5)
    with needs("backward"):
        check(OPS._flash_attn_forward.default, (q, k, v, 0.0, *SCORES, False))
    with needs("sinks", "dropout", "attn_probs", "backward"):
        s_aux = torch.randn(HEADS, device=device, requires_grad=True)
        rng_state = torch.tensor([3, 4], device=device)
        check(
            OPS._flash_attn_forward.default,
            (q, k, v, 0.5, *SCORES, True),
            {"s_aux": s_aux, "rng_state": rng_state, "deterministic": True},
        )


def test_opcheck_varlen_forward(device, needs):
    q, k, v = qkv(device, 9)
    lengths = (cu(device, 4, 9), cu(device, 4, 9), 5, 5)
    with needs("backward"):
        check(OPS._flash_attn_varlen_forward.default, (q, k, v, *lengths, 0.0, *SCORES))


@pytest.mark.parametrize("wanted", [(True, True, True), (False, True, False)])
def test_opcheck_backward(device, needs, wanted):
    q, k, v = qkv(device, 2, 5, grad=False)
    out, lse, _, _ = OPS._flash_attn_forward(q, k, v, 0.0, *SCORES, False)
    gradients = [torch.empty_like(x) if want else None for x, want in zip((q, k, v), wanted)]
    with needs("backward"):
        check(
            OPS._flash_attn_backward.default,
            (torch.randn_like(out), q, k, v, out, lse, *gradients, 0.0, *SCORES, False),
            {"dlse": torch.randn_like(lse)},
        )


def test_opcheck_varlen_backward(device, needs):
    q, k, v = qkv(device, 9, grad=False)
    lengths = (cu(device, 4, 9), cu(device, 4, 9), 5, 5)
    out, lse, _, _ = OPS._flash_attn_varlen_forward(q, k, v, *lengths, 0.0, *SCORES)
    gradients = [torch.empty_like(x) for x in (q, k, v)]
    dout = torch.randn_like(out)
    with needs("backward"):
        check(
            OPS._flash_attn_varlen_backward.default,
            (dout, q, k, v, out, lse, *gradients, *lengths, 0.0, *SCORES, False),
        )


def test_opcheck_kvcache(device, needs):
    q, k, v = qkv(device, 2, 3, grad=False)
    k_cache, v_cache = (leaf(device, 2, 16, 2, HEAD_DIM, grad=False) for _ in "kv")
    lengths = torch.tensor([2, 9], dtype=torch.int32, device=device)
    rest = (-1, -1, 0.0, True, None, 0)  # window, softcap, interleaved, alibi, splits
    with needs("kvcache"):
        check(
            OPS._flash_attn_with_kvcache.default,
            (q, k_cache, v_cache, k, v, None, None, lengths, None, None, None, 0.3, True, *rest),
        )


def test_opcheck_merge(device):
    out_a, out_b = (leaf(device, 2, 5, HEADS, HEAD_DIM, grad=False) for _ in "ab")
    lse_a, lse_b = (torch.randn(2, HEADS, 5, device=device) for _ in "ab")
    opcheck(OPS._merge_attention.default, (out_a, lse_a, out_b, lse_b))


# --- torch.compile ------------------------------------------------------------------------------


def assert_compiles(function, inputs: list[Tensor], compiler: str, dynamic: bool | None = None):
    """Outputs and gradients of the compiled function are those of the function."""
    compiled = torch.compile(function, backend=compiler, fullgraph=True, dynamic=dynamic)
    results = []
    for call in (function, compiled):
        outs = call(*inputs)
        outs = outs if isinstance(outs, tuple) else (outs,)
        torch.manual_seed(5)
        loss = sum((out.float() * torch.randn(out.shape, device=out.device)).sum() for out in outs)
        results.append((*outs, *torch.autograd.grad(loss, inputs)))
    for eager, ours in zip(*results):
        torch.testing.assert_close(ours, eager)


def test_compile_dense(device, needs, compiler):
    with needs("backward"):
        assert_compiles(
            lambda q, k, v: flash_attn.flash_attn_func(q, k, v, causal=True, return_lse=True),
            qkv(device, 2, 5), compiler,
        )  # fmt: skip


def test_compile_dynamic_shapes(device, needs):
    with needs("backward"):
        assert_compiles(
            lambda q, k, v: flash_attn.flash_attn_func(q * 2, k, v, window_size=(3, 0)),
            qkv(device, 2, 5), "aot_eager", dynamic=True,
        )  # fmt: skip


def dynamic_call(form: str, device: str, n: int) -> tuple:
    """A function, and its inputs for a length of n."""
    if form == "dense":
        return flash_attn.flash_attn_func, qkv(device, 2, n, grad=False)
    if form == "varlen":
        lengths = (cu(device, n - 3, 2 * n), cu(device, n - 3, 2 * n), 2 * n, 2 * n)
        return flash_attn.flash_attn_varlen_func, [*qkv(device, 2 * n, grad=False), *lengths]
    caches = [leaf(device, 2, 4 * n, 2, HEAD_DIM, grad=False) for _ in "kv"]
    used = torch.tensor([n, 3], dtype=torch.int32, device=device)
    q, k, v = qkv(device, 2, n, grad=False)
    return flash_attn.flash_attn_with_kvcache, [q, *caches, k, v, None, None, used]


@pytest.mark.parametrize("form", ["dense", "varlen", "kvcache"])
def test_one_graph_serves_other_lengths(device, needs, form):
    function, _ = dynamic_call(form, device, 5)
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=True)
    with needs(*["kvcache"] * (form == "kvcache")):
        for n, stance in ((5, "default"), (9, "fail_on_recompile"), (16, "fail_on_recompile")):
            _, inputs = dynamic_call(form, device, n)
            copies = [x.clone() if isinstance(x, Tensor) else x for x in inputs]
            with torch.compiler.set_stance(stance):
                ours = compiled(*copies, causal=True)
            torch.testing.assert_close(ours, function(*inputs, causal=True))


def test_compile_packed(device, needs, compiler):
    with needs("backward"):
        assert_compiles(
            lambda qkv: flash_attn.flash_attn_qkvpacked_func(qkv + 1, causal=True),
            [leaf(device, 2, 5, 3, HEADS, HEAD_DIM)], compiler,
        )  # fmt: skip


def test_compile_sinks(device, needs):
    sinks = torch.randn(HEADS, device=device, dtype=torch.bfloat16, requires_grad=True)
    with needs("sinks", "backward"):
        assert_compiles(
            lambda q, k, v, s: flash_attn.flash_attn_func(q, k, v, s_aux=s),
            [*qkv(device, 2, 5), sinks], "aot_eager",
        )  # fmt: skip


def test_compile_varlen(device, needs, compiler):
    ends = cu(device, 4, 9)
    with needs("backward"):
        assert_compiles(
            lambda q, k, v: flash_attn.flash_attn_varlen_func(q, k, v, ends, ends, 5, 5),
            qkv(device, 9), compiler,
        )  # fmt: skip


def test_compile_max_seqlen_as_tensor(device, needs):
    ends, longest = cu(device, 4, 9), torch.tensor(5)
    with needs("backward"), torch._dynamo.config.patch(capture_scalar_outputs=True):
        assert_compiles(
            lambda *x: flash_attn.flash_attn_varlen_func(*x, ends, ends, longest, longest),
            qkv(device, 9), "aot_eager",
        )  # fmt: skip


# max_seqlen as callers have it, from cu_seqlens: a number while running, unknown while tracing.
MAX_SEQLENS = {
    "item": lambda ends: (ends[1:] - ends[:-1]).max().item(),
    "tensor": lambda ends: (ends[1:] - ends[:-1]).max(),
    "host tensor": lambda ends: (ends[1:] - ends[:-1]).max().cpu(),
}


class Varlen(torch.nn.Module):
    def __init__(self, max_seqlen, **options):
        super().__init__()
        self.max_seqlen, self.options = max_seqlen, options

    def forward(self, q: Tensor, k: Tensor, v: Tensor, ends: Tensor) -> Tensor:
        longest = self.max_seqlen(ends)
        out = flash_attn.flash_attn_varlen_func(
            q, k, v, ends, ends, longest, longest, causal=True, **self.options
        )
        return out[2] if isinstance(out, tuple) else out


@pytest.mark.parametrize("kind", MAX_SEQLENS)
def test_compile_max_seqlen_from_data(device, needs, kind):
    ends = cu(device, 4, 9)
    module = Varlen(MAX_SEQLENS[kind], window_size=(2, 0))
    with needs("backward"), torch._dynamo.config.patch(capture_scalar_outputs=True):
        assert_compiles(lambda *x: module(*x, ends), qkv(device, 9), "aot_eager")


@pytest.mark.parametrize("kind", MAX_SEQLENS)
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_export_max_seqlen_from_data(device, needs, kind, strict):
    module = Varlen(MAX_SEQLENS[kind], return_attn_probs=True)
    inputs = qkv(device, 9, grad=False)
    with needs("attn_probs"), torch._dynamo.config.patch(capture_scalar_outputs=True):
        program = torch.export.export(module, (*inputs, cu(device, 4, 9)), strict=strict)
        for ends in (cu(device, 4, 9), cu(device, 2, 9)):
            torch.testing.assert_close(program.module()(*inputs, ends), module(*inputs, ends))


def test_compile_dropout_draws_anew(device, needs):
    inputs = qkv(device, 2, 40, grad=False)
    function = functools.partial(flash_attn.flash_attn_func, dropout_p=0.5)
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    with needs("dropout"):
        assert not torch.equal(compiled(*inputs), compiled(*inputs))


def raw_dropout(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return OPS._flash_attn_forward(q, k, v, 0.5, *SCORES, False)[0]


def test_equal_calls_draw_different_masks(device, needs, compiler):
    """Also of the operation itself, when it is not told the state: nothing merges the two."""
    compiled = torch.compile(
        lambda *x: (raw_dropout(*x), raw_dropout(*x)), backend=compiler, fullgraph=True
    )
    with needs("dropout", "backward"):
        first, second = compiled(*qkv(device, 2, 40))
        assert not torch.equal(first, second)


def test_recomputation_draws_the_same_mask(device, needs, compiler):
    """out is linear in v: with one mask, sum(out · dout) is sum(v · dv)."""
    q, k, v = qkv(device, 2, 40)
    compiled = torch.compile(
        lambda *x: checkpoint(raw_dropout, *x, use_reentrant=False),
        backend=compiler,
        fullgraph=True,
    )
    with needs("dropout", "backward"):
        out = compiled(q, k, v)
        dout = torch.randn_like(out)
        (dv,) = torch.autograd.grad(out, v, dout)
        ours, expected = ((a.double() * b.double()).sum() for a, b in ((v, dv), (out, dout)))
        torch.testing.assert_close(ours, expected, rtol=2**-8, atol=1.0)


def test_compile_kvcache_appends_in_place(device, needs, compiler):
    q, k, v = qkv(device, 2, 1, grad=False)
    caches = [leaf(device, 2, 16, 2, HEAD_DIM, grad=False) for _ in "kv"]

    def step(q, k_cache, v_cache, k, v, lengths):
        return flash_attn.flash_attn_with_kvcache(
            q, k_cache, v_cache, k, v, cache_seqlens=lengths, causal=True
        )

    with needs("kvcache"):
        for lengths in (torch.tensor([3, 0], dtype=torch.int32, device=device), 3):
            eager_caches = [x.clone() for x in caches]
            expected = step(q, *eager_caches, k, v, lengths)
            our_caches = [x.clone() for x in caches]
            compiled = torch.compile(step, backend=compiler, fullgraph=True)
            torch.testing.assert_close(compiled(q, *our_caches, k, v, lengths), expected)
            for ours, eager, before in zip(our_caches, eager_caches, caches):
                assert torch.equal(ours, eager)
                assert not torch.equal(ours, before)


@pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd:UserWarning")
def test_compiled_backward_stays_deterministic(device, needs):
    recorder = AotEagerAndRecordGraphs()
    function = functools.partial(flash_attn.flash_attn_func, deterministic=True)
    compiled = torch.compile(function, backend=recorder, fullgraph=True)
    with needs("backward"):
        compiled(*qkv(device, 2, 5)).sum().backward()
        (graph,) = recorder.bw_graphs
        # Wrapped, because it writes into its arguments: the operation is the first argument.
        (call,) = [
            n for n in graph.graph.nodes if n.args[:1] == (OPS._flash_attn_backward.default,)
        ]
        assert call.kwargs["deterministic"] is True


def test_compile_while_logging(device, monkeypatch):
    monkeypatch.setattr(flash_attn.backend, "LOG", True)
    inputs = qkv(device, 2, 5, grad=False)
    compiled = torch.compile(flash_attn.flash_attn_func, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(*inputs), flash_attn.flash_attn_func(*inputs))


def test_bad_input_raises_when_compiled(device):
    q, k, v = qkv(device, 2, 5, grad=False)
    compiled = torch.compile(flash_attn.flash_attn_func, backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match=r"k: got dtype torch\.float32"):
        compiled(q, k.float(), v)


# --- torch.export -------------------------------------------------------------------------------


class Attention(torch.nn.Module):
    """(batch, seqlen, 64) → (batch, seqlen, 2, 32), through a projection."""

    def __init__(self, dropout_p: float = 0.0):
        super().__init__()
        self.projection = torch.nn.Linear(64, 192)
        self.dropout_p = dropout_p

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.projection(x).unflatten(-1, (3, 2, HEAD_DIM))
        return flash_attn.flash_attn_qkvpacked_func(qkv, self.dropout_p, causal=True)


def attention(device: str, dropout_p: float = 0.0) -> tuple[Attention, Tensor]:
    module = Attention(dropout_p).to(device, torch.bfloat16)
    return module, leaf(device, 2, 5, 64)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_export(device, strict):
    module, x = attention(device)
    program = torch.export.export(
        module,
        (x,),
        dynamic_shapes=({1: torch.export.Dim("seqlen", min=2, max=64)},),
        strict=strict,
    )
    targets = [str(node.target) for node in program.graph.nodes]
    assert targets.count("flash_attn._flash_attn_forward.default") == 1
    longer = leaf(device, 2, 9, 64)
    torch.testing.assert_close(program.module()(longer), module(longer))
    torch.testing.assert_close(copy.deepcopy(program.module())(longer), module(longer))
    lowered = program.run_decompositions()
    torch.testing.assert_close(lowered.module()(longer), module(longer))


@pytest.fixture
def package(tmp_path, monkeypatch, device):
    """A path for AOTInductor, and settings by which its C++ compiles fast rather than runs fast."""
    if shutil.which("c++") is None:
        pytest.skip("AOTInductor needs a C++ compiler")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    fast = {
        "aot_inductor.compile_wrapper_opt_level": "O0",
        "aot_inductor.precompile_headers": False,
    }
    if device == "cuda":
        plain = [Path(__file__).with_name("plain_aot_inductor.py"), tmp_path / "plain.pt2"]
        if subprocess.run([sys.executable, *plain, json.dumps(fast)]).returncode:
            pytest.skip("AOTInductor does not load a model of torch alone here")
    return {"package_path": str(tmp_path / "model.pt2"), "inductor_configs": fast}


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_aot_inductor(device, package, request):
    """The program calls the operations by their schemas, in C++."""
    if "host" in request.node.callspec.params["device"]:
        pytest.skip("to compile it once more would say nothing new")
    module, x = attention(device)
    lengths = ({1: torch.export.Dim("seqlen", min=2, max=64)},)
    with torch.no_grad():
        program = torch.export.export(module, (x.detach(),), dynamic_shapes=lengths)
        path = torch._inductor.aoti_compile_and_package(program, **package)
        longer = leaf(device, 2, 9, 64, grad=False)
        torch.testing.assert_close(torch._inductor.aoti_load_package(path)(longer), module(longer))


# --- Activation checkpointing --------------------------------------------------------------------


def gradient(module: Attention, x: Tensor, wrap=lambda module, x: module(x)) -> Tensor:
    torch.manual_seed(3)
    x = x.detach().clone().requires_grad_()
    wrap(module, x).float().square().sum().backward()
    return x.grad


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
def test_checkpoint(device, needs, dropout_p, reentrant):
    module, x = attention(device, dropout_p)
    with needs("backward", *(["dropout"] if dropout_p else [])):
        wrapped = gradient(module, x, functools.partial(checkpoint, use_reentrant=reentrant))
        torch.testing.assert_close(wrapped, gradient(module, x), atol=0, rtol=0)


@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
def test_selective_checkpoint_keeps_the_operation(device, needs, dropout_p):
    module, x = attention(device, dropout_p)
    seen = []

    def policy(context, operation, *args, **kwargs):
        if operation is torch.ops.flash_attn._flash_attn_forward.default:
            seen.append(context.is_recompute)
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    with needs("backward", *(["dropout"] if dropout_p else [])):
        wrap = functools.partial(checkpoint, use_reentrant=False, context_fn=contexts)
        assert torch.equal(gradient(module, x, wrap), gradient(module, x))
        assert seen.count(False) == 1


@pytest.mark.parametrize("saved", [True, False])
@pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd:UserWarning")
def test_selective_checkpoint_when_compiled(device, needs, saved):
    """The backward's graph has the forward once more, unless the policy names it."""
    module, x = attention(device)
    forward = torch.ops.flash_attn._flash_attn_forward.default
    contexts = functools.partial(
        create_selective_checkpoint_contexts, [forward] if saved else [torch.ops.aten.mul.Tensor]
    )
    recorder = AotEagerAndRecordGraphs()

    @torch.compile(backend=recorder, fullgraph=True)
    def run(x: Tensor) -> Tensor:
        return checkpoint(module, x, use_reentrant=False, context_fn=contexts)

    with needs("backward"):
        torch.testing.assert_close(gradient(run, x, lambda f, x: f(x)), gradient(module, x))
        (graph,) = recorder.bw_graphs
        calls = [n for n in graph.graph.nodes if n.target is forward]
        assert len(calls) == (0 if saved else 1)


# --- CUDA graphs ----------------------------------------------------------------------------------


def test_cuda_graphs_of_a_compiled_step(cuda):
    """mode="reduce-overhead": a step is captured, replayed, and right with other values."""
    module, _ = attention(cuda)
    compiled = torch.compile(module, mode="reduce-overhead", fullgraph=True)
    for _ in range(4):
        x = leaf(cuda, 2, 5, 64)
        module.zero_grad()  # gradients lie in memory that the next replay writes
        torch.compiler.cudagraph_mark_step_begin()
        torch.testing.assert_close(gradient(compiled, x), gradient(module, x), rtol=2e-2, atol=2e-2)
