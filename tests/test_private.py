"""The names below the public functions that clients call: private functions, flash_attn_2_cuda."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

import flash_attn_2_cuda
from flash_attn import flash_attn_func, flash_attn_interface, flash_attn_varlen_func
from flash_attn.call import Options
from flash_attn.dispatch import private

SCORES = [
    "dropout_p", "softmax_scale", "causal", "window_size_left", "window_size_right", "softcap",
    "alibi_slopes",
]  # fmt: skip
LENGTHS = ["cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"]
PAGING = ["block_table", "leftpad_k", "seqused_k"]
GRADIENTS = ["dout", "q", "k", "v", "out", "softmax_lse", "dq", "dk", "dv"]

# Parameters in order, and the defaults of the last ones.
PRIVATE = {
    "_flash_attn_forward": (["q", "k", "v", *SCORES, "return_softmax"], None),
    "_flash_attn_varlen_forward": (
        ["q", "k", "v", *LENGTHS, *SCORES, "return_softmax", *PAGING, "zero_tensors"],
        (-1, -1, 0.0, None, False, None, None, None, False),
    ),
    "_flash_attn_backward": ([*GRADIENTS, *SCORES, "deterministic", "rng_state"], (None,)),
    "_flash_attn_varlen_backward": (
        [*GRADIENTS, *LENGTHS, *SCORES, "deterministic", "rng_state", "zero_tensors"],
        (None, False),
    ),
}

# Our names; what counts is the order, and that only the ones with "=" may be left out.
_WINDOW = "window_size_left window_size_right softcap"
CUDA_MODULE = {
    "fwd": "q k v out alibi_slopes p_dropout softmax_scale is_causal "
    f"{_WINDOW} return_softmax gen=",
    "varlen_fwd": "q k v out cu_seqlens_q cu_seqlens_k seqused_k leftpad_k block_table "
    "alibi_slopes max_seqlen_q max_seqlen_k p_dropout softmax_scale zero_tensors is_causal "
    f"{_WINDOW} return_softmax gen= num_splits=",
    "bwd": "dout q k v out softmax_lse dq dk dv alibi_slopes p_dropout softmax_scale is_causal "
    f"{_WINDOW} deterministic gen= rng_state=",
    "varlen_bwd": "dout q k v out softmax_lse dq dk dv cu_seqlens_q cu_seqlens_k alibi_slopes "
    f"max_seqlen_q max_seqlen_k p_dropout softmax_scale zero_tensors is_causal {_WINDOW} "
    "deterministic gen= rng_state=",
    "fwd_kvcache": "q k_cache v_cache k v cache_seqlens rotary_cos rotary_sin cache_batch_idx "
    f"cache_leftpad block_table alibi_slopes out softmax_scale is_causal {_WINDOW} "
    "is_rotary_interleaved num_splits",
}


@pytest.mark.parametrize("name", PRIVATE)
def test_private_signature(name):
    names, defaults = PRIVATE[name]
    function = getattr(flash_attn_interface, name)
    for readable in (function, function._init_fn):
        assert inspect.isfunction(readable)
        spec = inspect.getfullargspec(readable)
        assert spec.args == names
        assert spec.defaults == defaults
        assert spec.varargs is None
        assert spec.varkw is None


@pytest.mark.parametrize("name", PRIVATE)
def test_wrapped_names_are_the_operations(name):
    wrapped = getattr(flash_attn_interface, f"_wrapped{name}")
    assert wrapped is getattr(torch.ops.flash_attn, name)


@pytest.mark.parametrize("name", CUDA_MODULE)
def test_cuda_module_takes_its_arguments_by_position(name):
    parameters = inspect.signature(getattr(flash_attn_2_cuda, name)).parameters.values()
    assert all(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters)
    ours = [p.name + ("" if p.default is p.empty else "=") for p in parameters]
    assert ours == CUDA_MODULE[name].split()


def test_interface_names_the_cuda_module():
    assert flash_attn_interface.flash_attn_gpu is flash_attn_2_cuda


@pytest.mark.parametrize("first", ["flash_attn_2_cuda", "flash_attn.flash_attn_interface"])
def test_either_module_can_be_imported_first(first):
    program = f"import {first}, flash_attn_2_cuda; flash_attn_2_cuda.fwd"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# --- What they compute ----------------------------------------------------------------------------


def qkv(device: str, *shape: int) -> list[Tensor]:
    """q (*shape, 4, 32), k and v (*shape, 2, 32), leaves."""
    return [
        torch.randn(*shape, h, 32, device=device, dtype=torch.bfloat16, requires_grad=True)
        for h in (4, 2, 2)
    ]


def cu(device: str, *ends: int) -> Tensor:
    return torch.tensor([0, *ends], dtype=torch.int32, device=device)


def plain(*tensors: Tensor) -> list[Tensor]:
    return [x.detach() for x in tensors]


def strided(x: Tensor) -> Tensor:
    """A buffer like x with gaps between its rows, as ring attention hands in."""
    return x.new_full((*x.shape[:-1], x.shape[-1] + 8), 7.0)[..., : x.shape[-1]]


OPTIONS = (0.0, 0.3, True, -1, -1, 0.0, None)  # p, scale, causal, window, softcap, alibi


def test_forward_returns_four(device):
    q, k, v = qkv(device, 2, 7)
    expected = flash_attn_func(q, k, v, softmax_scale=0.3, causal=True, return_lse=True)
    out, lse, S_dmask, rng_state = flash_attn_interface._flash_attn_forward(
        q, k, v, *OPTIONS, False
    )
    assert torch.equal(out, expected[0])
    assert torch.equal(lse, expected[1])
    assert S_dmask.numel() == 0
    assert rng_state.shape == (0,)
    assert rng_state.dtype == torch.int64


def test_forward_has_the_largest_logits_of_rows(device):
    """Which ring attention adds up, whatever its caller asks for."""
    q, k, v = qkv(device, 2, 7)
    _, expected = flash_attn_func(q, k, v, return_max_logits="row")
    for wanted in (True, "row"):
        *_, found, _ = private.forward(q, k, v, Options(return_max_logits=wanted))
        assert torch.equal(found, expected)


def test_forward_by_keywords_read_from_the_signature(device):
    """As ring attention does: defaults from getfullargspec, None for what has none."""
    q, k, v = qkv(device, 9)
    spec = inspect.getfullargspec(flash_attn_interface._flash_attn_varlen_forward)
    defaults = (None,) * (len(spec.args) - len(spec.defaults)) + spec.defaults
    arguments = dict(zip(spec.args, defaults))
    ends = cu(device, 4, 9)
    arguments.update(
        q=q, k=k, v=v, cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen_q=5, max_seqlen_k=5,
        dropout_p=0.0, softmax_scale=0.3, causal=True,
    )  # fmt: skip
    out, lse, _, _ = flash_attn_interface._flash_attn_varlen_forward(**arguments)
    expected = flash_attn_varlen_func(
        q, k, v, ends, ends, 5, 5, softmax_scale=0.3, causal=True, return_lse=True
    )
    assert torch.equal(out, expected[0])
    assert torch.equal(lse, expected[1])


@pytest.mark.parametrize("name", ["leftpad_k", "seqused_k"])
def test_varlen_forward_checks_what_the_public_one_does_not_take(device, name):
    q, k, v = plain(*qkv(device, 9))
    ends = cu(device, 4, 9)
    with pytest.raises(ValueError, match=rf"{name}: got shape \(3,\); \(batch,\) = \(2,\)"):
        flash_attn_interface._flash_attn_varlen_forward(
            q, k, v, ends, ends, 5, 5, 0.0, 0.3, True, **{name: ends}
        )


def test_num_splits(device, needs):
    """The same result up to rounding, through both names; cu_seqlens_k is not looked at."""
    q, _, _ = plain(*qkv(device, 3))
    k, v = torch.randn(2, 8, 16, 2, 32, device=device).to(q.dtype)
    table = torch.arange(8, dtype=torch.int32, device=device).view(2, 4)
    used = torch.tensor([60, 33], dtype=torch.int32, device=device)
    ends, garbage = cu(device, 1, 3), torch.full((3,), -7, dtype=torch.int32, device=device)
    with needs("paged", "seqused_k"):
        results = []
        for num_splits in (0, 1, 3):
            for cu_k in (None, garbage):
                out, lse, *_ = flash_attn_interface._flash_attn_varlen_forward(
                    q, k, v, ends, cu_k, 2, 64, 0.0, 0.3, True, block_table=table, seqused_k=used,
                    num_splits=num_splits,
                )  # fmt: skip
                results.append((out, lse))
            out, lse, *_ = flash_attn_2_cuda.varlen_fwd(
                q, k, v, torch.empty_like(q), ends, None, used, None, table, None, 2, 64, 0.0, 0.3,
                False, True, -1, -1, 0.0, False, None, num_splits,
            )  # fmt: skip
            results.append((out, lse))
        for out, lse in results[1:]:
            torch.testing.assert_close(out, results[0][0])
            torch.testing.assert_close(lse, results[0][1])
        with pytest.raises(ValueError, match="num_splits: got -1; 0"):
            flash_attn_interface._flash_attn_varlen_forward(
                q, k, v, ends, garbage, 2, 64, 0.0, 0.3, True, block_table=table, seqused_k=used,
                num_splits=-1,
            )  # fmt: skip


def gradients(out: Tensor, dout: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    return list(torch.autograd.grad(out, inputs, dout))


def test_backward_writes_the_given_buffers(device, needs):
    q, k, v = qkv(device, 2, 7)
    out, lse = flash_attn_func(q, k, v, softmax_scale=0.3, causal=True, return_lse=True)
    dout = torch.randn_like(out)
    buffers = [strided(x.detach()) for x in (q, k, v)]
    with needs("backward"):
        expected = gradients(out, dout, [q, k, v])
        arguments = [dout, *plain(q, k, v, out, lse)]
        softmax_d = flash_attn_interface._flash_attn_backward(*arguments, *buffers, *OPTIONS, False)
        for ours, theirs in zip(buffers, expected):
            assert torch.equal(ours, theirs)
        torch.testing.assert_close(
            softmax_d, (dout.float() * out.float()).sum(-1).transpose(1, 2), atol=1e-2, rtol=1e-2
        )
        dv = strided(v.detach())
        flash_attn_interface._flash_attn_backward(*arguments, None, None, dv, *OPTIONS, False)
        assert torch.equal(dv, expected[2])


def test_varlen_backward_writes_the_given_buffers(device, needs):
    q, k, v = qkv(device, 9)
    lengths = (cu(device, 4, 9), cu(device, 4, 9), 5, 5)
    out, lse = flash_attn_varlen_func(
        q, k, v, *lengths, softmax_scale=0.3, causal=True, return_lse=True
    )
    dout = torch.randn_like(out)
    buffers = [strided(x.detach()) for x in (q, k, v)]
    with needs("backward"):
        expected = gradients(out, dout, [q, k, v])
        softmax_d = flash_attn_interface._flash_attn_varlen_backward(
            dout, *plain(q, k, v, out, lse), *buffers, *lengths, *OPTIONS, True
        )
        assert softmax_d.shape == lse.shape
        for ours, theirs in zip(buffers, expected):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dq": lambda x: x[:1]}, "dq: got shape (1, 7, 4, 32)"),
        ({"dv": lambda x: x.float()}, "dv: got dtype torch.float32"),
        ({"dout": lambda x: x[:, :3]}, "dout: got shape (2, 3, 4, 32)"),
        ({"out": lambda x: x.float()}, "out: got dtype torch.float32"),
        ({"softmax_lse": lambda x: x.transpose(1, 2)}, "softmax_lse: got shape (2, 7, 4)"),
        ({"softmax_lse": Tensor.half}, "softmax_lse: got dtype torch.float16; torch.float32 is"),
        ({"dlse": lambda x: x[:1]}, "dlse: got shape (1, 4, 7); (2, 4, 7) is needed"),
        ({"dlse": Tensor.half}, "dlse: got dtype torch.float16; torch.float32 is"),
        ({"ds_aux": lambda x: x[:3]}, "ds_aux: got shape (3,); (4,) is needed"),
        ({"ds_aux": Tensor.bfloat16}, "ds_aux: got dtype torch.bfloat16; torch.float32 is"),
        ({"s_aux": lambda x: None}, "ds_aux: got one without s_aux"),
        ({"rng_state": Tensor.float}, "rng_state: got torch.float32 of shape (2,); torch.int64"),
        ({"rng_state": lambda x: x[:0]}, "rng_state: got torch.int64 of shape (0,)"),
    ],
)
def test_backward_checks_its_tensors(device, change, message):
    q, k, v = plain(*qkv(device, 2, 7))
    lse = torch.zeros(2, 4, 7, device=device)
    arguments = {"dout": q, "q": q, "k": k, "v": v, "out": q, "softmax_lse": lse}
    arguments |= {"dq": q.clone(), "dk": k.clone(), "dv": v.clone(), "dlse": lse}
    arguments |= {name: torch.zeros(4, device=device) for name in ("s_aux", "ds_aux")}
    arguments["rng_state"] = torch.zeros(2, device=device, dtype=torch.int64)
    arguments |= dict(zip(SCORES, OPTIONS)) | {"dropout_p": 0.5, "deterministic": False}
    ((name, to_bad),) = change.items()
    arguments[name] = to_bad(arguments[name])
    with pytest.raises(ValueError) as raised:
        flash_attn_interface._flash_attn_backward(**arguments)
    assert message in str(raised.value)


def test_backward_with_dropout_needs_the_state(device):
    q, k, v = plain(*qkv(device, 2, 7))
    lse = torch.zeros(2, 4, 7, device=device)
    with pytest.raises(ValueError, match="rng_state: got None"):
        flash_attn_interface._flash_attn_backward(
            q, q, k, v, q, lse, None, None, None, 0.5, *OPTIONS[1:], False
        )


def test_nothing_is_padded_on_cuda():
    with FakeTensorMode():
        q, k, v = (torch.empty(1, 4, 2, 60, device="cuda", dtype=torch.half) for _ in "qkv")
        with pytest.raises(ValueError, match=r"head_dim 60 .* multiples of 8"):
            flash_attn_interface._flash_attn_forward(q, k, v, *OPTIONS, False)


# --- flash_attn_2_cuda ----------------------------------------------------------------------------


def test_fwd_and_bwd(device, needs):
    q, k, v = qkv(device, 2, 7)
    expected, expected_lse = flash_attn_func(
        q, k, v, softmax_scale=0.3, causal=True, return_lse=True
    )
    fixed = (0.3, True, -1, -1, 0.0)
    buffer = torch.empty_like(expected)
    results = flash_attn_2_cuda.fwd(*plain(q, k, v), buffer, None, 0.0, *fixed, False, None)
    assert isinstance(results, list)
    out, lse, S_dmask, rng_state = results
    assert out is buffer
    assert torch.equal(out, expected)
    assert torch.equal(lse, expected_lse)
    assert S_dmask.numel() == rng_state.numel() == 0
    dout = torch.randn_like(out)
    with needs("backward"):
        dk = torch.empty_like(k)
        results = flash_attn_2_cuda.bwd(
            dout, *plain(q, k, v), out, lse, None, dk, None, None, 0.0, *fixed, False, None, None
        )
        assert results[1] is dk
        assert results[3].shape == lse.shape
        for ours, theirs in zip(results, gradients(expected, dout, [q, k, v])):
            assert torch.equal(ours, theirs)


def test_out_is_checked(device):
    q, k, v = plain(*qkv(device, 2, 7))
    for out, message in ((q[:, :1], r"shape \(2, 1, 4, 32\)"), (q.double(), "float64")):
        with pytest.raises(ValueError, match=rf"out: got .*{message}.*; .* is needed"):
            flash_attn_2_cuda.fwd(q, k, v, out, None, *OPTIONS[:6], False)


def test_varlen_fwd_and_bwd(device, needs):
    q, k, v = qkv(device, 9)
    ends = cu(device, 4, 9)
    expected = flash_attn_varlen_func(q, k, v, ends, ends, 5, 5, softmax_scale=0.3, causal=True)
    fixed = (0.3, False, True, -1, -1, 0.0)
    out, lse, _, _ = flash_attn_2_cuda.varlen_fwd(
        *plain(q, k, v), None, ends, ends, None, None, None, None, 5, 5, 0.0, *fixed, False, None, 0
    )
    assert torch.equal(out, expected)
    dout = torch.randn_like(out)
    with needs("backward"):
        results = flash_attn_2_cuda.varlen_bwd(
            dout, *plain(q, k, v), out, lse, None, None, None, ends, ends, None, 5, 5, 0.0, *fixed,
            False, None, None,
        )  # fmt: skip
        for ours, theirs in zip(results, gradients(expected, dout, [q, k, v])):
            assert torch.equal(ours, theirs)


def test_varlen_fwd_uses_a_part_of_the_keys(device, needs):
    q, k, v = plain(*qkv(device, 9))
    ends, used = cu(device, 4, 9), torch.tensor([2, 3], dtype=torch.int32, device=device)
    fixed = (None, None, None, 5, 5, 0.0, 0.3, False, False, -1, -1, 0.0, False)
    with needs("seqused_k"):
        out, _, _, _ = flash_attn_2_cuda.varlen_fwd(q, k, v, None, ends, ends, used, *fixed)
        kept = torch.tensor([0, 1, 4, 5, 6], device=device)
        expected = flash_attn_varlen_func(
            q, k[kept], v[kept], ends, cu(device, 2, 5), 5, 3, softmax_scale=0.3
        )
        torch.testing.assert_close(out, expected)


def test_varlen_fwd_splits_without_pages(device):
    q, k, v = plain(*qkv(device, 9))
    ends = cu(device, 4, 9)
    fixed = (None, None, None, None, 5, 5, 0.0, 0.3, False, False, -1, -1, 0.0, False, None)
    results = [
        flash_attn_2_cuda.varlen_fwd(q, k, v, None, ends, ends, *fixed, splits)[:2]
        for splits in (0, 1)
    ]
    torch.testing.assert_close(*results)
    with pytest.raises(RuntimeError, match="num_splits: got 3 without block_table"):
        flash_attn_2_cuda.varlen_fwd(q, k, v, None, ends, ends, *fixed, 3)


@pytest.mark.parametrize("name", [n for n, names in CUDA_MODULE.items() if "gen=" in names])
def test_a_generator_raises(name):
    arguments = dict.fromkeys(re.findall(r"(\w+)", CUDA_MODULE[name]))
    arguments["gen"] = torch.Generator()
    said = r"gen: got a Generator; the `generator` argument is no longer supported.*manual_seed"
    with pytest.raises(RuntimeError, match=said):
        getattr(flash_attn_2_cuda, name)(**arguments)


def test_fwd_kvcache(device, needs):
    q, k, v = plain(*qkv(device, 2, 3))
    k_cache, v_cache = (torch.zeros(2, 16, 2, 32, device=device, dtype=q.dtype) for _ in "kv")
    used = torch.tensor([0, 0], dtype=torch.int32, device=device)
    buffer = torch.empty_like(q)
    with needs("kvcache"):
        out, lse = flash_attn_2_cuda.fwd_kvcache(
            q, k_cache, v_cache, k, v, used, None, None, None, None, None, None, buffer, 0.3, True,
            -1, -1, 0.0, True, 0,
        )  # fmt: skip
        assert out is buffer
        assert lse.shape == (2, 4, 3)
        assert torch.equal(k_cache[:, :3], k)
        expected = flash_attn_func(q, k, v, softmax_scale=0.3, causal=True)
        torch.testing.assert_close(out, expected)
