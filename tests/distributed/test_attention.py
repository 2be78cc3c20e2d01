"""Every way to cut a sequence, with every feature, against one process in float64."""

from __future__ import annotations

import itertools
import warnings
from dataclasses import replace

import pytest
import torch
from compare import assert_accurate, assert_bitwise, assert_lse, assert_within
from reference import max_logits_ref, standard_attention

from flash_attn.dispatch import calls
from flash_attn.distributed import ring, unshard_sequence
from tests.distributed import work
from tests.distributed.cases import Case, assembled, expected, inputs

WORLD_GPUS = min(4, torch.cuda.device_count()) or 2
UNEVEN = (5, 40, 0, 1, 23, 3)
WAYS = [
    ("ring", "zigzag"),
    ("ring", "contiguous"),
    ("gather", "zigzag"),
    ("gather", "balanced"),
    ("all_to_all", "contiguous"),
    ("mesh", "zigzag"),
]
FEATURES = {
    "causal": dict(),
    "full": dict(causal=False),
    "window": dict(window=(9, 0)),
    "window-both": dict(causal=False, window=(13, 6)),
    "softcap": dict(softcap=1.5),
    "alibi": dict(alibi="heads"),
    "alibi-full": dict(causal=False, alibi="batch"),
    "alibi-window": dict(causal=False, alibi="heads", window=(21, 17)),
    "sinks": dict(sinks=True),
    "sinks-window": dict(sinks=True, window=(3, 0), dlse=True),
    "dlse": dict(dlse=True),
    "dropout": dict(dropout_p=0.3),
    "dropout-window": dict(dropout_p=0.2, causal=False, window=(19, 6)),
    "dropout-alibi": dict(dropout_p=0.4, causal=False, alibi="batch", dlse=True),
    "everything": dict(
        softcap=2.0, alibi="batch", sinks=True, window=(30, 0), dlse=True, dropout_p=0.1
    ),
}


def cases() -> list[Case]:
    return list(_cases())


def _cases():
    for (method, kind), feature in itertools.product(WAYS, FEATURES):
        for lengths in (None, UNEVEN):
            if (kind == "balanced") == (lengths is None) and method == "gather":
                continue
            ranks = 2 if feature in ("softcap", "dlse") and method != "mesh" else 4
            case = Case(method, ranks, kind, lengths=lengths, **FEATURES[feature])
            if case.dropout_p:  # blocks of 16 for all ranks, and a part of one
                lengths = lengths and tuple(4 * n for n in lengths)
                case = replace(case, seqlen=139, lengths=lengths)
            yield case


def run(processes, case: Case, attention=work.attention) -> dict[str, torch.Tensor]:
    """out, lse, dq, dk, dv and ds_aux of the whole."""
    parts = processes.run(attention, case, ranks=case.ranks)
    return {
        name: assembled(
            case, name.replace("ds_aux", "s_aux"), [torch.as_tensor(p[name]) for p in parts]
        )
        for name in parts[0]
    }


def check(processes, case: Case, attention=work.attention) -> None:
    out, lse, grads = expected(case, inputs(case))
    ours = run(processes, case, attention)
    wanted = {"out": out, "lse": lse} | {f"d{name}": x for name, x in grads.items()}
    assert ours.keys() == wanted.keys()
    for name, x in wanted.items():
        assert_within(name, ours[name], x, 1e-10)


@pytest.mark.parametrize("case", cases(), ids=str)
def test_features(processes, case):
    check(processes, case)


SHAPES = [
    Case("ring", 4, seqlen=5),  # fewer tokens than chunks
    Case("ring", 4, seqlen=2, causal=False),
    Case("ring", 4, "contiguous", seqlen=3),  # a rank with no tokens
    Case("ring", 4, seqlen=0),
    Case("ring", 2, seqlen=1),
    Case("ring", 2, "contiguous", seqlen=3, window=(1, 0), sinks=True),
    Case("ring", 2, lengths=UNEVEN, dlse=True),
    Case("ring", 2, "contiguous", lengths=UNEVEN, causal=False, alibi="batch"),
    Case("ring", 2, "balanced", lengths=(0, 1)),  # a rank with no tokens, of two
    Case("gather", 2, "balanced", lengths=(0, 1), sinks=True),
    Case("gather", 2, "contiguous", lengths=UNEVEN, window=(2, 0)),
    Case("all_to_all", 2, lengths=UNEVEN, heads_k=1),
    Case("all_to_all", 2, seqlen=1),
    Case("ring", 2, seqlen=20, dropout_p=0.5),  # fewer blocks of 16 than chunks
    Case("ring", 4, lengths=(3, 16, 0, 33), dropout_p=0.5),
    Case("ring", 2, heads=3, heads_k=1, head_dim=4, head_dim_v=6),
    Case("ring", 3, seqlen=64),
    Case("ring", 1, window=(5, 0)),
    Case("ring", 4, lengths=(0, 0), dlse=True),
    Case("ring", 4, lengths=(1, 1, 1, 90), sinks=True),
    Case("ring", 4, "contiguous", lengths=(1, 1, 1, 90), window=(4, 0)),
    Case("ring", 4, "balanced", lengths=(30, 30, 2)),
    Case("gather", 4, "contiguous", lengths=(2, 1), sinks=True),
    Case("gather", 4, "balanced", lengths=(100,)),
    Case("gather", 4, "contiguous", lengths=(3, 50, 20), causal=False, alibi="batch"),
    Case("all_to_all", 4, heads=8, heads_k=1),  # fewer heads of keys than ranks
    Case("all_to_all", 4, heads=12, heads_k=6, seqlen=9),  # ranks that share one of their heads
    Case("all_to_all", 4, "contiguous", lengths=(2, 1), heads_k=4),
    Case("all_to_all", 3, heads=3, heads_k=3, sinks=True, alibi="batch"),
    Case("mesh", 4, seqlen=3, heads_k=1),
    Case("mesh", 4, "contiguous", lengths=UNEVEN, heads=6, heads_k=3, sinks=True, dlse=True),
]


@pytest.mark.parametrize("case", SHAPES, ids=str)
def test_shapes(processes, case):
    check(processes, case)


def max_logits_cases() -> list[Case]:
    features = ("causal", "window-both", "softcap", "alibi-full", "sinks-window", "everything")
    found = [
        Case(method, 4, kind, lengths=lengths, **FEATURES[feature])
        for (method, kind), feature in itertools.product(WAYS, features)
        for lengths in (None, UNEVEN)
        if not (method == "gather" and (kind == "balanced") == (lengths is None))
    ]
    # Ranks without tokens, and no tokens at all.
    found += [Case("ring", 4, "contiguous", seqlen=3), Case("all_to_all", 2, lengths=(0, 0))]
    return [replace(case, dropout_p=0.0, dlse=False) for case in found]


@pytest.mark.parametrize("case", max_logits_cases(), ids=str)
def test_max_logits(processes, case):
    """The largest of all ranks' parts, of each row and of each head."""
    parts = processes.run(work.max_logits, case, ranks=case.ranks)
    rows = assembled(case, "max_logits", [torch.as_tensor(p["max_logits"]) for p in parts])
    _, wanted, _ = expected(case, inputs(case), max_logits_ref)
    assert_within("rows", rows, wanted, 1e-10)
    dims = 1 if case.packed else (0, 2)
    of_heads = rows.amax(dims) if rows.numel() else torch.full((case.heads,), -torch.inf)
    for part in parts:
        assert_within("heads", torch.as_tensor(part["heads"]), of_heads, 0.0)


def padded(rank: int, case: Case) -> dict:
    """As a GPU does it, whose kernels have head dims that are multiples of 8."""
    before = calls._has_to_pad
    calls._has_to_pad = lambda q, v: True
    try:
        return work.attention(rank, case)
    finally:
        calls._has_to_pad = before


@pytest.mark.parametrize("case", [
    Case("ring", 4, head_dim=5, head_dim_v=11, sinks=True, dlse=True),
    Case("gather", 2, lengths=UNEVEN, head_dim=12, head_dim_v=8),
    Case("all_to_all", 4, head_dim=3, head_dim_v=3),
    Case("mesh", 4, head_dim=3, head_dim_v=5),
], ids=str)  # fmt: skip
def test_padded_head_dims(processes, case):
    check(processes, case, padded)


def warnings_of(rank: int, case: Case) -> list[str]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        work.attention(rank, case)
        layout = case.layout()
        unshard_sequence(torch.zeros(1, layout.tokens(rank)), layout, work.group(case.ranks))
    return [str(warning.message) for warning in found]


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_nothing_warns(processes, way):
    """Such as of a collective's name that torch is about to drop."""
    method, kind = way
    assert processes.run(warnings_of, Case(method, 4, kind)) == [[]] * 4


def by_head_groups(rank: int, case: Case) -> dict:
    before, ring.AT_ONCE = ring.AT_ONCE, 2000
    try:
        return work.attention(rank, case)
    finally:
        ring.AT_ONCE = before


@pytest.mark.parametrize("case", [
    Case("ring", 2, seqlen=150),
    Case("ring", 4, seqlen=299, causal=False, sinks=True, dlse=True),
    Case("ring", 4, seqlen=299, causal=False, alibi="heads"),
    Case("ring", 4, seqlen=299, dropout_p=0.3),
    Case("ring", 2, lengths=(100, 0, 70), alibi="batch", dlse=True),
    Case("mesh", 4, seqlen=150, heads=8, heads_k=4, alibi="heads", dropout_p=0.2),
], ids=str)  # fmt: skip
def test_backwards_by_groups_of_heads(processes, case):
    """Which those of large calls are."""
    check(processes, case, by_head_groups)


def check_accuracy(processes, case: Case) -> None:
    given = inputs(case)
    reference = expected(case, given)
    standard = expected(case, given, standard_attention, case.dtype)
    ours = run(processes, case)
    assert_lse("lse", ours["lse"], reference[1])
    for name, exact, plain in (
        ("out", reference[0], standard[0]),
        *((f"d{n}", x, standard[2][n]) for n, x in reference[2].items()),
    ):
        factor = 3.0 if case.dropout_p and name in ("dk", "dv") else 2.0
        assert_accurate(name, ours[name].to(plain.dtype), exact, plain, factor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "case",
    [
        Case("ring", 4, seqlen=200),
        Case("ring", 2, seqlen=200, sinks=True),
        Case("ring", 4, seqlen=200, sinks=True, window=(24, 0), dlse=True),
        Case("ring", 4, seqlen=200, dropout_p=0.2),
        Case("ring", 4, seqlen=200, gradient_dtype=torch.float32),
        Case("gather", 4, "balanced", lengths=UNEVEN),
        Case("all_to_all", 4, seqlen=200, heads_k=1),
        Case("mesh", 4, seqlen=200),
    ],
    ids=str,
)
def test_dtypes_meet_the_accuracy_bar(processes, case, dtype):
    check_accuracy(processes, replace(case, dtype=dtype))


def gpu_cases() -> list[Case]:
    """The features again, at sizes that fill tiles, over as many GPUs as there are."""
    found = []
    for case in cases():
        ranks = case.ranks if case.method == "mesh" else min(case.ranks, WORLD_GPUS)
        lengths = case.lengths and tuple(17 * n for n in UNEVEN)
        found.append(
            replace(
                case, ranks=ranks, lengths=lengths, seqlen=777, head_dim=64, head_dim_v=64,
                dtype=torch.bfloat16, device="cuda", window=tuple(w * 8 for w in case.window),
            )
        )  # fmt: skip
    return list(dict.fromkeys(case for case in found if case.ranks <= WORLD_GPUS))


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs")
@pytest.mark.parametrize("case", gpu_cases(), ids=str)
def test_features_on_gpus(processes, case):
    check_accuracy(processes, case)


@pytest.mark.parametrize("method", ["ring", "gather", "all_to_all"])
def test_backward_repeats_bit_for_bit(processes, method):
    case = Case(method, 4, seqlen=300, dtype=torch.bfloat16, deterministic=True)
    first, second = run(processes, case), run(processes, case)
    for name, x in first.items():
        assert_bitwise(name, x, second[name])
