"""Transformer blocks: a mixer and an MLP with their norms, dropout and residual stream.

Pre-norm: Xiong et al. 2020, arXiv:2002.04745. Both branches at once: Wang & Komatsuzaki 2021,
GPT-J. Stochastic depth: Huang et al. 2016, arXiv:1603.09382.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from flash_attn.modules.mha import MHA
from flash_attn.modules.mlp import Mlp
from flash_attn.ops.triton.layer_norm import RMSNorm, layer_norm_fn

__all__ = ["Block", "ParallelBlock", "StochasticDepth"]


class StochasticDepth(nn.Module):
    """In training a row of dimension 0 is 0 with probability p, else divided by 1 − p."""

    def __init__(self, p: float):
        """Arguments, defaults and errors: see the class."""
        super().__init__()
        if not 0.0 <= p <= 1.0:
            raise ValueError(f"p: got {p}; 0 to 1 is needed")
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        if self.p == 0.0 or not self.training:
            return x
        kept = torch.rand(x.shape[0], *[1] * (x.dim() - 1), device=x.device) >= self.p
        return x * (kept / max(1.0 - self.p, 1e-6)).to(x.dtype)


def _mark(module: nn.Module, name: str) -> None:
    for parameter in module.parameters():
        setattr(parameter, name, True)


def _can_fuse(norm: nn.Module) -> bool:
    return isinstance(norm, (nn.LayerNorm, RMSNorm))


def _kind(norm: nn.Module) -> dict[str, bool]:
    if not isinstance(norm, RMSNorm):
        return {}
    return {"is_rms_norm": True, "zero_centered_weight": norm.zero_centered_weight}


def _norm(x: Tensor, norm: nn.Module) -> Tensor:
    weight = getattr(norm, "weight", None)
    return norm(x if weight is None else x.to(weight.dtype))


class _Residual(nn.Module):
    """What blocks have in common: how the residual stream is added up and normalised."""

    fused_dropout_add_ln: bool
    residual_in_fp32: bool

    def _init_residual(
        self, norms: list[nn.Module], fused: bool, in_fp32: bool, sequence_parallel: bool,
        mark_shared_params: bool,
    ) -> None:  # fmt: skip
        if fused and not all(map(_can_fuse, norms)):
            raise ValueError("fused_dropout_add_ln needs norms that are LayerNorm or RMSNorm")
        self.fused_dropout_add_ln = fused
        self.residual_in_fp32 = in_fp32
        # Each rank sees its own rows alone, so the norms' gradients have to be summed, and what all
        # ranks hold alike has to start alike: flash_attn.utils.distributed.
        for norm in norms:
            if sequence_parallel:
                _mark(norm, "_sequence_parallel")
            if mark_shared_params:
                _mark(norm, "_shared_params")

    def _add(self, x: Tensor, residual: Tensor | None, dropout, drop_path, norm) -> tuple:
        """(norm(z), z) of ``z = drop_path(dropout(x)) + residual``; x (..., dim)."""
        if self.fused_dropout_add_ln:
            return self._add_fused(x, residual, dropout, drop_path, norm)
        z = drop_path(dropout(x))
        if residual is not None:
            z = z + residual
        y = _norm(z, norm)
        return y, (z.float() if self.residual_in_fp32 else z)

    def _add_fused(self, x, residual, dropout, drop_path, norm) -> tuple:
        """The same with the sum, as the norm reads it, in fp32."""
        rowscale = None
        if drop_path.p > 0.0 and self.training:
            rowscale = drop_path(torch.ones(x.shape[:-1], device=x.device, dtype=x.dtype))
        return self._fused(x, residual, dropout, norm, rowscale=rowscale)

    def _fused(self, x: Tensor, residual: Tensor | None, dropout, norm, **more: Any) -> tuple:
        """The norms and the sum, of ``layer_norm_fn``."""
        return layer_norm_fn(
            x, norm.weight, norm.bias, residual=residual, eps=norm.eps,
            dropout_p=dropout.p if self.training else 0.0, prenorm=True,
            residual_in_fp32=self.residual_in_fp32, **_kind(norm), **more,
        )  # fmt: skip

    def allocate_inference_cache(
        self, batch_size: int, max_seqlen: int, dtype: torch.dtype | None = None, **kwargs: Any
    ) -> Any:
        """The mixer's cache."""
        return self.mixer.allocate_inference_cache(batch_size, max_seqlen, dtype=dtype, **kwargs)


class Block(_Residual):
    """A mixer and an MLP, one after the other.

    Pre-norm blocks pass on two tensors, the last branch's output and the residual stream it has yet
    to be added to, so that each norm reads their sum: add, then norm, then branch. After the last
    block the model adds and normalises once more.

    Args:
        dim: width. mixer_cls, mlp_cls: make their module from dim; default ``MHA`` with heads of 64
            and ``Mlp``; ``nn.Identity`` for no MLP. norm_cls, dropout_cls: likewise.
        prenorm: else norms come after the sums, and one tensor is passed on.
        resid_dropout1, resid_dropout2: of what goes into the first and the second sum.
        drop_path1, drop_path2: stochastic depth of the same.
        fused_dropout_add_ln: sums stay fp32 up to the norm; LayerNorm and RMSNorm only.
        return_residual: the branches return (out, input), and the input goes on (post-norm).
        residual_in_fp32: the residual stream is fp32 (pre-norm).
        sequence_parallel, mark_shared_params: mark the norms' parameters for
            ``flash_attn.utils.distributed``.
    """

    drop_path1: StochasticDepth
    drop_path2: StochasticDepth

    def __init__(
        self,
        dim: int,
        mixer_cls: Callable[[int], nn.Module] | None = None,
        mlp_cls: Callable[[int], nn.Module] | None = None,
        norm_cls: Callable[[int], nn.Module] = nn.LayerNorm,
        dropout_cls: Callable[[float], nn.Module] = nn.Dropout,
        prenorm: bool = True,
        resid_dropout1: float = 0.0,
        resid_dropout2: float = 0.0,
        drop_path1: float = 0.0,
        drop_path2: float = 0.0,
        fused_dropout_add_ln: bool = False,
        return_residual: bool = False,
        residual_in_fp32: bool = False,
        sequence_parallel: bool = False,
        mark_shared_params: bool = False,
    ):
        """Arguments, defaults and errors: see the class."""
        super().__init__()
        if residual_in_fp32 and not prenorm:
            raise ValueError("residual_in_fp32 needs prenorm=True: else no residual is passed on")
        self.prenorm = prenorm
        self.return_residual = return_residual
        self.mixer: nn.Module = (mixer_cls or partial(MHA, num_heads=dim // 64))(dim)
        self.dropout1: nn.Module = dropout_cls(resid_dropout1)
        self.drop_path1 = StochasticDepth(drop_path1)
        self.norm1: nn.Module = norm_cls(dim)
        self.mlp: nn.Module = (mlp_cls or partial(Mlp, hidden_features=4 * dim))(dim)
        norms = [self.norm1]
        if not isinstance(self.mlp, nn.Identity):
            self.dropout2: nn.Module = dropout_cls(resid_dropout2)
            self.drop_path2 = StochasticDepth(drop_path2)
            self.norm2: nn.Module = norm_cls(dim)
            norms.append(self.norm2)
        self._init_residual(
            norms, fused_dropout_add_ln, residual_in_fp32, sequence_parallel, mark_shared_params
        )

    def forward(
        self,
        hidden_states: Tensor,
        residual: Tensor | None = None,
        mixer_subset: Tensor | slice | None = None,
        mixer_kwargs: dict[str, Any] | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """(..., dim) → (hidden_states, residual) of a pre-norm block, else hidden_states.

        Args:
            hidden_states: what comes in, (batch, seqlen, dim) or packed (total, dim).
            residual: the stream it is added to (pre-norm), or None in the first block.
            mixer_subset: for cross attention: only these rows of dimension 1 are computed.
            mixer_kwargs: for the mixer, such as ``cu_seqlens`` and ``inference_params``.
        """
        mixer_kwargs = dict(mixer_kwargs or {})
        if mixer_subset is not None:
            mixer_kwargs["mixer_subset"] = mixer_subset
        if not self.prenorm:
            if residual is not None:
                raise ValueError("residual: got one with prenorm=False; no residual is passed on")
            return self._forward_post_norm(hidden_states, mixer_subset, mixer_kwargs)
        hidden_states, residual = self._add(
            hidden_states, residual, self.dropout1, self.drop_path1, self.norm1
        )
        hidden_states = self.mixer(hidden_states, **mixer_kwargs)
        if mixer_subset is not None:
            residual = residual[:, mixer_subset]
        if not isinstance(self.mlp, nn.Identity):
            hidden_states, residual = self._add(
                hidden_states, residual, self.dropout2, self.drop_path2, self.norm2
            )
            hidden_states = self.mlp(hidden_states)
        return hidden_states, residual

    def _forward_post_norm(self, x: Tensor, mixer_subset, mixer_kwargs: dict) -> Tensor:
        out = self.mixer(x, **mixer_kwargs)
        if self.return_residual:
            out, x = out
        if mixer_subset is not None:
            x = x[:, mixer_subset]
        x, _ = self._add(out, x, self.dropout1, self.drop_path1, self.norm1)
        if isinstance(self.mlp, nn.Identity):
            return x
        out = self.mlp(x)
        if self.return_residual:
            out, x = out
        return self._add(out, x, self.dropout2, self.drop_path2, self.norm2)[0]


class ParallelBlock(_Residual):
    """A mixer and an MLP that read the same sum, as in GPT-J, GPT-NeoX and PaLM; pre-norm.

    Args:
        tied_norm: one norm for both branches. The others are those of ``Block``; resid_dropout1 is
            that of the mixer's output and resid_dropout2 that of the MLP's.
    """

    def __init__(
        self,
        dim: int,
        mixer_cls: Callable[[int], nn.Module] | None = None,
        mlp_cls: Callable[[int], nn.Module] | None = None,
        norm_cls: Callable[[int], nn.Module] = nn.LayerNorm,
        dropout_cls: Callable[[float], nn.Module] = nn.Dropout,
        resid_dropout1: float = 0.0,
        resid_dropout2: float = 0.0,
        tied_norm: bool = False,
        fused_dropout_add_ln: bool = False,
        residual_in_fp32: bool = False,
        sequence_parallel: bool = False,
        mark_shared_params: bool = False,
    ):
        """Arguments, defaults and errors: see the class."""
        super().__init__()
        if fused_dropout_add_ln and resid_dropout1 != resid_dropout2:
            raise ValueError(
                f"resid_dropout1 is {resid_dropout1} and resid_dropout2 {resid_dropout2}; with "
                "fused_dropout_add_ln there is one probability for both"
            )
        self.tied_norm = tied_norm
        self.mixer: nn.Module = (mixer_cls or partial(MHA, num_heads=dim // 64))(dim)
        self.dropout1: nn.Module = dropout_cls(resid_dropout1)
        self.norm1: nn.Module = norm_cls(dim)
        self.mlp: nn.Module = (mlp_cls or partial(Mlp, hidden_features=4 * dim))(dim)
        self.dropout2: nn.Module = dropout_cls(resid_dropout2)
        norms = [self.norm1]
        if not tied_norm:
            self.norm2: nn.Module = norm_cls(dim)
            norms.append(self.norm2)
        self._init_residual(
            norms, fused_dropout_add_ln, residual_in_fp32, sequence_parallel, mark_shared_params
        )

    def forward(
        self,
        hidden_states1: Tensor,
        hidden_states2: Tensor | None = None,
        residual: Tensor | None = None,
        mixer_kwargs: dict[str, Any] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The two branches' outputs and the residual stream they have yet to be added to.

        Args:
            hidden_states1, hidden_states2: (..., dim), those of the block before; in the first
                block the embeddings, and None.
            residual: the stream, or None in the first block.
            mixer_kwargs: for the mixer.
        """
        normed, residual = self._add_both(hidden_states1, hidden_states2, residual)
        second = normed[0] if self.tied_norm else normed[1]
        return self.mixer(normed[0], **(mixer_kwargs or {})), self.mlp(second), residual

    def _add_both(self, x1: Tensor, x2: Tensor | None, residual: Tensor | None) -> tuple:
        norm2 = None if self.tied_norm else self.norm2
        if self.fused_dropout_add_ln:
            second = {} if norm2 is None else {"weight1": norm2.weight, "bias1": norm2.bias}
            *normed, z = self._fused(x1, residual, self.dropout1, self.norm1, x1=x2, **second)
            return normed, z
        z = self.dropout1(x1)
        if x2 is not None:
            z = z + self.dropout2(x2)
        if residual is not None:
            z = z + residual
        normed = [_norm(z, norm) for norm in (self.norm1, norm2) if norm is not None]
        return normed, (z.float() if self.residual_in_fp32 else z)
