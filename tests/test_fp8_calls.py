"""Calls with a cache of 8-bit codes: what is refused, compilers, the direct path, gradients."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from compare import assert_bitwise
from fp8_cases import FP8, bits, codes, moved
from torch import Tensor
from torch.library import opcheck

import flash_attn
from flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from flash_attn.api import checks_fp8
from flash_attn.call import Descales, in_order
from flash_attn.dispatch import direct, ops
from flash_attn.flash_attn_interface import _flash_attn_varlen_forward

BF16 = torch.bfloat16
B, S, H, HK, D = 2, 16, 4, 2, 32


def randn(device, *shape: int, dtype=BF16) -> Tensor:
    return torch.randn(*shape, device=device).to(dtype)


def call_of(device) -> dict:
    """A call with an append, by name."""
    return {
        "q": randn(device, B, 1, H, D),
        "k_cache": codes(device, B, S, HK, D),
        "v_cache": codes(device, B, S, HK, D),
        "k": randn(device, B, 1, HK, D),
        "v": randn(device, B, 1, HK, D),
        "cache_seqlens": torch.tensor([3, 7], dtype=torch.int32, device=device),
    }


def pages_of(device) -> dict:
    """A packed call against pages, by name."""
    ends = torch.tensor([0, 1, 4], dtype=torch.int32, device=device)
    return {
        "q": randn(device, 4, H, D),
        "k": codes(device, 4, 8, HK, D),
        "v": codes(device, 4, 8, HK, D),
        "cu_seqlens_q": ends,
        "cu_seqlens_k": ends * 3,
        "max_seqlen_q": 3,
        "max_seqlen_k": 9,
        "block_table": torch.tensor([[3, 0], [1, 2]], dtype=torch.int32, device=device),
    }


# --- What is refused ------------------------------------------------------------------------------

# name → (what a call is changed to have, what the message has)
REFUSED = {
    "q": ({"q": codes("cpu", B, 1, H, D)}, r"q: got dtype .*e4m3fn; accepted on .* beside a KV"),
    "keys alone": (
        {"v_cache": randn("cpu", B, S, HK, D)},
        r"v_cache: got dtype torch.bfloat16; it must be that of k_cache, torch.float8_e4m3fn",
    ),
    "values alone": (
        {"k_cache": randn("cpu", B, S, HK, D)},
        r"k_cache: got dtype torch.bfloat16; it must be that of v_cache, torch.float8_e4m3fn",
    ),
    "another format": (
        {"k_cache": randn("cpu", B, S, HK, D).to(torch.float8_e5m2)},
        r"k_cache: got dtype torch.float8_e5m2; it must be that of",
    ),
    "new codes": ({"k": codes("cpu", B, 1, HK, D)}, r"k: got dtype .*e4m3fn; it must be that of q"),
    "zero": ({"k_descale": 0.0}, r"k_descale: got 0.0; a positive number \(of float32\)"),
    "negative": ({"v_descale": -1}, r"v_descale: got -1; a positive number"),
    "infinite": ({"v_descale": float("inf")}, r"v_descale: got inf; a positive number"),
    "nan": ({"k_descale": float("nan")}, r"k_descale: got nan; a positive number"),
    "too small": ({"k_descale": 1e-40}, r"k_descale: got 1e-40; a positive number"),
    "half": (
        {"k_descale": torch.ones(B, HK, dtype=BF16)},
        r"k_descale: got dtype torch.bfloat16; torch.float32 is needed",
    ),
    "a scalar": (
        {"k_descale": torch.ones(())},
        r"k_descale: got shape \(\); \(batch, heads_k\) = \(2, 2\) \(call .expand\)",
    ),
    "heads": ({"v_descale": torch.ones(B, H)}, r"v_descale: got shape \(2, 4\); .*\(2, 16, 2\)"),
    "rows": ({"v_descale": torch.ones(B, S)}, r"v_descale: got shape \(2, 16\); .*\(2, 16, 2\)"),
    "columns": ({"v_descale": torch.ones(B, S, HK, D)}, r"v_descale: got shape \(2, 16, 2, 32\)"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name, device):
    changes, said = REFUSED[name]
    call = call_of(device) | {key: moved(x, device) for key, x in changes.items()}
    before = {key: bits(call[key]) for key in ("k_cache", "v_cache") if call[key].dtype is FP8}
    with pytest.raises(ValueError, match=said):
        flash_attn_with_kvcache(**call)
    for key, old in before.items():
        assert_bitwise(f"{key} is as it was", bits(call[key]), old)


@pytest.mark.parametrize("value", [True, "1", [1.0]], ids=repr)
def test_no_number(value, device):
    with pytest.raises(TypeError, match=r"v_descale: got .*; a number is needed"):
        flash_attn_with_kvcache(**call_of(device), v_descale=value)


@pytest.mark.parametrize("name", ["k_descale", "v_descale"])
@pytest.mark.parametrize("value", [1.0, torch.ones(B, HK)], ids=["number", "tensor"])
def test_a_descale_without_codes(name, value, device):
    call = call_of(device)
    call |= {key: randn(device, B, S, HK, D) for key in ("k_cache", "v_cache")}
    said = rf"{name}: got one with a {name[0]} of torch.bfloat16; it scales the codes"
    with pytest.raises(ValueError, match=said):
        flash_attn_with_kvcache(**call, **{name: moved(value, device)})


def test_no_codes_without_a_cache(device):
    q, k = randn(device, B, S, HK, D), codes(device, B, S, HK, D)
    ends = torch.tensor([0, S, 2 * S], dtype=torch.int32, device=device)
    said = r"k: got dtype torch.float8_e4m3fn; .* read from a KV cache, by flash_attn_with_kvcache"
    with pytest.raises(ValueError, match=said):
        flash_attn_func(q, k, k)
    flat = k.flatten(0, 1)
    with pytest.raises(ValueError, match=said):
        flash_attn_varlen_func(q.flatten(0, 1), flat, flat, ends, ends, S, S)
    with pytest.raises(ValueError, match=said.replace("k: got", "v: got")):
        flash_attn_func(q, q, k)
    rows = q.flatten(0, 1)
    with pytest.raises(ValueError, match=r"k_descale: got one with a k of torch.bfloat16"):
        flash_attn_varlen_func(rows, rows, rows, ends, ends, S, S, k_descale=0.5)


def test_one_memory_for_keys_and_values(device):
    """Their descales may differ."""
    call = call_of(device)
    call |= {"v_cache": call["k_cache"], "v": call["k"]}
    with pytest.raises(ValueError, match="v_cache: got the memory of k_cache"):
        flash_attn_with_kvcache(**call)


# --- Operations -----------------------------------------------------------------------------------

SCHEMA = ("k_descale", "v_descale", "k_descale_all", "v_descale_all")


@pytest.mark.parametrize("operation", [ops.with_kvcache, ops.varlen_forward], ids=str)
def test_the_arguments_before_the_last(operation):
    """Which is qv, of latent caches."""
    arguments = operation.default._schema.arguments[-5:-1]
    assert tuple(a.name for a in arguments) == SCHEMA == Descales._fields
    assert all(a.kwarg_only for a in arguments)
    assert tuple(a.default_value for a in arguments) == checks_fp8.NO_DESCALES


@pytest.fixture
def asked(monkeypatch) -> list:
    """These arguments of each direct call, none of which is served."""
    calls = []

    def refuse(*args):
        calls.append(args[-5:-1])
        return NotImplemented

    entries = {
        operation: (refuse, in_order(operation.default._schema))
        for operation in (ops.with_kvcache, ops.varlen_forward)
    }
    monkeypatch.setattr(direct, "enabled", True)
    monkeypatch.setattr(direct, "_functions", entries)
    return calls


def test_direct_calls_have_them_by_position(asked):
    heads, rows = torch.ones(B, HK), torch.ones(B, S, HK)
    flash_attn_with_kvcache(**call_of("cpu"))
    flash_attn_with_kvcache(**call_of("cpu"), k_descale=heads, v_descale=0.5)
    flash_attn_with_kvcache(**call_of("cpu"), k_descale=2, v_descale=rows)
    flash_attn_varlen_func(**pages_of("cpu"), k_descale=heads, v_descale=0.25)
    expected = [(None, None, 1.0, 1.0), (heads, None, 1.0, 0.5), (None, rows, 2.0, 1.0)]
    expected.append((heads, None, 1.0, 0.25))
    assert len(asked) == len(expected)
    for got, wanted in zip(asked, expected, strict=True):
        assert all(x is y if isinstance(y, Tensor) else x == y for x, y in zip(got, wanted))
        assert type(got[2]) is type(got[3]) is float


def test_a_tensor_times_the_number_for_all(device):
    """Operations take both at once."""
    call, other = call_of(device), call_of(device)
    other |= {key: call[key].clone() for key in call}
    order = [a.name for a in ops.with_kvcache.default._schema.arguments if not a.kwarg_only]
    default = {"softmax_scale": 0.2, "causal": True, "window_size_left": -1,
               "window_size_right": -1, "softcap": 0.0, "rotary_interleaved": True,
               "num_splits": 0}  # fmt: skip
    heads = torch.tensor([[0.5, 1.0], [2.0, 4.0]], device=device)

    def run(call, **descales):
        given = call | default
        return ops.with_kvcache(*(given.get(name) for name in order), **descales)

    out, _ = run(call, k_descale=heads, v_descale=heads, k_descale_all=2.0, v_descale_all=0.25)
    same, _ = run(other, k_descale=heads * 2, v_descale=heads / 4)
    assert_bitwise("out", out, same)
    for name in ("k_cache", "v_cache"):
        assert_bitwise(name, bits(call[name]), bits(other[name]))


@pytest.mark.parametrize("kind", ["number", "tensor"])
def test_opcheck(kind, device):
    call = call_of(device)
    heads = torch.tensor([[0.5, 1.0], [2.0, 4.0]], device=device)
    descales = {"k_descale": heads} if kind == "tensor" else {"v_descale_all": 0.5}
    args = [call[name] for name in ("q", "k_cache", "v_cache")]
    # Without new keys, and without a look at what is written: torch.allclose takes no codes.
    check = partial(
        opcheck,
        test_utils=("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"),
    )
    args += [None] * 4 + [call["cache_seqlens"], None, None, None, 0.3, True, -1, -1, 0.0, True]
    check(ops.with_kvcache.default, (*args, None, 0), descales)
    pages = pages_of(device)
    table = pages.pop("block_table")
    rest = (0.0, 0.3, True, -1, -1, 0.0, None, False, table)
    check(ops.varlen_forward.default, (*pages.values(), *rest), descales)


@pytest.mark.parametrize("kind", ["number", "head", "row"])
def test_compiled(kind, device):
    descale = {"number": 0.5, "head": torch.full((B, HK), 0.5, device=device),
               "row": torch.full((B, S, HK), 0.5, device=device)}[kind]  # fmt: skip
    torch._dynamo.reset()

    def step(call, descale):
        return flash_attn_with_kvcache(**call, k_descale=descale, v_descale=descale, causal=True)

    call = call_of(device)
    eager = {name: x.clone() for name, x in call.items()}
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(call, descale), step(eager, descale))
    for name in ("k_cache", "v_cache"):
        assert_bitwise(name, bits(call[name]), bits(eager[name]))

    def packed(call, descale):
        return flash_attn_varlen_func(**call, k_descale=descale, v_descale=descale, causal=True)

    if kind == "row":
        descale = torch.full((4, 8, HK), 0.5, device=device)
    pages = pages_of(device)
    compiled = torch.compile(packed, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(pages, descale), packed(pages, descale))


def test_no_gradient(device):
    call, descale = call_of(device), torch.ones(B, HK, device=device, requires_grad=True)
    out = flash_attn_with_kvcache(**call, k_descale=descale)
    assert not out.requires_grad
    pages = pages_of(device)
    pages["q"].requires_grad_()
    out = flash_attn_varlen_func(**pages, k_descale=descale)
    with pytest.raises(NotImplementedError, match="no backward through block_table"):
        out.sum().backward()


def test_an_append_counts_as_a_write(device):
    call = call_of(device)
    before = call["k_cache"]._version
    flash_attn_with_kvcache(**call, k_descale=0.5)
    assert call["k_cache"]._version == before + 1


def test_rows_of_no_sequence_have_no_descale(device):
    """They are zeros, whatever lies behind the descales of the last sequence."""
    call = pages_of(device)
    call["q"] = randn(device, 40, H, D)  # of which sequences have 4
    around = torch.full((B + 4, HK), float("nan"), device=device)
    around[:B] = 0.5
    out, lse = flash_attn_varlen_func(
        **call, causal=True, k_descale=around[:B], v_descale=around[:B], return_lse=True
    )
    assert not out[4:].any()
    assert (lse[:, 4:] == float("-inf")).all()
    assert out[:4].isfinite().all()


@pytest.mark.parametrize("longest", [0, 1, 3])
def test_a_longest_sequence_that_is_wrong(longest, device, request):
    """The result is right, whatever is said of the lengths; another kernel may serve the call."""
    call = pages_of(device)
    right = flash_attn_varlen_func(**call, causal=True, k_descale=0.5)
    call["max_seqlen_q"] = longest
    if longest < 3 and request.node.callspec.params["device"] == "cpu":  # which looks at lengths
        with pytest.raises(ValueError, match=r"max_seqlen_q: got .*; the longest sequence"):
            flash_attn_varlen_func(**call, causal=True, k_descale=0.5)
        return
    out = flash_attn_varlen_func(**call, causal=True, k_descale=0.5)
    torch.testing.assert_close(out.double(), right.double(), rtol=2**-6, atol=2**-8)


def test_sequences_without_keys_have_no_descale(device):
    """They are zeros, whatever stands where their descales would be."""
    call = call_of(device)
    del call["k"], call["v"]
    call["cache_seqlens"] = torch.tensor([-1, 7], dtype=torch.int32, device=device)
    descale = torch.tensor([[float("nan")] * HK, [0.5] * HK], device=device)
    out = flash_attn_with_kvcache(**call, k_descale=descale, v_descale=descale)
    assert not out[0].any()
    assert out[1].isfinite().all()


def test_the_private_function_takes_them(device):
    pages = pages_of(device)
    table = pages.pop("block_table")
    rest = {"dropout_p": 0.0, "softmax_scale": D**-0.5, "causal": True, "block_table": table}
    out, *_ = _flash_attn_varlen_forward(**pages, **rest, k_descale=0.5, v_descale=2.0)
    public = flash_attn_varlen_func(**pages, block_table=table, causal=True, k_descale=0.5,
                                    v_descale=2.0)  # fmt: skip
    assert_bitwise("out", out, public)


def test_explained():
    call = call_of("cpu")
    choice = flash_attn.explain_call(flash_attn_with_kvcache, **call, k_descale=0.5)
    assert "cache of float8_e4m3fn" in str(choice)
    explain = partial(flash_attn.explain_call, flash_attn_varlen_func, **pages_of("cpu"))
    assert "cache of float8_e4m3fn" in str(explain(v_descale=torch.ones(B, HK)))
    with pytest.raises(ValueError, match="v_descale: got shape"):
        explain(v_descale=torch.ones(B, H))
