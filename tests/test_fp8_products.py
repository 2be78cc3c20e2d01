"""``fp8_products``: which calls may multiply codes as they are, and which of them do."""

from __future__ import annotations

import pytest
import torch
from cases import BF16, Case
from coded_cases import (
    HK,
    B,
    D,
    H,
    S,
    call_of,
    dense_of,
    make_coded,
    pack_coded,
    packed_of,
    pages_of,
)
from compare import assert_bitwise
from fp8_cases import FP8, codes
from reference import attention_ref
from torch import Tensor
from torch._subclasses import FakeTensorMode

import flash_attn
import flash_attn_interface as fa3
from flash_attn import flash_attn_func, flash_attn_varlen_func
from flash_attn.call import Descales, Forward, Keys, Lengths, Scoring
from flash_attn.dispatch import encode, fp8, run
from flash_attn.fp8 import attention

CALLS = [(flash_attn_func, dense_of), (flash_attn_varlen_func, packed_of),
         (flash_attn_varlen_func, pages_of)]  # fmt: skip
of_calls = pytest.mark.parametrize(
    ("function", "inputs"), CALLS, ids=[inputs.__name__ for _, inputs in CALLS]
)


# --- What is refused ------------------------------------------------------------------------------


def test_fp8_products_is_a_flag(device):
    for q in (codes(device, B, S, HK, D), torch.zeros(B, S, HK, D, device=device, dtype=BF16)):
        for x in (1, "yes", None):
            with pytest.raises(TypeError, match=r"^fp8_products: got .*; True or False is needed"):
                flash_attn_func(q, q, q, fp8_products=x)
        flash_attn_func(q, q, q, fp8_products=False)
    for name in ("flash_attn_qkvpacked_func", "flash_attn_with_kvcache"):
        with pytest.raises(TypeError, match="flash_attn_func takes 'fp8_products'"):
            getattr(flash_attn, name)(q, q, q, fp8_products=True)


@of_calls
def test_a_cpu_ignores_it(function, inputs):
    call, given = inputs("cpu"), {"k_descale": 0.5, "causal": True, "return_lse": True}
    for ours, plain in zip(
        function(**call, **given, fp8_products=True), function(**call, **given), strict=True
    ):
        assert_bitwise("result", ours, plain)


def test_a_cpu_ignores_it_from_16_bits():
    q, k, v = torch.randn(3, B, S, H, D).to(BF16)
    assert_bitwise("out", attention(q, k, v, fp8_products=True), attention(q, k, v))


def test_from_16_bits_it_is_a_flag_too():
    q = torch.zeros(B, S, H, D, dtype=BF16)
    with pytest.raises(TypeError, match=r"^fp8_products: got 1; True or False is needed"):
        attention(q, q, q, fp8_products=1)


@of_calls
def test_explained_on_a_cpu(function, inputs):
    said = flash_attn.explain_call(function, **inputs("cpu"), fp8_products=True)
    assert (said.operation, said.backend) == ("_flash_attn_fp8_forward", "cpu")
    assert "float32" in said.kernel
    given = {"fp8_products": True, "return_max_logits": True}
    with pytest.raises(NotImplementedError, match="return_max_logits: got True; attention of cod"):
        flash_attn.explain_call(function, **inputs("cpu"), **given)


def test_explained_for_other_queries():
    q = torch.zeros(B, S, H, D, dtype=BF16)
    with pytest.raises(ValueError, match=r"^fp8_products: got True with a q of torch.bfloat16"):
        flash_attn.explain_call(flash_attn_func, q, q, q, fp8_products=True)
    assert "cpu" in str(flash_attn.explain_call(flash_attn_func, q, q, q, fp8_products=False))


# --- Results --------------------------------------------------------------------------------------


def takes_kernel(call: dict) -> bool:
    has_kernel = fp8._on_gpu(call["q"]) and fp8.has_kernel and fp8.is_hopper(call["q"].device)
    return has_kernel and max(call["q"].shape[-1], call["v"].shape[-1]) <= 256


CASES = [
    Case(sq=70, sk=300, d=64), Case(sq=40, sk=200, d=40, causal=True),
    Case(sq=50, sk=50, d=128, dv=72, causal=True, window=(20, 0)),
    Case(b=1, sq=60, sk=90, d=256, softcap=15.0), Case(b=1, sq=30, sk=40, d=264),
    Case(sq=60, sk=150, d=96, alibi="bh", sinks=True),
]  # fmt: skip


@pytest.mark.parametrize("kind", ["none", "number", "head"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_within_the_bound_of_the_docs(case, kind, device):
    x, coded = make_coded(case, kind, device)
    options = {
        "softcap": case.softcap, "alibi_slopes": x.alibi_slopes, "s_aux": x.s_aux,
        "return_lse": True, **case.mask_kwargs(), **coded.descales,
    }  # fmt: skip
    out, lse = flash_attn_func(**coded.codes, **options, fp8_products=True)
    numbers = coded.numbers.values()
    expected, expected_lse, p = attention_ref(*numbers, s_aux=x.s_aux, **case.reference_kwargs(x))[
        :3
    ]
    *_, v = numbers
    v = v.abs().repeat_interleave(case.h // case.hk, 2)
    largest = p.amax(-1, keepdim=True)  # in a row, so no less than in a block
    # A score that is off by little, and the log-sum-exp with it, changes P by as much of itself.
    of_scores = 2 * 2.0**-10 * max(1.0, expected_lse[expected_lse.isfinite()].abs().max())
    change = torch.einsum("bhqk,bkhd->bqhd", p * (1 / 16 + of_scores) + largest * 2.0**-18, v)
    rounding = torch.finfo(out.dtype).eps * expected.abs() + 1e-6
    assert ((out - expected).abs() <= change + rounding).all()
    assert error(out, expected) < 0.04
    torch.testing.assert_close(lse.double(), expected_lse, atol=4e-3, rtol=4e-3)
    if takes_kernel(coded.codes):
        plain, _ = flash_attn_func(**coded.codes, **options)
        assert not torch.equal(out, plain)


def error(out: Tensor, expected: Tensor) -> float:
    return float((out.double() - expected).norm() / expected.double().norm())


@pytest.mark.parametrize("paged", [False, True])
def test_packed_and_paged(paged, device):
    ends = torch.tensor([0, 40, 90], dtype=torch.int32, device=device)
    call = {
        "q": codes(device, 90, H, 64), "k": codes(device, 90, HK, 64),
        "v": codes(device, 90, HK, 64), "cu_seqlens_q": ends, "cu_seqlens_k": ends,
        "max_seqlen_q": 50, "max_seqlen_k": 50, "v_descale": 0.5,
    }  # fmt: skip
    if paged:
        call["k"], call["v"] = (codes(device, 8, 16, HK, 64) for _ in "kv")
        call["block_table"] = torch.randperm(8).view(2, 4).int().to(device)
    plain = flash_attn_varlen_func(**call, causal=True)
    out = flash_attn_varlen_func(**call, causal=True, fp8_products=True)
    assert error(out, plain) < 0.04
    assert torch.equal(out, plain) == (not takes_kernel(call))


# --- Compilers ------------------------------------------------------------------------------------


@of_calls
@pytest.mark.parametrize("kernel", [False, True])
def test_compiled(function, inputs, kernel, monkeypatch):
    """kernel: as on a Hopper GPU, by what decides there; the operation itself is the CPU's."""
    if kernel:
        monkeypatch.setattr(fp8, "_on_gpu", lambda q: True)
        monkeypatch.setattr(fp8, "has_kernel", True)
        monkeypatch.setattr(fp8, "is_hopper", lambda device: True)
        monkeypatch.setattr(fp8, "_DECODED_ROWS", 0)
    torch._dynamo.reset()

    def call(given):
        return function(**given, causal=True, return_lse=True, fp8_products=True)

    given = inputs("cpu")
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for ours, plain in zip(compiled(given), call(given), strict=True):
        torch.testing.assert_close(ours, plain)


@pytest.mark.parametrize("kernel", [False, True])
def test_tensors_without_data(kernel, monkeypatch):
    """Of a GPU: what the call returns has the same shape and dtype whatever serves it."""
    monkeypatch.setattr(fp8, "has_kernel", kernel)
    monkeypatch.setattr(fp8, "is_hopper", lambda device: kernel)
    with FakeTensorMode():
        q, k, v = on_gpu(B, S, H, D), on_gpu(B, S, HK, D), on_gpu(B, S, HK, 64)
        out, lse = flash_attn_func(q, k, v, return_lse=True, fp8_products=True)
        assert (out.shape, out.dtype, out.device.type) == ((B, S, H, 64), BF16, "cuda")
        assert (lse.shape, lse.dtype) == ((B, H, S), torch.float32)
        call = gpu_pages()
        out = flash_attn_varlen_func(**call, fp8_products=True, out_dtype=torch.float16)
        assert (out.shape, out.dtype) == (call["q"].shape, torch.float16)


# --- Kernel or none -------------------------------------------------------------------------------


@pytest.fixture
def ways(monkeypatch) -> list:
    """Which way each call took, and its arguments; none is computed."""
    taken = []

    def operation(given, *args):
        taken.append((given._schema.name.split("::")[1], args))
        return results_of(args[0], args[2])

    def ordinary(call):
        taken.append(("ordinary", call))
        return results_of(call.q, call.v)

    def results_of(q, v):
        *batch, rows, heads, _ = q.shape
        out = q.new_empty(*q.shape[:-1], v.shape[-1], dtype=BF16)
        return out, q.new_empty(*batch, heads, rows, dtype=torch.float32)

    monkeypatch.setattr(run, "without_gradient", operation)
    monkeypatch.setattr(fp8, "by_ordinary_forward", ordinary)
    return taken


@pytest.mark.parametrize("permitted", [False, True])
@pytest.mark.parametrize("has_kernel", [False, True])
@pytest.mark.parametrize("hopper", [False, True])
def test_what_serves_a_gpu(has_kernel, hopper, permitted, ways, monkeypatch):
    monkeypatch.setattr(fp8, "has_kernel", has_kernel)
    monkeypatch.setattr(fp8, "is_hopper", lambda device: hopper)
    with FakeTensorMode():
        for columns in (D, 250, 256):
            q = on_gpu(B, S, H, columns)
            fp8.forward(call_of({"q": q, "k": q, "v": q}, fp8_products=permitted))
            fp8.forward(call_of(gpu_pages(columns=columns - columns % 16), fp8_products=permitted))
    served = "_flash_attn_fp8_forward" if has_kernel and hopper and permitted else "ordinary"
    assert {way for way, _ in ways} == {served}
    assert len(ways) == 6


#: Of calls that are permitted and that kernels do not take, what differs from one they take.
WITHOUT_KERNEL = {
    "few rows": {"longest": fp8._DECODED_ROWS * HK // H},  # which are decoded
    "columns": {"columns": 264},
    "columns of v": {"columns_v": 272},
    "odd columns": {"columns": 24},  # pages are not copied
    "size of pages": {"size": 9},
    "odd rows": {"apart": 8},
}


def on_gpu(*shape: int, apart: int = 0) -> Tensor:
    """Without data. apart: codes between rows."""
    *others, columns = shape
    strides = torch.empty(*others, columns + apart, device="meta").stride()
    return torch.empty_strided(shape, strides, dtype=FP8, device="cuda")


def gpu_pages(
    columns: int = D, columns_v: int | None = None, size: int = 16, apart: int = 0,
    longest: int = fp8._DECODED_ROWS * HK // H + 1,
) -> dict:  # fmt: skip
    """A call against pages, by name."""
    ends = torch.empty(3, dtype=torch.int32, device="cuda")
    return {
        "q": on_gpu(2 * longest, H, columns), "k": on_gpu(4, size, HK, columns, apart=apart),
        "v": on_gpu(4, size, HK, columns_v or columns), "cu_seqlens_q": ends,
        "cu_seqlens_k": ends, "max_seqlen_q": longest, "max_seqlen_k": 32,
        "block_table": torch.empty(2, 2, dtype=torch.int32, device="cuda"),
    }  # fmt: skip


@pytest.mark.parametrize("name", [None, *WITHOUT_KERNEL])
def test_pages_without_a_kernel(name, ways, monkeypatch):
    monkeypatch.setattr(fp8, "has_kernel", True)
    monkeypatch.setattr(fp8, "is_hopper", lambda device: True)
    with FakeTensorMode():
        given = {} if name is None else WITHOUT_KERNEL[name]
        fp8.forward(call_of(gpu_pages(**given), fp8_products=True))
    ((way, _),) = ways
    assert way == ("_flash_attn_fp8_forward" if name is None else "ordinary")


@pytest.mark.parametrize("columns", [(264, 264), (64, 272), (320, 64)], ids=str)
def test_wide_heads_have_no_kernel(columns, ways, monkeypatch):
    monkeypatch.setattr(fp8, "has_kernel", True)
    monkeypatch.setattr(fp8, "is_hopper", lambda device: True)
    with FakeTensorMode():
        q, v = (on_gpu(B, S, H, n) for n in columns)
        fp8.forward(call_of({"q": q, "k": q, "v": v}, fp8_products=True))
    assert [way for way, _ in ways] == ["ordinary"]


@pytest.mark.parametrize("permitted", [False, True])
def test_public_functions_pass_it_on(permitted, ways, monkeypatch):
    monkeypatch.setattr(fp8, "_on_gpu", lambda q: True)
    monkeypatch.setattr(fp8, "why_no_products", lambda call, hopper: "")
    given = {"fp8_products": permitted, "causal": True}
    dense, packed = dense_of("cpu"), packed_of("cpu")
    x = dense["q"].to(BF16)
    calls = [
        (flash_attn_func, dense), (flash_attn_varlen_func, packed),
        (flash_attn_varlen_func, pages_of("cpu")), (attention, {"q": x, "k": x, "v": x}),
        (fa3.flash_attn_func, dense), (fa3.flash_attn_varlen_func, packed),
        (fa3.flash_attn_qkvpacked_func, {"qkv": codes("cpu", B, S, 3, H, D)}),
        (fa3.flash_attn_with_kvcache, {"q": dense["q"], "k_cache": dense["k"],
                                       "v_cache": dense["v"]}),
        (fa3._flash_attn_forward, dense),
    ]  # fmt: skip
    for function, call in calls:
        function(**call, **given)
    served = "_flash_attn_fp8_forward" if permitted else "ordinary"
    assert [way for way, _ in ways] == [served] * len(calls)


def test_a_kernel_gets_rows_that_it_can_load(ways, monkeypatch):
    monkeypatch.setattr(fp8, "why_no_products", lambda call, hopper: "")
    with FakeTensorMode():
        like = {"dtype": FP8, "device": "cuda"}
        q = torch.empty(B, S, H, 40, **like)
        k, v = (
            torch.empty_strided((B, S, HK, d), (S * HK * 72, HK * 72, 72, 1), **like)
            for d in (40, 64)
        )
        fp8.forward(call_of({"q": q, "k": k, "v": v}, fp8_products=True))
    ((_, args),) = ways
    assert [x.shape[-1] for x in args[:3]] == [48, 48, 64]
    assert all(x.is_contiguous() for x in args[:3])


# --- Queries of 16 bits against pages of codes ----------------------------------------------------

LONG = fp8._DECODED_ROWS * HK // H + 1


def chunk(dtype=BF16, longest: int = LONG, **more) -> Forward:
    inputs = gpu_pages(longest=longest)
    lengths = Lengths(*(inputs[name] for name in Lengths._fields))
    scoring = Scoring(0.0, 0.3, True, -1, -1, 0.0, None, None)
    q = torch.empty(inputs["q"].shape, dtype=dtype, device="cuda")
    call = Forward(q, inputs["k"], inputs["v"], scoring, lengths, Keys(inputs["block_table"]))
    return call._replace(**more)


@pytest.fixture
def products(ways, monkeypatch):
    monkeypatch.setattr(fp8, "has_kernel", True)
    monkeypatch.setattr(fp8, "is_hopper", lambda device: True)
    monkeypatch.setattr(fp8, "predicted_us", lambda call, gpu: (2.0, 1.0))
    monkeypatch.setattr(encode, "make_query_codes", _query_codes)
    return ways


def _query_codes(q, cu_seqlens_q, heads_kv):
    return torch.ops.flash_attn._make_query_codes(q, cu_seqlens_q, heads_kv)


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_queries_become_codes(dtype, products):
    with FakeTensorMode():
        k_descale = torch.empty(2, HK, device="cuda")
        descales = Descales(k_descale, None, 1.0, 0.5)
        coded = fp8.with_codes_of_queries(chunk(dtype, descales=descales))
        assert (coded.q.dtype, coded.fp16_out) == (FP8, dtype is torch.float16)
        assert coded.descales.q_descale.shape == (2, HK)
        assert coded.descales[1:] == (k_descale, None, 1.0, 1.0, 0.5)
        fp8.forward(coded)
    assert [way for way, _ in products] == ["_flash_attn_fp8_forward"]


def not_rounded() -> dict:
    """What differs from a call whose queries are rounded."""
    of_rows = torch.empty(4, 16, HK, device="cuda")
    scoring = chunk().scoring
    return {
        "few rows": {"longest": LONG - 1},
        "short sequences": {"q": torch.empty(2 * LONG - 4, H, D, dtype=BF16, device="cuda")},
        "descales of rows": {"descales": Descales(of_rows)},
        "dropout": {"scoring": scoring._replace(dropout_p=0.1)},
        "probabilities": {"return_softmax": True},
        "largest logits": {"return_max_logits": True},
        "batch invariant": {"batch_invariant": True},
        "gradient": {"q": chunk().q.requires_grad_()},
        "gradient of sinks": {"scoring": scoring._replace(
            s_aux=torch.empty(H, device="cuda", requires_grad=True))},
        "float32": {"q": chunk(torch.float32).q},
        "strides": {"q": torch.empty_strided(
            (2 * LONG, H, D), (H * (D + 1), D + 1, 1), dtype=BF16, device="cuda")},
        "left padding": {"keys": chunk().keys._replace(
            leftpad_k=torch.empty(2, dtype=torch.int32, device="cuda"))},
    }  # fmt: skip


def test_queries_that_stay(products):
    with FakeTensorMode():
        for name, change in not_rounded().items():
            assert fp8.with_codes_of_queries(chunk(**change)) is None, name


@pytest.mark.parametrize(("without", "with_codes"), [(100.0, 120.0), (90.0, float("inf"))])
def test_queries_stay_where_their_codes_take_longer(products, monkeypatch, without, with_codes):
    monkeypatch.setattr(fp8, "predicted_us", lambda call, gpu: (without, with_codes))
    with FakeTensorMode():
        assert fp8.with_codes_of_queries(chunk()) is None
        why = fp8.why_no_codes_of_queries(chunk(), hopper=True)
    assert why == (
        f"take {with_codes:.0f} µs here by prediction, and the queries as they are {without:.0f}"
    )


def test_queries_stay_without_a_kernel(ways, monkeypatch):
    monkeypatch.setattr(fp8, "is_hopper", lambda device: False)
    with FakeTensorMode():
        assert fp8.with_codes_of_queries(chunk()) is None


def chunk_of(device) -> tuple[dict, dict]:
    """A call of two sequences that a kernel takes, and its descales."""
    x, coded = pack_coded(Case(sq=70, sk=96, h=4, hk=2, d=64), ((70, 40), (96, 60)), "head", device)
    pages = {name: coded.codes[name].contiguous()[:156] for name in "kv"}
    table, cu_q, cu_k = (
        torch.tensor(numbers, dtype=torch.int32, device=device)
        for numbers in ([[0, 1, 2], [3, 4, 4]], x.cu_q, x.cu_k)
    )
    pages = {
        name: torch.nn.functional.pad(rows, (0, 0, 0, 0, 0, 4)).unflatten(0, (5, 32))
        for name, rows in pages.items()
    }
    call = {
        "q": x.q, **pages, "block_table": table, "cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k,
        "max_seqlen_q": 70, "max_seqlen_k": 96, "causal": True,
    }  # fmt: skip
    return call, {
        "k_descale": coded.descales["k_descale"],
        "v_descale": coded.descales["v_descale"],
    }


def test_a_chunk_against_pages(device, monkeypatch):
    """As near as rounding q, k, v and probabilities lets it be; and its rounding is seen."""
    monkeypatch.setattr(fp8, "predicted_us", lambda call, gpu: (2.0, 1.0))
    call, descales = chunk_of(device)
    plain = flash_attn_varlen_func(**call, **descales).float()
    fast = flash_attn_varlen_func(**call, **descales, fp8_products=True).float()
    error = ((fast - plain).norm() / plain.norm()).item()
    rounds = fp8._on_gpu(call["q"]) and fp8.has_kernel and fp8.is_hopper(call["q"].device)
    assert error < 0.06
    assert (error > 1e-3) == rounds
    monkeypatch.setattr(fp8, "predicted_us", lambda call, gpu: (1.0, 2.0))
    slow = flash_attn_varlen_func(**call, **descales, fp8_products=True).float()
    assert_bitwise("out", slow, plain)


def test_no_gpu_is_no_hopper(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert not fp8._is_hopper(torch.device("cuda"))


def test_zeros_that_are_appended_are_codes():
    x = codes("cpu", 2, 3, 2, 40)
    padded = fp8._as_kernels_read(x)
    assert padded.dtype is FP8
    assert_bitwise("codes", padded[..., :40].float(), x.float())
    assert not padded[..., 40:].float().any()
    assert fp8._as_kernels_read(padded) is padded
