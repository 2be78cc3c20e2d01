"""Small GPU calls for compute-sanitizer, which slows a kernel a hundredfold.

Each length is odd, so that the last tile of every row and column is partly outside, and the varlen
batch has empty sequences, used lengths, left padding and rows after the last sequence. After
these come calls whose index tensors hold anything.
"""

from __future__ import annotations

import itertools
import os
import random
import sys

import torch

import flash_attn
from flash_attn.dispatch.encode import make_codes, make_query_codes
from flash_attn.flash_attn_interface import _flash_attn_varlen_forward
from flash_attn.layers.rotary import apply_rotary_emb, apply_rotary_emb_qk, apply_rotary_emb_qkv_
from flash_attn.linear import (
    chunk_gated_delta_rule,
    chunk_scan,
    recurrent_gated_delta_rule_step,
    recurrent_step,
)
from tests.any_contents import Calls

LENGTHS = [(1, 1), (65, 129), (129, 65), (33, 0)]  # seqlen_q, seqlen_k
MASKS = [{}, {"causal": True}, {"window_size": (17, 5)}]
DTYPES = (torch.bfloat16, torch.float16)
# Head dims of q and k, and of v: one pair for each size of kernel, some of them smaller than it.
HEAD_DIMS = ((24, 24), (64, 64), (80, 96), (128, 128), (192, 128), (136, 144), (256, 256))
WIDE = (500, 512)


def head_dims_for(tool: str) -> tuple:
    """racecheck does not see that `__syncwarp` orders what a warp reads in Hopper's forward of wide
    heads before the arrival of one lane (docs/kernels/sm90_paired_forward.md). Their backward is
    left out with it."""
    blind = tool == "racecheck" and os.environ.get("FLASH_ATTN_ARCH") != "80"
    return HEAD_DIMS if blind else (*HEAD_DIMS, WIDE)


def mods(heads: int) -> list[dict]:
    """Keywords of plain kernels and of those with score mods, which may have loops for each mod
    alone."""
    slopes = torch.rand(heads)
    sinks = torch.randn(heads, requires_grad=True)
    return [
        {},
        {"softcap": 20.0},
        {"alibi_slopes": slopes},
        {"dropout_p": 0.2},
        {"softcap": 20.0, "alibi_slopes": slopes, "s_aux": sinks, "dropout_p": 0.2},
    ]


def check_gradients(out: torch.Tensor, inputs: list[torch.Tensor], what) -> None:
    """Finite for every input; their values are the other tests' affair."""
    for gradient in torch.autograd.grad(out.float().square().sum(), inputs):
        assert torch.isfinite(gradient).all(), what


def leaves(*shapes: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def dense(dtype: torch.dtype, head_dim: int, head_dim_v: int) -> None:
    cases = itertools.product(LENGTHS, MASKS, mods(4), (False, True))
    for (seqlen_q, seqlen_k), mask, mod, deterministic in cases:
        kv_shape = (2, seqlen_k, 2)
        shapes = (2, seqlen_q, 4, head_dim), (*kv_shape, head_dim), (*kv_shape, head_dim_v)
        inputs = leaves(*shapes, dtype=dtype)
        out = flash_attn.flash_attn_func(*inputs, deterministic=deterministic, **mask, **mod)
        what = (dtype, head_dim, seqlen_q, seqlen_k, mask, mod, deterministic)
        assert torch.isfinite(out).all(), what
        sinks = [mod["s_aux"]] if "s_aux" in mod else []
        check_gradients(out, inputs + sinks, what)


def ordered_dq(dtype: torch.dtype, head_dim: int, head_dim_v: int) -> None:
    """On a GPU so many tiles that the backward hands sums on, which are not set to zero before."""
    shape = (6, 300, 16) if torch.get_default_device().type == "cuda" else (1, 30, 2)
    for causal in (False, True):
        inputs = leaves(*((*shape, d) for d in (head_dim, head_dim, head_dim_v)), dtype=dtype)
        out = flash_attn.flash_attn_func(*inputs, causal=causal)
        check_gradients(out, inputs, (dtype, head_dim, causal, "ordered dQ"))


def varlen(dtype: torch.dtype, head_dim: int, head_dim_v: int) -> None:
    ends_q = torch.tensor([0, 0, 70, 70, 171], dtype=torch.int32)
    ends_k = torch.tensor([0, 5, 138, 200, 201], dtype=torch.int32)
    used = torch.tensor([5, 130, 0, 1], dtype=torch.int32)
    leftpad = torch.tensor([0, 3, 0, 0], dtype=torch.int32)
    shapes = (300, 4, head_dim), (210, 2, head_dim), (210, 2, head_dim_v)
    q, k, v = leaves(*shapes, dtype=dtype)
    lengths = (ends_q, ends_k, 101, 133)
    for mask, mod in itertools.product(MASKS, mods(4)):
        out = flash_attn.flash_attn_varlen_func(q, k, v, *lengths, **mask, **mod)
        assert torch.isfinite(out).all(), (dtype, head_dim, mask, mod)
        check_gradients(out, [q, k, v], (dtype, head_dim, mask, mod))
    q, k, v = (x.detach() for x in (q, k, v))
    out, *_ = _flash_attn_varlen_forward(
        q, k, v, *lengths, 0.0, 0.1, True, seqused_k=used, leftpad_k=leftpad
    )
    assert not out[171:].any(), "rows after the last sequence"


def short(dtype: torch.dtype, head_dim: int, head_dim_v: int) -> None:
    """So many sequences that a thread block of Hopper's backward takes all keys of one."""
    ends = torch.tensor([0, *(1 + 7 * i % 60 for i in range(200))]).cumsum(0).int()
    shapes = [(int(ends[-1]), 2, d) for d in (head_dim, head_dim, head_dim_v)]
    for dims in (shapes, [(66, 129, *shape[1:]) for shape in shapes]):
        inputs = leaves(*dims, dtype=dtype)
        for mask in MASKS:
            if len(dims[0]) == 3:
                out = flash_attn.flash_attn_varlen_func(*inputs, ends, ends, 60, 60, **mask)
            else:
                out = flash_attn.flash_attn_func(*inputs, **mask)
            check_gradients(out, inputs, (dtype, head_dim, mask))


@torch.no_grad()
def cache(dtype: torch.dtype, head_dim: int, head_dim_v: int) -> None:
    """The kernels that append, decode, merge pieces, and read pages with many query rows."""
    used = torch.tensor([0, 131, -1, 290], dtype=torch.int32)
    leftpad = torch.tensor([0, 7, 0, 0], dtype=torch.int32)
    pages = torch.randperm(4 * 19, dtype=torch.int32).view(4, 19)  # of 16 rows
    pages[0, 5:] = -1
    entries = torch.tensor([4, 0, 3, 1], dtype=torch.int32)
    cases = itertools.product([(1, 1), (3, 2), (70, 5)], (False, True), MASKS, mods(4), (0, 3))
    for (seqlen_q, new), paged, mask, mod, num_splits in cases:
        mod.pop("dropout_p", None)
        rows = (80, 16) if paged else (5, 301)
        where = {"block_table": pages} if paged else {"cache_batch_idx": entries}
        q = torch.randn(4, seqlen_q, 4, head_dim, dtype=dtype)
        k, v, k_cache, v_cache = (
            torch.randn(*shape, 2, d, dtype=dtype)
            for shape in ((4, new), rows)
            for d in (head_dim, head_dim_v)
        )
        cos, sin = torch.randn(2, 370, head_dim // 4, dtype=dtype)
        out = flash_attn.flash_attn_with_kvcache(
            q, k_cache, v_cache, k, v, cos, sin, used, cache_leftpad=leftpad,
            num_splits=num_splits, rotary_interleaved=num_splits > 0, **where, **mask, **mod,
        )  # fmt: skip
        assert torch.isfinite(out).all(), (dtype, head_dim, seqlen_q, paged, mask, mod)
        assert not out[2].any(), "a sequence that is absent"


@torch.no_grad()
def latent(dtype: torch.dtype) -> None:
    """A latent cache in pages: an append, a tile of rows and parts of one, cut and whole."""
    used = torch.tensor([0, 131, -1, 290], dtype=torch.int32)
    pages = torch.randperm(4 * 19, dtype=torch.int32).view(4, 19)  # of 16 rows
    cases = itertools.product([(1, 4), (3, 20)], [(64, 512), (0, 40)], (0.0, 3.0), (1, 3))
    for (seqlen_q, heads), (d, dv), softcap, num_splits in cases:
        q, qv = (torch.randn(4, seqlen_q, heads, columns, dtype=dtype) for columns in (d, dv))
        rows = torch.randn(80, 16, 1, dv + d, dtype=dtype)
        new = [torch.randn(4, 2, 1, columns, dtype=dtype) for columns in (d, dv)]
        out = flash_attn.flash_attn_with_kvcache(
            q, rows[..., dv:], rows[..., :dv], *new, qv=qv, cache_seqlens=used, causal=True,
            block_table=pages, num_splits=num_splits, softcap=softcap,
        )  # fmt: skip
        assert torch.isfinite(out).all(), (dtype, d, dv, softcap)
        assert not out[2].any(), "a sequence that is absent"


def probabilities(dtype: torch.dtype) -> None:
    q = torch.randn(2, 33, 4, 40, dtype=dtype)
    k, v = torch.randn(2, 2, 65, 2, 40, dtype=dtype)
    ends = torch.tensor([0, 5, 33], dtype=torch.int32)
    for mask, mod in itertools.product(MASKS, mods(4)):
        options = {**mask, **mod, "return_attn_probs": True}
        _, _, s_dmask = flash_attn.flash_attn_func(q, k, v, **options)
        assert torch.isfinite(s_dmask).all(), (dtype, mask, mod)
        _, _, s_dmask = flash_attn.flash_attn_varlen_func(
            q[0], k[0, :33], v[0, :33], ends, ends, 28, 28, **options
        )
        assert torch.isfinite(s_dmask).all(), (dtype, mask, mod)


def rotary(dtype: torch.dtype) -> None:
    """Heads that are whole runs of 16 bytes, and others; rows after the last sequence."""
    starts = torch.tensor([0, 33], dtype=torch.int32)
    ends = torch.tensor([0, 3, 3, 12], dtype=torch.int32)
    cases = itertools.product(
        [(64, 64), (48, 32), (40, 24), (17, 16)], (False, True), (False, True)
    )
    for (head_dim, rotary_dim), interleaved, inplace in cases:
        cos, sin = torch.rand(2, 40, rotary_dim // 2)
        q, k = (torch.randn(2, 7, h, head_dim, dtype=dtype) for h in (5, 1))
        outs = apply_rotary_emb_qk(q, k, cos, sin, None, None, interleaved, inplace, starts)
        packed = apply_rotary_emb(q.flatten(0, 1), cos, sin, interleaved, inplace, 30, ends)
        (qkv,) = leaves((2, 7, 3, 5, head_dim), dtype=dtype)
        rotated = apply_rotary_emb_qkv_(
            qkv * 1, cos.to(dtype), sin.to(dtype), None, None, interleaved
        )
        check_gradients(rotated, [qkv], (dtype, head_dim, interleaved))
        assert all(torch.isfinite(x).all() for x in (*outs, packed)), (dtype, head_dim, interleaved)


def linear(dtype: torch.dtype) -> None:
    """Chunks forward, their gradients where kernels make them, and steps: every decay."""
    edges = torch.tensor([0, 0, 70, 71, 150], dtype=torch.int32)
    for K, V in ((7, 9), (16, 32), (64, 72), (128, 130), (256, 64), (320, 33)):
        for gates in (None, (2,), (1, 150, 2), (1, 150, 2, K)):
            g = None if gates is None else (-torch.rand(gates)).requires_grad_()
            q, k, v = leaves(*((1, 150, h, d) for h, d in ((1, K), (1, K), (2, V))), dtype=dtype)
            state = torch.randn(4, 2, K, V)
            o, final = chunk_scan(q, k, v, g, None, state, True, cu_seqlens=edges)
            what = (dtype, K, V, gates)
            assert all(torch.isfinite(x).all() for x in (o, final)), what
            check_gradients(o, [q, k, v, *([] if g is None else [g])], what)
            g = None if g is None else g.detach()
            tokens = [x.detach()[0, :3] for x in (q, k, v)]
            slots = torch.tensor([3, -1, 0])
            g = g if g is None or g.dim() == 1 else g[0, :3]
            assert torch.isfinite(recurrent_step(*tokens, g, state, slots)).all(), what
            assert torch.isfinite(state).all(), what


def delta_rule(dtype: torch.dtype) -> None:
    """Chunks forward, and steps."""
    edges = torch.tensor([0, 0, 70, 71, 150], dtype=torch.int32)
    for K in (64, 128, 256):  # enough blocks for 64 columns of V each
        q, k, v = (torch.randn(4, 70, h, d).to(dtype) for h, d in ((4, K), (4, K), (24, 128)))
        g, beta = -torch.rand(4, 70, 24), torch.rand(4, 70, 24)
        o, _ = chunk_gated_delta_rule(q, k, v, g, beta, use_qk_l2norm_in_kernel=True)
        assert torch.isfinite(o).all(), (dtype, K)
    for K, V in ((7, 9), (16, 32), (64, 72), (128, 130), (256, 64)):
        q, k, v = (torch.randn(1, 150, h, d).to(dtype) for h, d in ((1, K), (1, K), (2, V)))
        g, beta = -torch.rand(1, 150, 2), torch.rand(1, 150, 2)
        k, state = torch.nn.functional.normalize(k, dim=-1), torch.randn(4, 2, K, V)
        o, final = chunk_gated_delta_rule(
            q, k, v, g, beta, None, state, output_final_state=True, cu_seqlens=edges
        )
        assert all(torch.isfinite(x).all() for x in (o, final)), (dtype, K, V)
        tokens = [x[0, :3] for x in (q, k, v, g, beta)]
        o = recurrent_gated_delta_rule_step(*tokens, state, torch.tensor([3, -1, 0]))
        assert all(torch.isfinite(x).all() for x in (o, state)), (dtype, K, V)


def codes(dtype: torch.dtype) -> None:
    """Of q, k and v, with tails of slices and columns."""
    for rows, columns in ((1, 16), (511, 96), (513, 256), (1100, 64)):
        q, k, v = (torch.randn(2, rows, h, columns).to(dtype) for h in (4, 2, 2))
        for smooth_k in (False, True):
            made = make_codes(q, k, v, smooth_k)
            assert all(torch.isfinite(x.float()).all() for x in made), (dtype, rows, columns)
    # An empty sequence, one shorter than a slice, a long one; rows after the last.
    ends = torch.tensor([0, 0, 33, 1100], dtype=torch.int32)
    for columns in (16, 96, 256):
        q = torch.randn(1200, 4, columns).to(dtype)
        made, descale = make_query_codes(q, ends, 2)
        assert torch.isfinite(made[:1100].float()).all(), (dtype, columns)
        assert torch.isfinite(descale).all(), (dtype, columns)


def any_contents(dtype: torch.dtype, head_dim: int, head_dim_v: int, device: str) -> None:
    """A CPU, where one can look, refuses nearly all of them."""
    for seed in range(12):
        for call in Calls.ALL:
            try:
                call(Calls(random.Random(seed), dtype, head_dim, head_dim_v, device))
            except ValueError:
                continue


def main(device: str = "cuda", tool: str = "memcheck") -> None:
    """tool: initcheck would find what wrong contents leave unwritten."""
    torch.set_default_device(device)
    torch.manual_seed(0)
    for n, dtype in enumerate(DTYPES):
        # A CPU only tries these calls: there head dims choose no kernel, and dtypes take turns.
        step = 1 if device == "cuda" else len(DTYPES)
        for head_dims in head_dims_for(tool)[n % step :: step]:
            dense(dtype, *head_dims)
            ordered_dq(dtype, *head_dims)
            varlen(dtype, *head_dims)
            short(dtype, *head_dims)
            cache(dtype, *head_dims)
            if tool != "initcheck":
                any_contents(dtype, *head_dims, device)
        latent(dtype)
        probabilities(dtype)
        rotary(dtype)
        linear(dtype)
        delta_rule(dtype)
        codes(dtype)
    print("all calls returned finite values")


if __name__ == "__main__":
    main("cuda", *sys.argv[1:])
