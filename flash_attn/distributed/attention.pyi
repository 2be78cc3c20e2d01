"""Written by python -m build_tools.stubs --write."""

from typing import Literal, overload
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from flash_attn.call import MaxLogits
from flash_attn.call import Window
from flash_attn.distributed.layout import Layout


@overload
def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout, group: dist.ProcessGroup | None = None, *,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Window = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, s_aux: Tensor | None = None, return_lse: Literal[False] = False,
    return_max_logits: Literal[False] = False, gradient_dtype: torch.dtype | None = None,
) -> Tensor: ...
@overload
def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout, group: dist.ProcessGroup | None = None, *,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Window = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, s_aux: Tensor | None = None, return_lse: Literal[True],
    return_max_logits: Literal[False] = False, gradient_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]: ...
@overload
def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout, group: dist.ProcessGroup | None = None, *,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Window = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, s_aux: Tensor | None = None, return_lse: Literal[False] = False,
    return_max_logits: Literal[True, "row"], gradient_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]: ...
@overload
def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout, group: dist.ProcessGroup | None = None, *,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Window = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, s_aux: Tensor | None = None, return_lse: Literal[True],
    return_max_logits: Literal[True, "row"], gradient_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]: ...
@overload
def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout, group: dist.ProcessGroup | None = None, *,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Window = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, s_aux: Tensor | None = None, return_lse: bool = False,
    return_max_logits: MaxLogits = False, gradient_dtype: torch.dtype | None = None,
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]: ...

@overload
def gather_attention(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout, group: dist.ProcessGroup | None = None, *,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Window = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, s_aux: Tensor | None = None, return_lse: Literal[False] = False,
    return_max_logits: Literal[False] = False, gradient_dtype: torch.dtype | None = None,
) -> Tensor: ...
@overload
def gather_attention(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout, group: dist.ProcessGroup | None = None, *,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Window = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, s_aux: Tensor | None = None, return_lse: Literal[True],
    return_max_logits: Literal[False] = False, gradient_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]: ...
@overload
def gather_attention(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout, group: dist.ProcessGroup | None = None, *,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Window = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, s_aux: Tensor | None = None, return_lse: Literal[False] = False,
    return_max_logits: Literal[True, "row"], gradient_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]: ...
@overload
def gather_attention(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout, group: dist.ProcessGroup | None = None, *,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Window = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, s_aux: Tensor | None = None, return_lse: Literal[True],
    return_max_logits: Literal[True, "row"], gradient_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]: ...
@overload
def gather_attention(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout, group: dist.ProcessGroup | None = None, *,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Window = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, s_aux: Tensor | None = None, return_lse: bool = False,
    return_max_logits: MaxLogits = False, gradient_dtype: torch.dtype | None = None,
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]: ...

@overload
def all_to_all_attention(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout, group: dist.ProcessGroup | None = None, *,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Window = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, s_aux: Tensor | None = None, return_lse: Literal[False] = False,
    return_max_logits: Literal[False] = False,
) -> Tensor: ...
@overload
def all_to_all_attention(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout, group: dist.ProcessGroup | None = None, *,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Window = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, s_aux: Tensor | None = None, return_lse: Literal[True],
    return_max_logits: Literal[False] = False,
) -> tuple[Tensor, Tensor]: ...
@overload
def all_to_all_attention(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout, group: dist.ProcessGroup | None = None, *,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Window = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, s_aux: Tensor | None = None, return_lse: Literal[False] = False,
    return_max_logits: Literal[True, "row"],
) -> tuple[Tensor, Tensor]: ...
@overload
def all_to_all_attention(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout, group: dist.ProcessGroup | None = None, *,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Window = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, s_aux: Tensor | None = None, return_lse: Literal[True],
    return_max_logits: Literal[True, "row"],
) -> tuple[Tensor, Tensor, Tensor]: ...
@overload
def all_to_all_attention(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout, group: dist.ProcessGroup | None = None, *,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Window = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, s_aux: Tensor | None = None, return_lse: bool = False,
    return_max_logits: MaxLogits = False,
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]: ...

@overload
def mesh_attention(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout, mesh: DeviceMesh, *, dropout_p: float = 0.0,
    softmax_scale: float | None = None, causal: bool = False, window_size: Window = (-1, -1),
    softcap: float = 0.0, alibi_slopes: Tensor | None = None, deterministic: bool = False,
    s_aux: Tensor | None = None, return_lse: Literal[False] = False,
    return_max_logits: Literal[False] = False, gradient_dtype: torch.dtype | None = None,
) -> Tensor: ...
@overload
def mesh_attention(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout, mesh: DeviceMesh, *, dropout_p: float = 0.0,
    softmax_scale: float | None = None, causal: bool = False, window_size: Window = (-1, -1),
    softcap: float = 0.0, alibi_slopes: Tensor | None = None, deterministic: bool = False,
    s_aux: Tensor | None = None, return_lse: Literal[True],
    return_max_logits: Literal[False] = False, gradient_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]: ...
@overload
def mesh_attention(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout, mesh: DeviceMesh, *, dropout_p: float = 0.0,
    softmax_scale: float | None = None, causal: bool = False, window_size: Window = (-1, -1),
    softcap: float = 0.0, alibi_slopes: Tensor | None = None, deterministic: bool = False,
    s_aux: Tensor | None = None, return_lse: Literal[False] = False,
    return_max_logits: Literal[True, "row"], gradient_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]: ...
@overload
def mesh_attention(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout, mesh: DeviceMesh, *, dropout_p: float = 0.0,
    softmax_scale: float | None = None, causal: bool = False, window_size: Window = (-1, -1),
    softcap: float = 0.0, alibi_slopes: Tensor | None = None, deterministic: bool = False,
    s_aux: Tensor | None = None, return_lse: Literal[True], return_max_logits: Literal[True, "row"],
    gradient_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]: ...
@overload
def mesh_attention(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout, mesh: DeviceMesh, *, dropout_p: float = 0.0,
    softmax_scale: float | None = None, causal: bool = False, window_size: Window = (-1, -1),
    softcap: float = 0.0, alibi_slopes: Tensor | None = None, deterministic: bool = False,
    s_aux: Tensor | None = None, return_lse: bool = False, return_max_logits: MaxLogits = False,
    gradient_dtype: torch.dtype | None = None,
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]: ...
