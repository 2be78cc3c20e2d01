"""The CPU backend's ways of computing one call, each over the tile borders of its own.

Which way a call takes depends on its size, dtype and features; here each is forced.
"""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch
from calls import check_backward, check_forward, scored
from cases import BF16, FP16, FP32, FP64, Case, make_inputs
from compare import assert_bitwise
from torch.utils._python_dispatch import TorchDispatchMode

from flash_attn import cpu
from flash_attn.call import Backward, Cache, CacheStep, Forward, Gradients, Lengths
from flash_attn.cpu import bf16_causal, native, tiled_backward, tiled_forward, tiling

WAYS = ["native", "tiled", "bf16_causal"]


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(params=WAYS)
def way(request, monkeypatch) -> str:
    """Forces one way of computing, with tiles small enough for several in a short sequence."""
    monkeypatch.setattr(bf16_causal, "native_products", lambda: request.param == "bf16_causal")
    for name, value in {"BLOCK": 32, "ROWS": 48}.items():
        monkeypatch.setattr(bf16_causal, name, value)
    for name, value in {"ROWS": 32, "KEYS": 64}.items():
        monkeypatch.setattr(tiling, name, value)
    monkeypatch.setattr(native, "CONVERTED", 10_000)
    if request.param == "tiled":
        monkeypatch.setattr(native, "can_express", lambda *_: False)
    return request.param


MASKS = [
    {},
    {"causal": True},
    {"causal": True, "sq": 90, "sk": 150},
    {"causal": True, "sq": 150, "sk": 90},  # the first 60 rows see nothing
    {"window": (40, 10)},
    {"window": (0, 200), "sq": 70},
    {"window": (130, 0), "sq": 200, "sk": 170},
    {"window": (20, -1), "alibi": "bh"},
    {"causal": True, "alibi": "h", "sinks": True},
    {"causal": True, "sq": 1, "sk": 129, "alibi": "h"},
]


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("dtype", [FP32, FP16, BF16], ids=str)
def test_ways_agree_with_the_reference(mask, dtype, way):
    case = Case(**{"sq": 170, "sk": 170, "h": 6, "hk": 2, "d": 40, "dtype": dtype, **mask})
    x = make_inputs(case)
    check_forward(case, x)
    check_backward(case, x)


@pytest.mark.parametrize("kind", ["low_rank", "outliers", "large", "constant"])
@pytest.mark.parametrize("causal", [False, True])
def test_ways_keep_the_accuracy_bar(kind, causal, way):
    for dtype in (FP32, BF16):
        case = Case(sq=260, sk=260, h=2, hk=1, dtype=dtype, causal=causal, kind=kind)
        check_backward(case, make_inputs(case))


def called(monkeypatch, module, name: str) -> list:
    """The calls that module.name gets from now on."""
    calls, function = [], getattr(module, name)

    def call(*args, **options):
        calls.append(args)
        return function(*args, **options)

    monkeypatch.setattr(module, name, call)
    return calls


@pytest.mark.parametrize("dtype", [FP64, FP32, FP16, BF16], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_plain_attention_uses_torch(dtype, causal, monkeypatch):
    tiled = [called(monkeypatch, m, n) for m, n in _TILED]
    monkeypatch.setattr(bf16_causal, "native_products", lambda: False)
    case = Case(dtype=dtype, causal=causal, sinks=True, alibi="h", window=(90, -1))
    check_backward(case, make_inputs(case))
    assert tiled == [[], []]


_TILED = [(tiled_forward, "forward"), (tiled_backward, "backward")]


@pytest.mark.parametrize(
    "feature", [{"softcap": 5.0}, {"dropout_p": 0.1}, {"dv": 32}], ids=lambda f: next(iter(f))
)
def test_what_torch_cannot_express_is_tiled(feature, monkeypatch):
    tiled = [called(monkeypatch, m, n) for m, n in _TILED]
    case = Case(**feature)
    check_backward(case, make_inputs(case))
    assert all(tiled)


class Operations(TorchDispatchMode):
    """Counts them, by name without overload."""

    def __init__(self):
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count[function.overloadpacket.__name__] += 1
        return function(*args, **(kwargs or {}))


def test_few_operations_wait_for_every_thread():
    """On busy cores each of them can cost a time slice: no copies per block of rows."""
    q, k, v = (torch.randn(2, 512, h, 64, dtype=BF16) for h in (4, 2, 2))
    scoring = scored(softmax_scale=0.125, causal=True)
    with Operations() as forward:
        out, lse, *_ = cpu.forward(Forward(q, k, v, scoring))
    grads = [torch.empty_like(x) for x in (q, k, v)]
    with Operations() as backward:
        cpu.backward(Backward(Gradients(out, q, k, v, out, lse, *grads), scoring))
    blocks = 4
    kernel = "_scaled_dot_product_flash_attention_for_cpu"
    assert forward.count[kernel] == backward.count[f"{kernel}_backward"] == blocks
    assert forward.count["flip"] == 2  # k and v
    assert backward.count["flip"] == 4  # and dk, dv
    assert backward.count["add_"] <= 2 * blocks


def test_long_bf16_gradients_sum_in_float32():
    """dV of the first keys of a causal mask sums over all rows: where bf16 sums lose digits."""
    for products in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(bf16_causal, "native_products", lambda value=products: value)
            case = Case(b=1, sq=1100, sk=1100, h=2, hk=1, causal=True)
            check_backward(case, make_inputs(case))


@pytest.mark.parametrize("seqlen", [64, 65, 96, 127, 160, 300, 511, 512, 1000])
def test_pieces_cover_the_causal_triangle_once(seqlen, monkeypatch):
    monkeypatch.setattr(bf16_causal, "BLOCK", 32)
    monkeypatch.setattr(bf16_causal, "ROWS", 48)
    seen = torch.zeros(seqlen, seqlen, dtype=torch.int32)
    token = torch.arange(seqlen)[None]
    for rows, keys, diagonal in bf16_causal.pieces(seqlen):
        for row, key in zip(rows.of(token)[0], keys.of(token)[0], strict=True):
            shape = len(row), len(key)
            visible = torch.ones(shape).tril() if diagonal else torch.ones(shape)
            seen[row[0] : row[-1] + 1, key[0] : key[-1] + 1] += visible.int()
    assert torch.equal(seen, torch.ones_like(seen).tril())


@pytest.mark.parametrize(("dtype", "d"), [(FP32, 33), (FP32, 64), (BF16, 33), (FP16, 64)])
@pytest.mark.parametrize("softcap", [0.0, 10.0])
def test_batch_invariance_to_the_bit(dtype, d, softcap):
    """A sequence alone, among others packed, and in a batch: the same bits."""
    gen = torch.Generator().manual_seed(3)
    lengths = [5, 130, 1, 300]
    offsets = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    total = sum(lengths)
    q, k, v = (torch.randn(total, h, d, generator=gen).to(dtype) for h in (4, 2, 2))
    s_aux = torch.randn(4, generator=gen)
    scoring = scored(
        softmax_scale=d**-0.5,
        window_size_left=20,
        window_size_right=50,
        softcap=softcap,
        s_aux=s_aux,
    )
    packed = Lengths(offsets, offsets, max(lengths), max(lengths))
    out, lse, *_ = cpu.varlen_forward(Forward(q, k, v, scoring, packed, batch_invariant=True))
    for start, stop in itertools.pairwise(offsets.tolist()):
        one = (x[None, start:stop].repeat(3, 1, 1, 1) for x in (q, k, v))
        batch_out, batch_lse, *_ = cpu.forward(Forward(*one, scoring, batch_invariant=True))
        for i in range(3):
            assert_bitwise("out", batch_out[i], out[start:stop])
            assert_bitwise("lse", batch_lse[i], lse[:, start:stop])


def test_table_entries_past_the_length_may_be_anything():
    k = torch.randn(3, 16, 1, 8)
    q = torch.randn(1, 2, 1, 8)
    used = torch.tensor([20], dtype=torch.int32)
    scoring = scored(softmax_scale=0.3, causal=True)

    def out_of(*pages: int):
        table = torch.tensor([pages], dtype=torch.int32)
        cache = Cache(k, k, cache_seqlens=used, block_table=table)
        return cpu.with_kvcache(
            CacheStep(q, cache, scoring, rotary_interleaved=True, num_splits=0)
        )[0]

    results = [out_of(2, 0, rest) for rest in (0, -7, 99)]
    for result in results[1:]:
        assert_bitwise("out", result, results[0])
    with pytest.raises(ValueError, match=r"block_table\[0\]: got page 3; -1 .* to 2 is"):
        out_of(2, 3, 0)
