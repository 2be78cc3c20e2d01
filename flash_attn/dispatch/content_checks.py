"""FLASH_ATTN_CHECK=1: index tensors are looked at before every kernel, on a GPU too.

The CPU backend always looks. To look on a GPU is to wait for it, so its kernels keep within the
tensors whatever these hold, and say nothing. To find a wrong call, every operation gets a step
before its backend that makes the CPU's checks, wherever the call comes from: a public function, a
backward, a compiled graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from flash_attn.call import named

# The dispatch key between autograd and the backends.
_KEY = torch._C.DispatchKey.BackendSelect


def register(library: torch.library.Library, names: Iterable[str] = ()) -> None:
    """Puts the step into those of the operations that have it; of all, where none are named."""
    from flash_attn import cpu  # here: without the checks, `import flash_attn` leaves it out

    for name in names or cpu.CONTENT_CHECKS:
        check = cpu.CONTENT_CHECKS.get(name)
        if check is not None:
            operation = getattr(torch.ops.flash_attn, name).default
            library.impl(name, _checked(operation, check), _KEY.name, with_keyset=True)


def _checked(operation: torch._ops.OpOverload, check: Callable) -> Callable:
    by_name = named(operation._schema)
    below = torch._C._dispatch_keyset_full_after(_KEY)

    def call(keyset, *args, **kwargs):
        arguments = by_name(args, kwargs)
        if can_look(arguments["q"]):
            check(arguments)
        return operation.redispatch(keyset & below, *args, **kwargs)

    return call


def can_look(x: Tensor) -> bool:
    """Whether x has contents, and no CUDA graph is being captured."""
    return x.is_cpu or (x.is_cuda and not torch.cuda.is_current_stream_capturing())
