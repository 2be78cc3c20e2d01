"""Written by python -m build_tools.stubs --write."""

from typing import Literal, overload
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from flash_attn.call import Window
from flash_attn.distributed.layout import Layout


@overload
def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout, group: dist.ProcessGroup | None = None, *,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Window = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, s_aux: Tensor | None = None, return_lse: Literal[False] = False,
    gradient_dtype: torch.dtype | None = None,
) -> Tensor: ...
@overload
def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout, group: dist.ProcessGroup | None = None, *,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Window = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, s_aux: Tensor | None = None, return_lse: Literal[True],
    gradient_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]: ...
@overload
def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout, group: dist.ProcessGroup | None = None, *,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Window = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, s_aux: Tensor | None = None, return_lse: bool = False,
    gradient_dtype: torch.dtype | None = None,
) -> Tensor | tuple[Tensor, Tensor]: ...

@overload
def gather_attention(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout, group: dist.ProcessGroup | None = None, *,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Window = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, s_aux: Tensor | None = None, return_lse: Literal[False] = False,
    gradient_dtype: torch.dtype | None = None,
) -> Tensor: ...
@overload
def gather_attention(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout, group: dist.ProcessGroup | None = None, *,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Window = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, s_aux: Tensor | None = None, return_lse: Literal[True],
    gradient_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]: ...
@overload
def gather_attention(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout, group: dist.ProcessGroup | None = None, *,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Window = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, s_aux: Tensor | None = None, return_lse: bool = False,
    gradient_dtype: torch.dtype | None = None,
) -> Tensor | tuple[Tensor, Tensor]: ...

@overload
def all_to_all_attention(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout, group: dist.ProcessGroup | None = None, *,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Window = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, s_aux: Tensor | None = None, return_lse: Literal[False] = False,
) -> Tensor: ...
@overload
def all_to_all_attention(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout, group: dist.ProcessGroup | None = None, *,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Window = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, s_aux: Tensor | None = None, return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...
@overload
def all_to_all_attention(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout, group: dist.ProcessGroup | None = None, *,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Window = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, s_aux: Tensor | None = None, return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]: ...

@overload
def mesh_attention(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout, mesh: DeviceMesh, *, dropout_p: float = 0.0,
    softmax_scale: float | None = None, causal: bool = False, window_size: Window = (-1, -1),
    softcap: float = 0.0, alibi_slopes: Tensor | None = None, deterministic: bool = False,
    s_aux: Tensor | None = None, return_lse: Literal[False] = False,
    gradient_dtype: torch.dtype | None = None,
) -> Tensor: ...
@overload
def mesh_attention(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout, mesh: DeviceMesh, *, dropout_p: float = 0.0,
    softmax_scale: float | None = None, causal: bool = False, window_size: Window = (-1, -1),
    softcap: float = 0.0, alibi_slopes: Tensor | None = None, deterministic: bool = False,
    s_aux: Tensor | None = None, return_lse: Literal[True],
    gradient_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]: ...
@overload
def mesh_attention(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout, mesh: DeviceMesh, *, dropout_p: float = 0.0,
    softmax_scale: float | None = None, causal: bool = False, window_size: Window = (-1, -1),
    softcap: float = 0.0, alibi_slopes: Tensor | None = None, deterministic: bool = False,
    s_aux: Tensor | None = None, return_lse: bool = False, gradient_dtype: torch.dtype | None = None,
) -> Tensor | tuple[Tensor, Tensor]: ...
