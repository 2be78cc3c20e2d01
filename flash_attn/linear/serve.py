"""``serve_fla``: these functions under the names of fla, mamba_ssm and causal_conv1d."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from flash_attn.linear import (
    conv,
    gated_delta_rule,
    gla,
    layers,
    linear_attn,
    mamba,
    mamba_block,
    norm,
    simple_gla,
)

__all__ = ["serve_fla", "withdraw"]

#: What ``__version__`` of the packages says: those whose names and keywords are served.
VERSIONS = {"fla": "0.6.0", "mamba_ssm": "2.2.4", "causal_conv1d": "1.5.0"}
_OPS = {
    "gla": (gla.chunk_gla, gla.fused_chunk_gla, gla.fused_recurrent_gla),
    "simple_gla": (simple_gla.chunk_simple_gla, simple_gla.fused_recurrent_simple_gla),
    "retention": (simple_gla.chunk_retention, simple_gla.fused_recurrent_retention),
    "lightning_attn": (
        simple_gla.chunk_lightning_attn,
        simple_gla.fused_recurrent_lightning_attn,
    ),
    "linear_attn": (linear_attn.chunk_linear_attn, linear_attn.fused_recurrent_linear_attn),
    "gated_delta_rule": (
        gated_delta_rule.chunk_gated_delta_rule,
        gated_delta_rule.fused_recurrent_gated_delta_rule,
    ),
}
_MODULES: dict[str, tuple[Any, ...]] = {
    **{f"fla.ops.{name}": functions for name, functions in _OPS.items()},
    "fla.ops": tuple(function for functions in _OPS.values() for function in functions),
    "fla.layers": (layers.GatedLinearAttention,),
    "fla.layers.gla": (layers.GatedLinearAttention,),
    "fla.modules": (conv.ShortConvolution, norm.FusedRMSNormGated, norm.RMSNorm),
    "mamba_ssm.ops.triton.ssd_combined": (
        mamba.mamba_chunk_scan_combined,
        mamba_block.mamba_split_conv1d_scan_combined,
    ),
    "mamba_ssm.ops.triton.selective_state_update": (mamba.selective_state_update,),
    "causal_conv1d": (conv.causal_conv1d_fn, conv.causal_conv1d_update),
}
# Functions as fla exports them; each is a name of its own, though two are one function here.
_NAMES = {gla.fused_chunk_gla: ("chunk_gla", "fused_chunk_gla")}
_served: dict[str, ModuleType] = {}


def serve_fla() -> None:
    """Serves programs that import fla, mamba_ssm or causal_conv1d with this package's functions.

    Call it before whatever imports them, as transformers' models do when their modules are
    imported. It enters modules of these names in ``sys.modules``: ``fla.ops`` and its ``gla``,
    ``simple_gla``, ``retention``, ``lightning_attn``, ``linear_attn`` and ``gated_delta_rule``;
    ``fla.layers``, ``fla.modules``; ``mamba_ssm.ops.triton.ssd_combined`` and
    ``selective_state_update``; ``causal_conv1d``. Other names of these packages are missing, and
    importing them raises ImportError. A second call does nothing.

    Raises:
        RuntimeError: a package of one of these names is already imported: modules that imported it
            keep its own functions.
    """
    if _served:
        return
    taken = [name for name in VERSIONS if name in sys.modules]
    if taken:
        raise RuntimeError(
            f"serve_fla: {', '.join(taken)} is already imported, and so are its functions; call "
            "serve_fla() first"
        )
    for name, functions in _MODULES.items():
        module = _module(name)
        for function in functions:
            for exported in _NAMES.get(function, (function.__name__,)):
                setattr(module, exported, function)


def withdraw() -> None:
    """Takes the modules of ``serve_fla`` away again; what is imported stays imported."""
    for name, module in _served.items():
        if sys.modules.get(name) is module:
            del sys.modules[name]
    _served.clear()


def _module(name: str) -> ModuleType:
    """The module of this name, and those above it, in sys.modules."""
    if name in _served:
        return _served[name]
    module = ModuleType(name, f"{name}, served by flash_attn.linear")
    module.__spec__ = ModuleSpec(name, None, is_package=True)
    module.__path__ = []
    above, _, last = name.rpartition(".")
    _served[name] = sys.modules[name] = module
    if above:
        setattr(_module(above), last, module)
    else:
        module.__version__ = VERSIONS[name]  # type: ignore[attr-defined]
    return module
