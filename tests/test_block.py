"""Blocks, embeddings and patches against their formulas."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from flash_attn.layers.patch_embed import PatchEmbed
from flash_attn.modules.block import Block, ParallelBlock, StochasticDepth
from flash_attn.modules.embedding import BertEmbeddings, GPT2Embeddings
from flash_attn.modules.mha import MHA, LinearResidual
from flash_attn.modules.mlp import GatedMlp, Mlp
from flash_attn.ops.triton.layer_norm import RMSNorm
from flash_attn.utils.generation import InferenceParams

DIM = 32
MIXER = partial(MHA, num_heads=4, use_flash_attn=True, causal=True, layer_idx=0)
NORMS = {
    "layer": nn.LayerNorm,
    "rms": RMSNorm,
    "centered": partial(RMSNorm, zero_centered_weight=True),
}


def block(kind=Block, norm="layer", **options):
    torch.manual_seed(0)
    made = kind(DIM, MIXER, norm_cls=NORMS[norm], **options)
    for p in made.parameters():
        nn.init.normal_(p, std=0.3)
    return made


def xs(count=1):
    return [torch.randn(2, 7, DIM) for _ in range(count)]


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("fused", [False, True])
def test_pre_norm(norm, fused):
    b = block(norm=norm, fused_dropout_add_ln=fused)
    x, residual = xs(2)
    first = x + residual
    second = first + b.mixer(b.norm1(first))
    out, stream = b(x, residual)
    torch.testing.assert_close(stream, second)
    torch.testing.assert_close(out, b.mlp(b.norm2(second)))
    torch.testing.assert_close(b(x)[1], x + b.mixer(b.norm1(x)))


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("return_residual", [False, True])
def test_post_norm(fused, return_residual):
    b = block(
        prenorm=False, fused_dropout_add_ln=fused, return_residual=return_residual,
        mlp_cls=partial(Mlp, return_residual=return_residual),
    )  # fmt: skip
    b.mixer.return_residual = return_residual
    (x,) = xs()
    mixed = b.mixer(x)
    first = b.norm1((mixed[0] if return_residual else mixed) + x)
    fed = b.mlp(first)
    torch.testing.assert_close(b(x), b.norm2((fed[0] if return_residual else fed) + first))
    with pytest.raises(ValueError, match="residual: got one with prenorm=False"):
        b(x, x)


@pytest.mark.parametrize("fused", [False, True])
def test_residual_in_fp32(fused):
    b = block(residual_in_fp32=True, fused_dropout_add_ln=fused).bfloat16()
    (x,) = xs()
    out, residual = b(x.bfloat16())
    assert (out.dtype, residual.dtype) == (torch.bfloat16, torch.float32)
    out, residual = b(out, residual)
    assert (out.dtype, residual.dtype) == (torch.bfloat16, torch.float32)
    with pytest.raises(ValueError, match="residual_in_fp32 needs prenorm=True"):
        block(residual_in_fp32=True, prenorm=False)


@pytest.mark.parametrize("fused", [False, True])
def test_dropout_and_stochastic_depth(fused):
    """All of it drops the branches whole, in training alone."""
    (x,) = xs()
    for options in ({"resid_dropout1": 1.0}, {"drop_path1": 1.0}):
        b = block(fused_dropout_add_ln=fused, **options)
        residual = torch.randn_like(x)
        torch.testing.assert_close(b(x, residual)[1], residual + b.mixer(b.norm1(residual)))
        plain = block(fused_dropout_add_ln=fused)
        torch.testing.assert_close(b.eval()(x, residual)[0], plain(x, residual)[0])


def test_stochastic_depth_drops_rows_and_keeps_the_mean():
    torch.manual_seed(0)
    out = StochasticDepth(0.25)(torch.ones(4000, 2, 3))
    torch.testing.assert_close(out.unique(), torch.tensor([0.0, 1 / 0.75]))
    assert (out == out[:, :1, :1]).all()
    assert abs(out.mean() - 1) < 0.05
    with pytest.raises(ValueError, match="p: got 2; 0 to 1 is needed"):
        StochasticDepth(2)


def test_a_subset_of_the_queries():
    mixer = partial(MHA, num_heads=4, cross_attn=True)
    b = Block(DIM, mixer)
    (x,) = xs()
    out, residual = b(x, mixer_subset=slice(0, 1))
    assert out.shape == residual.shape == (2, 1, DIM)
    torch.testing.assert_close(out, b(x)[0][:, :1])


def test_post_norm_of_a_subset_without_an_mlp():
    mixer = partial(MHA, num_heads=4, cross_attn=True)
    b = Block(DIM, mixer, prenorm=False, mlp_cls=nn.Identity)
    (x,) = xs()
    out = b(x, mixer_subset=slice(2, 4))
    torch.testing.assert_close(out, b.norm1(b.mixer(x) + x)[:, 2:4])


def test_without_an_mlp():
    b = block(mlp_cls=nn.Identity)
    (x,) = xs()
    out, residual = b(x)
    assert torch.equal(residual, x)
    torch.testing.assert_close(out, b.mixer(b.norm1(x)))
    assert not hasattr(b, "norm2")


def test_defaults_and_names():
    b = Block(128)
    assert b.mixer.num_heads == 2
    assert b.mlp.fc1.out_features == 512
    assert {n.split(".")[0] for n, _ in b.named_parameters()} == {"mixer", "mlp", "norm1", "norm2"}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_parallel_block(tied, fused):
    b = block(ParallelBlock, tied_norm=tied, fused_dropout_add_ln=fused)
    x1, x2, residual = xs(3)
    for second, stream in ((x2, residual), (None, None)):
        z = x1 if second is None else x1 + second + stream
        ours = b(x1, second, stream)
        expected = (b.mixer(b.norm1(z)), b.mlp(b.norm1(z) if tied else b.norm2(z)), z)
        for a, e in zip(ours, expected):
            torch.testing.assert_close(a, e)


def test_parallel_block_drops_both_branches():
    x1, x2, residual = xs(3)
    for fused in (False, True):
        b = block(ParallelBlock, fused_dropout_add_ln=fused, resid_dropout1=1.0, resid_dropout2=1.0)
        torch.testing.assert_close(b(x1, x2, residual)[2], residual)
        torch.testing.assert_close(b.eval()(x1, x2, residual)[2], x1 + x2 + residual)
    with pytest.raises(ValueError, match=r"resid_dropout2 0\.5; .* one probability for both"):
        block(ParallelBlock, fused_dropout_add_ln=True, resid_dropout2=0.5)


@pytest.mark.parametrize("kind", [Block, ParallelBlock])
@pytest.mark.parametrize("fused", [False, True])
def test_compiles_in_one_graph(kind, fused):
    gated = partial(GatedMlp, activation=nn.functional.silu)
    b = block(kind, mlp_cls=gated, fused_dropout_add_ln=fused)
    (x,) = xs()
    compiled = torch.compile(b, fullgraph=True, backend="aot_eager")(x)
    for ours, expected in zip(compiled, b(x)):
        torch.testing.assert_close(ours, expected)
    grads = [
        torch.autograd.grad(sum(out.square().sum() for out in outs), [*b.parameters()])
        for outs in (compiled, b(x))
    ]
    for ours, expected in zip(*grads):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)


def test_generation_through_blocks():
    b = block().eval()
    (x,) = xs()
    state = InferenceParams(max_seqlen=8, max_batch_size=2)
    assert b.allocate_inference_cache(2, 8).shape == (2, 8, 2, 4, 8)
    with torch.no_grad():
        steps = []
        for part in x.split([5, 1, 1], dim=1):
            steps.append(b(part, mixer_kwargs={"inference_params": state})[0])
            state.seqlen_offset += part.shape[1]
        torch.testing.assert_close(torch.cat(steps, 1), b(x)[0], rtol=1e-4, atol=1e-5)


def test_marks_for_parallel_training():
    b = block(sequence_parallel=True, mark_shared_params=True)
    marked = {n for n, p in b.named_parameters() if getattr(p, "_sequence_parallel", False)}
    assert marked == {"norm1.weight", "norm1.bias", "norm2.weight", "norm2.bias"}
    assert {n for n, p in b.named_parameters() if hasattr(p, "_shared_params")} == marked


def test_fused_needs_a_norm_that_it_knows():
    with pytest.raises(ValueError, match="needs norms that are LayerNorm or RMSNorm"):
        Block(64, norm_cls=lambda dim: nn.Identity(), fused_dropout_add_ln=True)
    assert Block(64, norm_cls=lambda dim: nn.Identity())(torch.randn(1, 2, 64))[0].isfinite().all()


def test_linear_residual():
    layer, x = LinearResidual(3, 2), torch.randn(4, 3)
    out, same = layer(x)
    assert same is x
    torch.testing.assert_close(out, nn.functional.linear(x, layer.weight, layer.bias))


# --- Embeddings -----------------------------------------------------------------------------------

IDS = torch.tensor([[3, 1, 4], [1, 5, 9]])


def test_gpt2_embeddings():
    e = GPT2Embeddings(8, 11, 6, word_embed_proj_dim=4)
    words, places = e.word_embeddings.weight[IDS] @ e.project_in.weight.t(), e.position_embeddings
    torch.testing.assert_close(e(IDS), words + places.weight[:3])
    positions = torch.tensor([[2, 0, 1], [5, 5, 5]])
    torch.testing.assert_close(e(IDS, positions), words + places.weight[positions])
    plain = GPT2Embeddings(8, 11, 0, padding_idx=1)
    assert torch.equal(plain(IDS), plain.word_embeddings.weight[IDS])
    assert not plain(IDS)[0, 1].any()
    assert not hasattr(plain, "position_embeddings")


def test_bert_embeddings():
    e = BertEmbeddings(8, 11, 6, 2)
    words = e.word_embeddings.weight[IDS] + e.position_embeddings.weight[:3]
    torch.testing.assert_close(e(IDS), words + e.token_type_embeddings.weight[0])
    types = torch.tensor([[0, 1, 1], [1, 0, 0]])
    torch.testing.assert_close(
        e(IDS, token_type_ids=types), words + e.token_type_embeddings.weight[types]
    )
    assert "token_type_embeddings.weight" not in BertEmbeddings(8, 11, 6, 0).state_dict()


# --- Patches --------------------------------------------------------------------------------------


def test_patches_are_a_convolution():
    embed = PatchEmbed((8, 12), 4, in_chans=3, embed_dim=5)
    assert embed.grid_size == (2, 3)
    assert embed.num_patches == 6
    x = torch.randn(2, 3, 8, 12)
    weight = embed.proj.weight.unflatten(1, (3, 4, 4))
    expected = nn.functional.conv2d(x, weight, embed.proj.bias, stride=4)
    torch.testing.assert_close(embed(x), expected.flatten(2).transpose(1, 2))
    embed.flatten = False
    torch.testing.assert_close(embed(x), expected.permute(0, 2, 3, 1))
    with pytest.raises(ValueError, match=r"x: got \(8, 8\) pixels; \(8, 12\)"):
        embed(x[..., :8])
    with pytest.raises(ValueError, match=r"img_size: got \(9, 9\)"):
        PatchEmbed(9, 4)
    assert isinstance(PatchEmbed(8, 4, norm_layer=nn.LayerNorm).norm, nn.LayerNorm)
