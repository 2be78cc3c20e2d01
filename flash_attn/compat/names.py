"""Names of the ``flash_attn`` 2.8 package that are not here, and what to use instead.

The one table of them: a module's ``__getattr__`` comes from here, and so does the table of
docs/porting.md. ``from … import …`` of a name raises an ``ImportError``, as clients that try it
expect; for ``hasattr`` the name is not there.
"""

from __future__ import annotations

import opcode
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

_BY_GRAPH = (
    "torch.cuda.CUDAGraph around a step of your own, or "
    'torch.compile(mode="reduce-overhead") of the model'
)
_BY_TORCH = "the function of the same module; it is made of torch operations, and no Triton is run"

#: module → name → what to use instead.
NAMES: dict[str, dict[str, str]] = {
    "flash_attn.flash_attn_interface": {
        "_get_block_size_n": (
            "flash_attn.explain(...).tile, the tile of a call; S_dmask needs none here: it holds "
            "the probabilities of whole rows"
        ),
    },
    "flash_attn.ops.layer_norm": {
        "DropoutAddLayerNormFn": "dropout_add_layer_norm",
        "DropoutAddLayerNormSubsetFn": "dropout_add_layer_norm_subset",
        "DropoutAddLayerNormParallelResidualFn": "dropout_add_layer_norm_parallel_residual",
    },
    "flash_attn.ops.fused_dense": {
        "FusedDenseFunc": "fused_dense_func",
        "FusedMLPFunc": "fused_mlp_func",
    },
    "flash_attn.ops.triton.cross_entropy": {
        "cross_entropy_fwd_kernel": f"cross_entropy_loss, {_BY_TORCH}",
        "cross_entropy_bwd_kernel": f"cross_entropy_loss, {_BY_TORCH}",
    },
    "flash_attn.ops.triton.layer_norm": {
        "_layer_norm_fwd": f"layer_norm_fn, {_BY_TORCH}",
        "_layer_norm_bwd": f"layer_norm_fn, {_BY_TORCH}",
    },
    "flash_attn.ops.triton.rotary": {
        "rotary_kernel": (
            "apply_rotary, the function of the same module; its kernel is compiled, and no Triton "
            "is run"
        ),
    },
    "flash_attn.utils.generation": {
        "DecodingCGCache": _BY_GRAPH,
        "capture_graph": _BY_GRAPH,
        "update_graph_cache": _BY_GRAPH,
        "decode_speculative": "decode; speculation is the caller's: sample, compare, take back",
        "sample_speculative": "sample; speculation is the caller's",
    },
    "flash_attn.utils.testing": {
        "generate_qkv": (
            "flash_attn.bert_padding.unpad_input; what this returned differs between releases"
        ),
    },
}

#: Whole modules. Clients ask with find_spec whether some exist; these do not: ABSENT.
MODULES: dict[str, str] = {
    "flash_attn.models": (
        'the models of transformers, with attn_implementation="flash_attention_2", or build some '
        "of flash_attn.modules"
    ),
    "flash_attn.flash_attn_triton": (
        "flash_attn.flash_attn_func, with alibi_slopes for ALiBi; for any other bias "
        "torch.nn.attention.flex_attention"
    ),
    "flash_attn.flash_attn_triton_og": "flash_attn.flash_attn_func",
    "flash_attn.flash_blocksparse_attention": "torch.nn.attention.flex_attention",
    "flash_attn.fused_softmax": "torch.softmax of the masked scores, under torch.compile",
    "flash_attn.ops.triton.k_activations": "flash_attn.ops.activations: functions on tensors",
    "flash_attn.ops.triton.linear": "flash_attn.ops.fused_dense, or torch.nn.functional.linear",
}

ABSENT: dict[str, str] = {
    "flash_attn.cute": "another package (flash-attn-4); torch asks for it by find_spec",
    "flash_attn.flash_attn_triton_amd": "kernels for another maker's GPUs",
    "flash_attn_interface": (
        "of a distribution of its own, flash-attn-3, which is in this repository, too"
    ),
}


def refusing(module: str) -> Callable[[str], Any]:
    """The ``__getattr__`` of a module that has some of its names in the table.

    Not under TYPE_CHECKING: to a type checker a module that has one has every name.
    """

    def __getattr__(name: str) -> Any:
        instead = NAMES[module].get(name)
        if instead is None:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        # No class can be both, and an import drops the message of an AttributeError.
        error = ImportError if _imports(sys._getframe(1)) else AttributeError
        raise error(f"{module}.{name} is not part of this package; use {instead}")

    return __getattr__


def _imports(frame: FrameType) -> bool:
    """Whether a frame is at a ``from … import …``, and not at a ``getattr`` or ``hasattr``."""
    return frame.f_code.co_code[frame.f_lasti] == opcode.opmap["IMPORT_FROM"]


def missing(module: str) -> ModuleNotFoundError:
    """What the import of a module of the table raises."""
    return ModuleNotFoundError(
        f"{module} is not part of this package; use {MODULES[module]}", name=module
    )
