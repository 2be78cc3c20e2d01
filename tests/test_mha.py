"""The attention module against the plain formula, and its ways to be called against each other."""

import copy
import math
import pickle

import pytest
import torch
import torch.nn.functional as F

from flash_attn.modules.mha import MHA, get_alibi_slopes
from flash_attn.utils.generation import InferenceParams

DIM, HEADS, SEQLEN = 64, 4, 11
ROTARY = [
    {},
    {"rotary_emb_dim": 16},
    {"rotary_emb_dim": 8, "rotary_emb_interleaved": True},
    {"rotary_emb_dim": 16, "rotary_emb_scale_base": 512.0},
]


def make(**options):
    torch.manual_seed(0)
    options = {"use_flash_attn": True, "causal": True, "layer_idx": 0} | options
    return MHA(DIM, HEADS, **options)


def plain_attention(q, k, v, bias):
    """softmax(q k^T / sqrt(d) + bias) v in float64; q, k, v (b, s, h, d), bias ([h,] sq, sk)."""
    groups = q.shape[2] // k.shape[2]
    k, v = (t.repeat_interleave(groups, dim=2) for t in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / math.sqrt(q.shape[-1]) + bias
    return torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v)


def causal_bias(seqlen, window=None):
    distance = torch.arange(seqlen)[:, None] - torch.arange(seqlen)
    hidden = distance < 0 if window is None else (distance < 0) | (distance > window)
    return torch.zeros(seqlen, seqlen).double().masked_fill(hidden, -math.inf), distance


def plain_mha(mha, x, bias):
    """The module's projections and the plain formula, in float64."""
    mha = copy.deepcopy(mha).double()
    qkv = mha.Wqkv(x.double()).unflatten(-1, (-1, mha.head_dim))
    q, k, v = qkv.split([mha.num_heads, mha.num_heads_kv, mha.num_heads_kv], dim=2)
    return mha.out_proj(plain_attention(q, k, v, bias).flatten(-2))


@pytest.mark.parametrize("use_flash_attn", [True, False])
@pytest.mark.parametrize("heads_kv", [4, 2, 1])
def test_plain_formula(use_flash_attn, heads_kv):
    mha = make(num_heads_kv=heads_kv, use_flash_attn=use_flash_attn)
    x = torch.randn(2, SEQLEN, DIM)
    expected = plain_mha(mha, x, causal_bias(SEQLEN)[0])
    torch.testing.assert_close(mha(x).double(), expected, rtol=0, atol=1e-5)


def test_window():
    mha = make(window_size=(3, 0))
    x = torch.randn(2, SEQLEN, DIM)
    expected = plain_mha(mha, x, causal_bias(SEQLEN, window=3)[0])
    torch.testing.assert_close(mha(x).double(), expected, rtol=0, atol=1e-5)


def test_alibi():
    mha = make(use_alibi=True)
    x = torch.randn(2, SEQLEN, DIM)
    bias, distance = causal_bias(SEQLEN)
    slopes = torch.tensor(get_alibi_slopes(HEADS)).double()
    expected = plain_mha(mha, x, bias - slopes[:, None, None] * distance.abs())
    torch.testing.assert_close(mha(x).double(), expected, rtol=0, atol=1e-5)


def test_alibi_survives_a_change_of_dtype():
    mha = make(use_alibi=True)
    slopes = torch.tensor(get_alibi_slopes(12))  # not all of them are bfloat16 numbers
    mha.inner_attn.alibi_slopes = slopes
    mha.to(torch.bfloat16)
    assert torch.equal(mha.inner_attn.alibi_slopes, slopes)
    moved = make(use_alibi=True).to("meta", torch.bfloat16)
    assert moved.inner_attn.alibi_slopes.is_meta
    assert moved.inner_attn.alibi_slopes.dtype == torch.float32
    x = torch.randn(1, 5, DIM, dtype=torch.bfloat16)
    assert make(use_alibi=True).bfloat16()(x).dtype == torch.bfloat16


def test_copies_and_pickles():
    mha = make(rotary_emb_dim=8, num_heads_kv=2, use_alibi=True)
    x = torch.randn(1, 5, DIM)
    expected = mha(x)  # and there is a table of angles to copy
    for twin in (copy.deepcopy(mha), pickle.loads(pickle.dumps(mha))):
        assert torch.equal(twin(x), expected)
        assert twin.Wqkv.weight is not mha.Wqkv.weight


def test_under_autocast():
    mha, x = make(rotary_emb_dim=8), torch.randn(1, 5, DIM)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = mha(x)
        out.sum().backward()
    assert out.dtype == torch.bfloat16
    assert mha.Wqkv.weight.grad.dtype == torch.float32
    torch.testing.assert_close(out.float(), mha(x), atol=2e-2, rtol=2e-2)


def test_depthwise_convolution_of_grouped_heads():
    mha = make(dwconv=True, num_heads_kv=2, use_flash_attn=False).double()
    x = torch.randn(2, SEQLEN, DIM, dtype=torch.float64)
    convolutions = mha.dwconv_q, mha.dwconv_kv
    weight = torch.cat([c.weight for c in convolutions])
    bias = torch.cat([c.bias for c in convolutions])
    qkv = F.pad(mha.Wqkv(x).transpose(1, 2), (2, 0))  # a row sees itself and the two before
    qkv = F.conv1d(qkv, weight, bias, groups=len(bias)).transpose(1, 2).unflatten(-1, (8, -1))
    out = plain_attention(*qkv.split([4, 2, 2], dim=2), causal_bias(SEQLEN)[0])
    torch.testing.assert_close(mha(x), mha.out_proj(out.flatten(-2)))


def test_alibi_slopes():
    assert get_alibi_slopes(8) == [2.0**-i for i in range(1, 9)]
    assert get_alibi_slopes(12)[8:] == [2.0**-0.5, 2.0**-1.5, 2.0**-2.5, 2.0**-3.5]


@pytest.mark.parametrize("options", ROTARY)
@pytest.mark.parametrize("heads_kv", [4, 2])
@pytest.mark.parametrize(
    "extra", [{}, {"causal": False}, {"dwconv": True}, {"checkpointing": True}]
)
def test_flash_equals_standard_with_gradients(options, heads_kv, extra):
    options = options | extra | {"num_heads_kv": heads_kv}
    flash, standard = make(**options), make(use_flash_attn=False, **options)
    standard.load_state_dict(flash.state_dict())
    x = torch.randn(2, SEQLEN, DIM)
    dout = torch.randn(2, SEQLEN, DIM)
    results = []
    for module in (flash, standard):
        leaf = x.clone().requires_grad_()
        out = module(leaf)
        inputs = [leaf, *module.parameters()]
        results.append([out, *torch.autograd.grad(out, inputs, dout)])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("options", ROTARY)
@pytest.mark.parametrize("heads_kv", [4, 2])
def test_packed_sequences_equal_each_alone(options, heads_kv):
    mha = make(num_heads_kv=heads_kv, **options)
    lengths = [5, 0, 11, 1]
    cu_seqlens = torch.tensor([0, 5, 5, 16, 17], dtype=torch.int32)
    x = torch.randn(17, DIM)
    alone = [mha(part[None])[0] for part in x.split(lengths) if len(part)]
    packed = mha(x, cu_seqlens=cu_seqlens, max_seqlen=11)
    # xPos centres its magnitudes on the middle of the table, which cancels up to rounding.
    torch.testing.assert_close(packed, torch.cat(alone), rtol=1e-4, atol=1e-5)


def test_padding_mask():
    flash, standard = make(), make(use_flash_attn=False)
    standard.load_state_dict(flash.state_dict())
    x = torch.randn(3, SEQLEN, DIM, requires_grad=True)
    mask = torch.arange(SEQLEN) < torch.tensor([4, SEQLEN, 1])[:, None]
    out, expected = flash(x, key_padding_mask=mask), standard(x, key_padding_mask=mask)
    torch.testing.assert_close(out[mask], expected[mask], rtol=1e-4, atol=1e-5)
    assert (out[~mask] == 0).all()
    (dx,) = torch.autograd.grad(out.sum(), x)
    assert (dx[~mask] == 0).all()
    assert (dx[mask] != 0).any()


@pytest.mark.parametrize("use_flash_attn", [True, False])
@pytest.mark.parametrize("subset", [None, slice(0, 1)])
def test_cross_attention(use_flash_attn, subset):
    mha = make(cross_attn=True, causal=False, num_heads_kv=2, use_flash_attn=use_flash_attn)
    x, x_kv = torch.randn(2, 3, DIM), torch.randn(2, 7, DIM)
    exact = copy.deepcopy(mha).double()
    q = exact.Wq(x.double()).unflatten(-1, (HEADS, -1))
    k, v = exact.Wkv(x_kv.double()).unflatten(-1, (2, 2, -1)).unbind(2)
    expected = exact.out_proj(plain_attention(q, k, v, torch.zeros(3, 7)).flatten(-2))
    expected = expected if subset is None else expected[:, subset]
    out = mha(x, x_kv, mixer_subset=subset)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-5)


def test_packed_cross_attention():
    mha = make(cross_attn=True, causal=False)
    x, x_kv = torch.randn(5, DIM), torch.randn(9, DIM)
    cu_q, cu_k = (torch.tensor(t, dtype=torch.int32) for t in ([0, 2, 5], [0, 6, 9]))
    lengths = {"cu_seqlens": cu_q, "max_seqlen": 3, "cu_seqlens_k": cu_k, "max_seqlen_k": 6}
    packed = mha(x, x_kv, **lengths)
    alone = [mha(x[None, :2], x_kv[None, :6])[0], mha(x[None, 2:], x_kv[None, 6:])[0]]
    torch.testing.assert_close(packed, torch.cat(alone), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("options", ROTARY)
@pytest.mark.parametrize("heads_kv", [4, 2])
@pytest.mark.parametrize("use_flash_attn", [True, False])
@torch.no_grad()
def test_generation_equals_one_pass(options, heads_kv, use_flash_attn):
    """A prompt of 6 tokens, then one by one, then two at once."""
    mha = make(num_heads_kv=heads_kv, use_flash_attn=use_flash_attn, **options)
    x = torch.randn(2, SEQLEN, DIM)
    state = InferenceParams(max_seqlen=16, max_batch_size=2)
    outputs = []
    for step in x.split([6, 1, 1, 1, 2], dim=1):
        outputs.append(mha(step, inference_params=state))
        state.seqlen_offset += step.shape[1]
    torch.testing.assert_close(torch.cat(outputs, 1), mha(x), rtol=1e-4, atol=1e-5)
    assert state.key_value_memory_dict[0].shape == (2, 16, 2, heads_kv, DIM // HEADS)


@pytest.mark.parametrize("options", ROTARY)
@pytest.mark.parametrize("heads_kv", [4, 2])
@pytest.mark.parametrize("use_flash_attn", [True, False])
@torch.no_grad()
def test_generation_without_a_causal_mask(options, heads_kv, use_flash_attn):
    """Each row of a step has a position of its own, and sees all that is in the cache by then."""
    mha = make(num_heads_kv=heads_kv, use_flash_attn=use_flash_attn, causal=False, **options)
    x = torch.randn(2, SEQLEN, DIM)
    state = InferenceParams(max_seqlen=16, max_batch_size=2)
    for step in (slice(0, 6), slice(6, 7), slice(7, SEQLEN)):
        out = mha(x[:, step], inference_params=state)
        expected = mha(x[:, : step.stop])[:, step]
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
        state.seqlen_offset = step.stop


@torch.no_grad()
def test_generation_with_a_length_per_sequence():
    mha = make(rotary_emb_dim=16, num_heads_kv=2)
    x = torch.randn(2, SEQLEN, DIM)
    prompt = torch.tensor([6, 3], dtype=torch.int32)
    state = InferenceParams(max_seqlen=16, max_batch_size=4, batch_size_offset=1)
    mha(x[:, :6], inference_params=state)  # fills too much of sequence 1: its length says so
    state.lengths_per_sample = torch.tensor([9, 6, 3, 9], dtype=torch.int32)
    out = mha(torch.stack((x[0, 6:7], x[1, 3:4])), inference_params=state)
    full = mha(x)
    expected = torch.stack((full[0, 6:7], full[1, 3:4]))
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    assert prompt.tolist() == state.lengths_per_sample[1:3].tolist()


def test_dropout_only_in_training():
    mha = make(dropout=0.5)
    x = torch.randn(2, SEQLEN, DIM)
    assert not torch.equal(mha(x), mha(x))
    mha.eval()
    assert torch.equal(mha(x), mha(x))
    plain = make()
    torch.testing.assert_close(mha(x), plain(x))


@pytest.mark.parametrize("options", [ROTARY[0], ROTARY[3]])
@pytest.mark.parametrize("heads_kv", [4, 2])
def test_compiles_without_graph_breaks(options, heads_kv):
    torch._dynamo.reset()
    mha = make(num_heads_kv=heads_kv, **options)
    compiled = torch.compile(mha, fullgraph=True, backend="aot_eager")
    x = torch.randn(2, SEQLEN, DIM)
    compiled(x)  # makes the tables of angles; the second call finds them
    out, expected = compiled(x), mha(x)
    torch.testing.assert_close(out, expected)
    weights = list(mha.parameters())
    grads = [torch.autograd.grad(t.square().sum(), weights) for t in (out, expected)]
    torch.testing.assert_close(*grads)


def test_packed_call_compiles_without_graph_breaks():
    torch._dynamo.reset()
    mha = make(num_heads_kv=2, rotary_emb_dim=16)
    compiled = torch.compile(mha, fullgraph=True, backend="aot_eager")
    lengths = {"cu_seqlens": torch.tensor([0, 5, 17], dtype=torch.int32), "max_seqlen": 12}
    x = torch.randn(17, DIM)
    torch.testing.assert_close(compiled(x, **lengths), mha(x, **lengths))


@pytest.mark.parametrize("options", [{}, {"num_heads_kv": 2}, {"cross_attn": True}])
@pytest.mark.parametrize("use_flash_attn", [True, False])
def test_rotary_with_create_graph(options, use_flash_attn):
    mha = make(rotary_emb_dim=8, use_flash_attn=use_flash_attn, **options)
    x = torch.randn(2, 6, DIM, requires_grad=True)
    (plain,) = torch.autograd.grad(mha(x).sum(), x)
    (gradient,) = torch.autograd.grad(mha(x).sum(), x, create_graph=True)
    torch.testing.assert_close(gradient, plain)


@pytest.mark.parametrize(
    ("options", "strict", "trains"),
    [  # each two of them meet
        ({}, False, False),
        ({}, True, True),
        ({"num_heads_kv": 2}, False, True),
        ({"num_heads_kv": 2}, True, False),
        ({"cross_attn": True}, False, False),
        ({"cross_attn": True}, True, True),
    ],
)
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_export_with_rotary(options, strict, trains):
    mha = make(rotary_emb_dim=8, use_flash_attn=True, **options).requires_grad_(trains)
    seqlen = torch.export.Dim("seqlen", min=2, max=64)
    program = torch.export.export(
        mha, (torch.randn(2, 6, DIM),), dynamic_shapes=({1: seqlen},), strict=strict
    )
    longer = torch.randn(2, 40, DIM)
    torch.testing.assert_close(program.module()(longer), mha(longer))


def test_return_residual():
    x = torch.randn(2, SEQLEN, DIM)
    out, residual = make(return_residual=True)(x)
    assert residual is x
    torch.testing.assert_close(out, make()(x))
    mask = torch.ones(2, SEQLEN, dtype=torch.bool)
    out, residual = make(return_residual=True)(x, key_padding_mask=mask)
    assert residual is x
    torch.testing.assert_close(out, make()(x), rtol=1e-4, atol=1e-5)


def test_parameter_names_of_checkpoints():
    names = set(make(rotary_emb_dim=16, use_alibi=True).state_dict())
    assert names == {"Wqkv.weight", "Wqkv.bias", "out_proj.weight", "out_proj.bias"}
    names = set(make(cross_attn=True, dwconv=True, qkv_proj_bias=False).state_dict())
    assert {"Wq.weight", "Wkv.weight", "dwconv_q.weight", "dwconv_kv.bias"} <= names
    for heads_kv, convolutions in ((4, {"dwconv_qkv"}), (2, {"dwconv_q", "dwconv_kv"})):
        names = make(dwconv=True, num_heads_kv=heads_kv).state_dict()
        assert {name.split(".")[0] for name in names} == {"Wqkv", "out_proj"} | convolutions


def test_bad_input():
    with pytest.raises(ValueError, match="embed_dim: got 10; a multiple"):
        MHA(10, 4)
    with pytest.raises(ValueError, match="num_heads_kv, 3, is needed"):
        MHA(DIM, 4, num_heads_kv=3)
    with pytest.raises(ValueError, match="need use_flash_attn"):
        MHA(DIM, 4, use_alibi=True)
    x = torch.randn(2, SEQLEN, DIM)
    cu_seqlens = torch.tensor([0, 2], dtype=torch.int32)
    with pytest.raises(ValueError, match="cu_seqlens needs max_seqlen"):
        make()(x[0], cu_seqlens=cu_seqlens)
    with pytest.raises(ValueError, match="need cross_attn"):
        make()(x, x_kv=x)
    packed = dict(cu_seqlens=cu_seqlens, max_seqlen=2)
    mask = torch.ones(2, SEQLEN, dtype=torch.bool)
    with pytest.raises(ValueError, match="packed rows have no padding"):
        make()(x[0], key_padding_mask=mask, **packed)
    with pytest.raises(ValueError, match="key_padding_mask with flash cross attention"):
        make(cross_attn=True)(x, x_kv=x, key_padding_mask=mask)
    with pytest.raises(NotImplementedError, match="rotary embedding with packed cross"):
        make(cross_attn=True, rotary_emb_dim=8)(x[0], x_kv=x[0], **packed)
    with pytest.raises(NotImplementedError, match="mix neighbouring sequences"):
        make(dwconv=True)(x[0], cu_seqlens=cu_seqlens, max_seqlen=2)
    state = InferenceParams(max_seqlen=16, max_batch_size=2)
    with pytest.raises(ValueError, match="needs layer_idx"):
        make(layer_idx=None)(x, inference_params=state)
    with pytest.raises(NotImplementedError, match="its state is not cached"):
        make(dwconv=True)(x, inference_params=state)
    with pytest.raises(ValueError, match="use lengths_per_sample"):
        make()(x, key_padding_mask=mask, inference_params=state)
    ragged = InferenceParams(16, 2, lengths_per_sample=torch.tensor([1, 2], dtype=torch.int32))
    with torch.no_grad(), pytest.raises(NotImplementedError, match="needs use_flash_attn"):
        make(use_flash_attn=False)(x[:, :1], inference_params=ragged)
    small = InferenceParams(max_seqlen=4, max_batch_size=2)
    with (
        torch.no_grad(),
        pytest.raises(ValueError, match="inference_params: got room for 4 tokens"),
    ):
        make(use_flash_attn=False)(x, inference_params=small)


def test_x_of_the_wrong_shape_is_named():
    mha = make()
    for bad in (torch.randn(5, DIM), torch.randn(1, 5, DIM + 1), torch.randn(1, 1, 5, DIM)):
        with pytest.raises(
            ValueError, match=r"x: got shape .*; \(batch, seqlen, 64\) is needed; pack"
        ):
            mha(bad)
    ends = torch.tensor([0, 5], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"x: got shape \(1, 5, 64\); \(total, 64\) is needed"):
        mha(torch.randn(1, 5, DIM), cu_seqlens=ends, max_seqlen=5)
