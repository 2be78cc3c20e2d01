"""Latent attention (MLA): a layer that trains with heads of 192 and 128 columns, and generates from
a cache of one latent row a token.

python examples/mla.py
"""

import itertools
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from flash_attn import flash_attn_func, flash_attn_with_kvcache
from flash_attn.layers.rotary import apply_rotary_emb

HIDDEN, HEADS, LATENT = 64, 4, 512
PLAIN, ROTATED = 128, 64  # columns of a head of q and k that are not rotated, and that are
VALUE = 128  # of v
SCALE = (PLAIN + ROTATED) ** -0.5


class LatentAttention(nn.Module):
    """DeepSeek-AI 2024, arXiv:2405.04434: keys and values of all heads come from one latent row."""

    def __init__(self):
        super().__init__()
        self.q = nn.Linear(HIDDEN, HEADS * (PLAIN + ROTATED), bias=False)
        self.down = nn.Linear(HIDDEN, LATENT + ROTATED, bias=False)
        self.up_k = nn.Parameter(torch.randn(HEADS, PLAIN, LATENT) * LATENT**-0.5)
        self.up_v = nn.Parameter(torch.randn(HEADS, VALUE, LATENT) * LATENT**-0.5)
        self.out = nn.Linear(HEADS * VALUE, HIDDEN, bias=False)

    def project(self, x):
        """Both parts of q (b, s, h, …); the latent row and the key to rotate (b, s, 1, …)."""
        q = self.q(x).unflatten(-1, (HEADS, PLAIN + ROTATED)).split([PLAIN, ROTATED], -1)
        return *q, *self.down(x)[:, :, None].split([LATENT, ROTATED], -1)

    def forward(self, x, cos, sin):
        """All tokens at once: keys and values of every head, 192 and 128 columns."""
        q_plain, q_rotated, latent, k_rotated = self.project(x)
        q_rotated, k_rotated = (apply_rotary_emb(t, cos, sin) for t in (q_rotated, k_rotated))
        k_plain = torch.einsum("bsl,hdl->bshd", latent[:, :, 0], self.up_k)
        v = torch.einsum("bsl,hdl->bshd", latent[:, :, 0], self.up_v)
        q = torch.cat([q_plain, q_rotated], -1)
        k = torch.cat([k_plain, k_rotated.expand(-1, -1, HEADS, -1)], -1)
        return self.out(flash_attn_func(q, k, v, softmax_scale=SCALE, causal=True).flatten(2))

    def step(self, x, cos, sin, cache, used):
        """New tokens: q · (up_k · latent) is (q · up_k) · latent, so the cache stays latent."""
        q_plain, q_rotated, latent, k_rotated = self.project(x)
        out = flash_attn_with_kvcache(
            q_rotated, cache[..., LATENT:], cache[..., :LATENT], k_rotated, latent,
            qv=torch.einsum("bshd,hdl->bshl", q_plain, self.up_k), softmax_scale=SCALE,
            rotary_cos=cos, rotary_sin=sin, rotary_interleaved=False, cache_seqlens=used,
            causal=True,
        )  # fmt: skip
        return self.out(torch.einsum("bshl,hdl->bshd", out, self.up_v).flatten(2))


torch.manual_seed(0)
text = torch.tensor(list(Path(__file__).read_bytes()))
length, room = 64, 64
angles = torch.outer(torch.arange(room), 10000.0 ** -(torch.arange(0, ROTATED, 2) / ROTATED))
cos, sin = angles.cos(), angles.sin()

embed, layer, head = nn.Embedding(256, HIDDEN), LatentAttention(), nn.Linear(HIDDEN, 256)
optimizer = torch.optim.AdamW(
    itertools.chain(embed.parameters(), layer.parameters(), head.parameters()), lr=3e-3
)


def scores_at_once(tokens):
    x = embed(tokens)
    return head(x + layer(x, cos, sin))


for n in range(45):
    starts = torch.randint(len(text) - length - 1, (4,))
    batch = torch.stack([text[i : i + length + 1] for i in starts])
    loss = F.cross_entropy(scores_at_once(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if n % 15 == 14:
        print(f"step {n + 1}: loss {loss.item():.2f}")

with torch.no_grad():
    tokens = text[None, :16]
    while tokens.shape[1] < 64:  # without a cache: everything once more for each token
        tokens = torch.cat([tokens, scores_at_once(tokens)[:, -1:].argmax(-1)], 1)

    cache = torch.zeros(1, room, 1, LATENT + ROTATED)
    used, generated = 0, text[None, :16]
    while generated.shape[1] < 64:  # the whole prompt, then the last token
        x = embed(generated[:, used:])
        x = x + layer.step(x, cos, sin, cache, used)
        used = generated.shape[1]
        generated = torch.cat([generated, head(x[:, -1:]).argmax(-1)], 1)

assert torch.equal(generated, tokens)
print(f"64 tokens, the same from a cache of {LATENT + ROTATED} numbers a token as without one:")
print(repr(bytes(generated[0].tolist())))
