"""Short causal convolutions over tokens, one filter a channel: dense, packed, and one token at a
time. Sums in fp32, tap by tap, so that a sequence's results do not depend on its neighbours."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["ShortConvolution", "causal_conv1d_fn", "causal_conv1d_update"]

_ACTIVATIONS = (None, "silu", "swish")


class _Places(NamedTuple):
    """Where tokens are."""

    sequence: Tensor  # [B, T] int64
    position: Tensor  # [B, T] int64, in the sequence


def _places(x: Tensor, cu_seqlens: Tensor | None, seq_idx: Tensor | None) -> _Places:
    """The places of the tokens of x [B, T, D]."""
    batch, seqlen = x.shape[:2]
    token = torch.arange(seqlen, device=x.device)
    if cu_seqlens is not None:
        edges = cu_seqlens.long()
        sequence = torch.searchsorted(edges[1:].contiguous(), token, right=True)
        sequence = sequence.clamp(max=max(0, len(edges) - 2))
        return _Places(sequence[None], (token - edges[sequence])[None])
    sequence = torch.arange(batch, device=x.device)[:, None].expand(batch, seqlen)
    if seq_idx is None:
        return _Places(sequence, token.expand(batch, seqlen))
    begins = F.pad(seq_idx[:, 1:] != seq_idx[:, :-1], (1, 0))
    first = torch.where(begins, token, 0).cummax(1).values
    return _Places(sequence, token - first)


def _convolve(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, places: _Places,
    before: Tensor | None,
) -> Tensor:  # fmt: skip
    """x [B, T, D], weight [D, W], before [N, D, at least W - 1] the inputs before each sequence."""
    if activation not in _ACTIVATIONS:
        raise ValueError(f"activation: got {activation!r}; one of {_ACTIVATIONS} is needed")
    compute = torch.promote_types(x.dtype, torch.float32)
    taps = weight.shape[1]
    wide, filters = x.to(compute), weight.to(compute)
    out = wide * filters[:, -1]
    for distance in range(1, taps):
        earlier = F.pad(wide, (0, 0, distance, 0))[:, : x.shape[1]]
        inside = (places.position >= distance)[..., None]
        if before is None:
            earlier = earlier.masked_fill(~inside, 0)
        else:
            last = before.shape[-1]
            at = (last + places.position - distance).clamp(0, last - 1)
            earlier = torch.where(inside, earlier, before[places.sequence, :, at].to(compute))
        out = out + earlier * filters[:, -1 - distance]
    if bias is not None:
        out = out + bias.to(compute)
    return (F.silu(out) if activation else out).to(x.dtype)


def _last_inputs(x: Tensor, size: int, before: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
    """[N, D, size]: the last inputs of each sequence, zeros or ``before`` where it is shorter."""
    if cu_seqlens is None:
        earlier = x.new_zeros(x.shape[0], size, x.shape[2])
        if before is not None and before.shape[-1]:
            kept = before[..., -size:].mT.to(x.dtype)
            earlier = F.pad(kept, (0, 0, size - kept.shape[1], 0))
        return torch.cat((earlier, x), 1)[:, x.shape[1] :].mT.contiguous()
    starts, ends = cu_seqlens.long()[:-1, None], cu_seqlens.long()[1:, None]
    rows = ends - size + torch.arange(size, device=x.device)
    inside = rows >= starts
    found = x[0, rows.clamp(min=0)] if x.shape[1] else x.new_zeros(*rows.shape, x.shape[2])
    earlier = torch.zeros_like(found)
    if before is not None and before.shape[-1]:
        at = before.shape[-1] + rows - starts
        number = torch.arange(len(starts), device=x.device)[:, None]
        earlier = before[number, :, at.clamp(0, before.shape[-1] - 1)].to(x.dtype)
        earlier = earlier.masked_fill((at < 0)[..., None], 0)
    return torch.where(inside[..., None], found, earlier).mT.contiguous()


def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    seq_idx: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    final_states_out: Tensor | None = None,
    activation: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """A causal convolution with one filter a channel, by causal_conv1d's name.

    Arguments:
        x: [batch, D, T]; weight: [D, W]; bias: [D].
        seq_idx: [batch, T]; where the number changes, a new sequence begins.
        initial_states: [batch, D, W - 1], the inputs before the first.
        return_final_states, final_states_out: the last W - 1 inputs [batch, D, W - 1].
        activation: None, "silu" or "swish", which is the same.

    Returns:
        out, as x, or a tuple of it and the final states.
    """
    tokens = x.mT
    places = _places(tokens, None, seq_idx)
    if seq_idx is not None and initial_states is not None:
        raise ValueError("initial_states: goes without seq_idx")
    out = _convolve(tokens, weight, bias, activation, places, initial_states).mT
    if not return_final_states:
        return out
    final = _last_inputs(tokens, weight.shape[1] - 1, initial_states, None)
    return out, final if final_states_out is None else final_states_out.copy_(final)


def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    cache_seqlens: Tensor | None = None,
    conv_state_indices: Tensor | None = None,
) -> Tensor:
    """The next tokens of each sequence: ``conv_state`` is updated in place.

    Arguments:
        x: [batch, D] or [batch, D, T]; weight: [D, W]; bias: [D].
        conv_state: [slots, D, W - 1 or more], the last inputs.
        conv_state_indices: [batch], the slot of each row; None: row b's slot is b.
        cache_seqlens: None; circular states are not served.

    Returns:
        out, as x.

    Raises:
        NotImplementedError: for ``cache_seqlens``.
    """
    if cache_seqlens is not None:
        raise NotImplementedError("causal_conv1d_update: cache_seqlens, circular states")
    tokens = (x[..., None] if x.dim() == 2 else x).mT
    slots = slice(None) if conv_state_indices is None else conv_state_indices.long()
    before = conv_state[slots]
    out = _convolve(tokens, weight, bias, activation, _places(tokens, None, None), before).mT
    conv_state[slots] = _last_inputs(tokens, conv_state.shape[-1], before, None).to(
        conv_state.dtype
    )
    return out[..., 0] if x.dim() == 2 else out


class ShortConvolution(nn.Conv1d):
    """A causal convolution over tokens [B, T, D], with fla's arguments and parameter names.

    Arguments: hidden_size D, kernel_size W, bias, activation ("silu", "swish" or None).
    ``weight`` is [D, 1, W].
    """

    def __init__(
        self,
        hidden_size: int,
        kernel_size: int = 4,
        bias: bool = False,
        activation: str | None = "silu",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        """Arguments: see the class."""
        super().__init__(
            hidden_size, hidden_size, kernel_size, groups=hidden_size, bias=bias,
            padding=kernel_size - 1, device=device, dtype=dtype,
        )  # fmt: skip
        self.hidden_size = hidden_size
        if activation not in _ACTIVATIONS:
            raise ValueError(f"activation: got {activation!r}; one of {_ACTIVATIONS} is needed")
        self.activation = activation

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None = None,
        mask: Tensor | None = None,
        cache: Tensor | None = None,
        output_final_state: bool = False,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """x [B, T, D] -> out [B, T, D] and, if wanted, the last inputs [N, D, W].

        residual: added to the result. mask: [B, T], 0 where x counts as 0. cache: the last inputs
        before. cu_seqlens: [N + 1], packed sequences of a B of 1.
        """
        if mask is not None:
            x = x * mask[..., None].to(x.dtype)
        places = _places(x, cu_seqlens, None)
        out = _convolve(x, self.weight[:, 0], self.bias, self.activation, places, cache)
        if residual is not None:
            out = out + residual
        size = self.kernel_size[0]
        return out, _last_inputs(x, size, cache, cu_seqlens) if output_final_state else None
