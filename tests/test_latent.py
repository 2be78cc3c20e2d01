"""Latent attention: caches whose keys are the values and more columns (``qv``), on all backends."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cache_cases import NAN, CacheCase, CacheInputs, expected, make_cache, run_cached
from cases import BF16, FP16, FP32, FP64, poisoned
from compare import assert_accurate, assert_bitwise, assert_lse
from reference import attention_ref, standard_attention
from torch import Tensor
from torch.library import opcheck

import flash_attn
from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache
from flash_attn.api import warn
from flash_attn.dispatch import ops, run

D, DV = 64, 512
# Few keys and heads: the emulation takes a second for 4,000 products of rows.
SMALL = CacheCase("small", h=4, hk=1, d=D, dv=DV, cache_size=150)


def queries_of_values(case: CacheCase, x: CacheInputs) -> Tensor:
    gen = torch.Generator().manual_seed(7 + len(case.name))
    qv = torch.randn(*x.q.shape[:-1], case.dv, generator=gen)
    return poisoned(qv.to(x.q.dtype).to(x.q.device))


def joined(x: CacheInputs, qv: Tensor) -> CacheInputs:
    """The same call with keys of all columns. The rotated ones come first: so do a table's."""
    k = None if x.k is None else torch.cat([x.k, x.v], -1)
    q, k_cache = torch.cat([x.q, qv], -1), torch.cat([x.k_cache, x.v_cache], -1)
    return replace(x, q=q, k_cache=k_cache, k=k)


def side_by_side(x: CacheInputs) -> CacheInputs:
    """The caches as views of one, a latent row before its rotated one."""
    both = poisoned(torch.cat([x.v_cache, x.k_cache], -1), fill=7.0)
    columns = x.v_cache.shape[-1]
    return replace(x, k_cache=both[..., columns:], v_cache=both[..., :columns])


def check(case: CacheCase, device, one_tensor: bool = False, **more) -> None:
    x = make_cache(case, device)
    qv = queries_of_values(case, x)
    whole = joined(x, qv)
    before = x.k_cache.clone(), x.v_cache.clone()
    ref, std = (expected(case, whole, f) for f in (attention_ref, standard_attention))
    x = side_by_side(x) if one_tensor else x
    out, lse = run_cached(case, x, qv=qv, **more)
    assert_accurate("out", out, ref.out, std.out)
    assert_lse("lse", lse, ref.lse)
    after = ref.k_cache[..., : case.d], ref.v_cache
    for name, cache, new, old in zip("kv", (x.k_cache, x.v_cache), after, before, strict=True):
        assert_bitwise(f"{name}_cache, old rows", cache[~ref.touched], old[~ref.touched])
        torch.testing.assert_close(cache[ref.touched], new[ref.touched])


CASES = [
    replace(SMALL, name="read"),
    replace(SMALL, name="fp16", dtype=FP16, causal=False),
    replace(SMALL, name="fp32", dtype=FP32, new=2, sq=2),
    replace(SMALL, name="queries", sq=5, h=8, cache_seqlens=(5, 128, 3)),
    replace(SMALL, name="more_queries_than_keys", sq=3, cache_seqlens=(1, 2, 0)),
    replace(SMALL, name="heads", h=20, cache_seqlens=(37, 65, 3)),
    replace(SMALL, name="several_latent_heads", h=6, hk=3),
    replace(SMALL, name="tiles_of_64_rows", h=40, sq=3, cache_seqlens=(2, 120, 64), page_size=32),
    replace(SMALL, name="two_full_tiles", h=128, cache_seqlens=(100, 0, 300), cache_size=300),
    replace(SMALL, name="absent", cache_seqlens=(-1, 0, 70)),
    replace(SMALL, name="append", new=3, sq=3),
    replace(SMALL, name="append_rotary", new=2, sq=2, rotary_dim=64),
    replace(SMALL, name="append_rotary_halves", new=1, rotary_dim=32, interleaved=False),
    replace(SMALL, name="append_many", new=12, sq=1, causal=False),
    replace(SMALL, name="window", sq=3, window=(20, 0), causal=False),
    replace(SMALL, name="left", window=(40, -1)),
    replace(SMALL, name="softcap_alibi", sq=2, softcap=3.0, alibi="bh"),
    replace(SMALL, name="sinks", sinks=True, cache_seqlens=(0, 20, 150)),
    replace(SMALL, name="scale", scale=0.1),
    replace(SMALL, name="negative_scale", scale=-0.1),
    replace(SMALL, name="batch_idx", batch_idx=True, leftpad=(3, 0, 1), sq=2),
    replace(SMALL, name="leftpad", leftpad=(37, 100, 2), new=1),
    replace(SMALL, name="no_rotated_part", d=0),
    replace(SMALL, name="smaller", d=40, dv=200),
    replace(SMALL, name="much_smaller", d=8, dv=16),
    replace(SMALL, name="rotated_part_alone", d=64, dv=8),
    *(
        replace(SMALL, name=f"pages_of_{n}", page_size=n, sq=2, new=1, rotary_dim=64)
        for n in (1, 3, 64, 100)
    ),
    replace(SMALL, name="pages_absent", page_size=16, cache_seqlens=(-1, 20, -1), new=2, sq=2),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("one_tensor", [False, True], ids=["apart", "one_tensor"])
def test_call(case, one_tensor, device, needs):
    if one_tensor and not case.d:
        pytest.skip("no second part")
    with needs(*case.features):
        check(case, device, one_tensor)


@pytest.mark.parametrize("num_splits", [0, 1, 3, 64])
@pytest.mark.parametrize("page_size", [0, 16])
def test_num_splits(page_size, num_splits, device, needs):
    case = replace(
        SMALL, name="splits", page_size=page_size, cache_size=600, cache_seqlens=(1, 520, 33), sq=2
    )
    with needs(*case.features):
        check(case, device, num_splits=num_splits)


def test_a_nan_that_a_row_sees_shows(device):
    case = replace(SMALL, name="nan", cache_seqlens=(37, 128, 40))
    x = make_cache(case, device)
    x.v_cache[1, 100, 0, 500] = NAN
    out, lse = run_cached(case, x, qv=queries_of_values(case, x))
    assert out[1].isnan().all()
    assert lse[1].isnan().all()
    assert out[0].isfinite().all()


# --- Packed queries ------------------------------------------------------------------------------


def packed_call(device, dtype=BF16, page_size: int = 16, lengths=((1, 3, 0, 2), (40, 3, 9, 100))):
    """A packed call against latent pages, by name, and its sequences: (q, qv, k, v) each."""
    gen = torch.Generator().manual_seed(3)
    h, (queries, keys) = 4, lengths

    def randn(*shape):
        return torch.randn(*shape, generator=gen).to(dtype).to(device)

    q, qv = randn(sum(queries) + 2, h, D), randn(sum(queries) + 2, h, DV)
    needed = [-(-n // page_size) for n in keys]
    order = torch.randperm(sum(needed) + 1, generator=gen).tolist()
    pages = torch.full((sum(needed) + 1, page_size, 1, DV + D), NAN, dtype=dtype, device=device)
    table = torch.full((len(keys), max(needed)), -1, dtype=torch.int32)
    sequences, row = [], 0
    for b, (rows, length) in enumerate(zip(queries, keys, strict=True)):
        latent = randn(length, 1, DV + D)
        for n in range(needed[b]):
            table[b, n] = order.pop()
            part = latent[n * page_size : (n + 1) * page_size]
            pages[table[b, n], : part.shape[0]] = part
        at = slice(row, row + rows)
        sequences.append((q[at], qv[at], latent[..., DV:], latent[..., :DV]))
        row += rows

    def ends(lengths):
        sums = torch.tensor([0, *lengths]).cumsum(0)
        return sums.to(torch.int32).to(device)

    call = {
        "q": q, "k": pages[..., DV:], "v": pages[..., :DV], "qv": qv, "cu_seqlens_q": ends(queries),
        "cu_seqlens_k": ends(keys), "max_seqlen_q": max(queries), "max_seqlen_k": max(keys),
        "block_table": table.to(device),
    }  # fmt: skip
    return call, sequences


@pytest.mark.parametrize("dtype", [BF16, FP16, FP64])
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_packed(dtype, page_size, batch_invariant, device, needs):
    call, sequences = packed_call(device, dtype, page_size)
    with needs("paged", *(["fp64"] if dtype == FP64 else [])):
        out, lse = flash_attn_varlen_func(
            **call, causal=True, return_lse=True, batch_invariant=batch_invariant
        )
        row = 0
        for q, qv, k, v in sequences:
            x = torch.cat([qv, q], -1)[None], torch.cat([v, k], -1)[None], v[None]
            ref, ref_lse, _ = attention_ref(*x, causal=True)
            std, _, _ = standard_attention(*x, causal=True)
            at = slice(row, row + q.shape[0])
            assert_accurate("out", out[at], ref[0], std[0])
            assert_lse("lse", lse[:, at].contiguous(), ref_lse[0])
            row += q.shape[0]
        assert_bitwise("rows of no sequence", out[row:], torch.zeros_like(out[row:]))
        assert (lse[:, row:] == -torch.inf).all()


def test_a_step_and_a_packed_call_agree(device, needs):
    call, _ = packed_call(device, lengths=((1, 1), (40, 7)))
    with needs("paged"):
        packed = flash_attn_varlen_func(**call)[:2]
        step = flash_attn_with_kvcache(
            call["q"][:2, None], call["k"], call["v"], qv=call["qv"][:2, None],
            cache_seqlens=call["cu_seqlens_k"].diff(), block_table=call["block_table"],
        )  # fmt: skip
        torch.testing.assert_close(packed, step[:, 0], atol=2e-2, rtol=2e-2)


def test_batch_invariant(device, needs):
    """A sequence has the bits that it has alone."""
    lengths = (1, 2, 1), (200, 33, 70)
    call, _ = packed_call(device, lengths=lengths)
    with needs("paged"):
        out = flash_attn_varlen_func(**call, causal=True, batch_invariant=True)
        row = 0
        for b, (rows, keys) in enumerate(zip(*lengths, strict=True)):
            alone = call | {
                "q": call["q"][row : row + rows], "qv": call["qv"][row : row + rows],
                "cu_seqlens_q": torch.tensor([0, rows], dtype=torch.int32, device=out.device),
                "cu_seqlens_k": torch.tensor([0, keys], dtype=torch.int32, device=out.device),
                "block_table": call["block_table"][b : b + 1], "max_seqlen_q": rows,
            }  # fmt: skip
            one = flash_attn_varlen_func(**alone, causal=True, batch_invariant=True)
            assert_bitwise(f"sequence {b}", out[row : row + rows], one)
            row += rows


def test_rows_of_no_sequence_alone(device, needs):
    """A packed call whose batch is empty, but not its rows."""
    call, _ = packed_call(device)
    ends = torch.zeros(1, dtype=torch.int32, device=call["q"].device)
    call |= {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "block_table": call["block_table"][:0]}
    with needs("paged"):
        out, lse = flash_attn_varlen_func(**call, return_lse=True)
        assert_bitwise("out", out, torch.zeros_like(out))
        assert (lse == -torch.inf).all()


# --- What is refused, compilers, gradients -------------------------------------------------------


def step_of(device, **changes) -> dict:
    x = make_cache(SMALL, device)
    call = {
        "q": x.q, "k_cache": x.k_cache, "v_cache": x.v_cache, "qv": queries_of_values(SMALL, x),
        "cache_seqlens": torch.tensor(SMALL.cache_seqlens, dtype=torch.int32, device=device),
    }  # fmt: skip
    return call | changes


def zeros(*shape: int, dtype=BF16) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


REFUSED = {
    "no tensor": ({"qv": 1}, TypeError, "qv: got int; a torch.Tensor"),
    "rank": ({"qv": zeros(3, 4, DV)}, ValueError, r"qv: got shape \(3, 4, 512\)"),
    "columns": (
        {"qv": zeros(3, 1, 4, 64)},
        ValueError,
        r"qv: got shape \(3, 1, 4, 64\); that of q, up to the head_dim of v_cache, \(3, 1, 4, 51",
    ),
    "heads": ({"qv": zeros(3, 1, 2, DV)}, ValueError, r"qv: got shape \(3, 1, 2, 512\)"),
    "dtype": ({"qv": zeros(3, 1, 4, DV, dtype=FP16)}, ValueError, "qv: got dtype torch.float16"),
    "head_dim": (
        {"q": zeros(3, 1, 4, 72), "k_cache": zeros(3, 150, 1, 72)},
        ValueError,
        "q: got head_dim 72; accepted are 0 to 64",
    ),
    "head_dim_v": (
        {"v_cache": zeros(3, 150, 1, 520), "qv": zeros(3, 1, 4, 520)},
        ValueError,
        "v_cache: got head_dim 520; accepted are 1 to 512",
    ),
    "codes": (
        {
            "k_cache": zeros(3, 150, 1, D).to(torch.float8_e4m3fn),
            "v_cache": zeros(3, 150, 1, DV).to(torch.float8_e4m3fn),
        },
        NotImplementedError,
        "v_cache: got dtype torch.float8_e4m3fn with a qv",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name, device):
    changes, error, said = REFUSED[name]
    moved = {key: x.to(device) if isinstance(x, Tensor) else x for key, x in changes.items()}
    with pytest.raises(error, match=said):
        flash_attn_with_kvcache(**step_of(device, **moved))


def test_no_forward_computes_what_no_latent_kernel_does(device, request):
    """Keys of 128 columns, which the public functions refuse, and an operation may be given."""
    if "host" not in request.node.name:
        pytest.skip("about kernels")
    q, qv = zeros(2, 1, 4, 128), zeros(2, 1, 4, 128)
    cache = zeros(2, 40, 1, 128)
    args = (q, cache, cache, *[None] * 8, 0.1, True, -1, -1, 0.0, True, None, 0)
    with pytest.raises(NotImplementedError, match="no kernel for latent bf16 head_dim 128"):
        run.writing(ops.with_kvcache, *args, qv=qv)


PACKED_REFUSED = {
    "no pages": ({"block_table": None}, ValueError, "qv: got one without block_table"),
    "no q": ({"q": [1]}, TypeError, "q: got list; a torch.Tensor is needed"),
    "q of a row": ({"q": zeros(4, D)}, ValueError, r"q: got shape \(4, 64\)"),
    "k_descale": ({"k_descale": 2.0}, ValueError, "k_descale: got one with a k of torch.bfloat16"),
    "out_dtype": ({"out_dtype": FP16}, ValueError, "out_dtype: got torch.float16 with a q of"),
    "dropout_p": ({"dropout_p": 0.1}, NotImplementedError, "dropout_p: got 0.1 with a qv"),
    "return_attn_probs": (
        {"return_attn_probs": True}, NotImplementedError, "return_attn_probs: got True with a qv",
    ),
    "return_max_logits": (
        {"return_max_logits": True}, NotImplementedError, "return_max_logits: got True with a qv",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PACKED_REFUSED)
def test_packed_refused(name, device):
    changes, error, said = PACKED_REFUSED[name]
    call, _ = packed_call(device)
    with pytest.raises(error, match=said):
        flash_attn_varlen_func(**call | changes)


def test_gradients(device, needs, monkeypatch):
    monkeypatch.setattr(warn, "_said", set())
    call = step_of(device)
    with pytest.warns(UserWarning, match="no backward: a tensor of this call"):
        out = flash_attn_with_kvcache(**call | {"qv": call["qv"].detach().requires_grad_()})
    assert not out.requires_grad
    packed, _ = packed_call(device)
    for name in ("q", "v", "qv"):
        asked = packed | {name: packed[name].detach().requires_grad_()}
        with needs("paged"), pytest.raises(RuntimeError, match=f"^{name}: requires_grad is set"):
            flash_attn_varlen_func(**asked)


def test_compiled(device, needs):
    call = step_of(device)
    compiled = torch.compile(flash_attn_with_kvcache, fullgraph=True, backend="eager")
    assert_bitwise("a step", compiled(**call), flash_attn_with_kvcache(**call))
    packed, _ = packed_call(device)
    compiled = torch.compile(flash_attn_varlen_func, fullgraph=True, backend="eager")
    with needs("paged"):
        assert_bitwise("packed", compiled(**packed), flash_attn_varlen_func(**packed))


def test_the_operation_refuses_keys_that_are_no_cache():
    packed, _ = packed_call("cpu")
    names = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    packed |= {"k": packed["k"].flatten(0, 1), "v": packed["v"].flatten(0, 1)}
    args = (*(packed[name] for name in names), 0.0, 0.04, True)
    with pytest.raises(ValueError, match="qv: got one without block_table"):
        ops.varlen_forward(*args, qv=packed["qv"])


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"dropout_p": 0.5}, NotImplementedError, "dropout_p: got 0.5 with a qv"),
        ({"block_table": None}, ValueError, "qv: got one without block_table"),
    ],
)
def test_explain_refuses_what_the_call_does(changes, error, said):
    packed, _ = packed_call("cpu")
    assert "latent cache" in flash_attn.explain(**packed).call
    with pytest.raises(error, match=said):
        flash_attn.explain(**packed | changes)


def test_operations():
    call = step_of("cpu")
    cache = (call["k_cache"], call["v_cache"], None, None, None, None, call["cache_seqlens"])
    args = (call["q"], *cache, None, None, None, 0.04, True, -1, -1, 0.0, True, None, 0)
    opcheck(ops.with_kvcache.default, args, {"qv": call["qv"]})
    packed, _ = packed_call("cpu")
    names = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    args = (*(packed[name] for name in names), 0.0, 0.04, True)
    given = {"block_table": packed["block_table"], "qv": packed["qv"]}
    opcheck(ops.varlen_forward.default, args, given)
