"""Version counters of the tensors that operations write.

Autograd saves tensors for the backward and refuses to use one that was written since; the tensor's
version counter tells. Torch's own operations count in a kernel for the key ADInplaceOrView. Without
such a kernel an operation writes unnoticed, unless its kernel for the device happens to be made of
torch's operations. This module has that kernel for ours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from flash_attn import backend

# Operation, or its packet of overloads → picks the arguments that a call of it writes.
_written: dict[Callable[..., Any], Callable[[tuple, dict], Sequence[Tensor]]] = {}


def register(library: torch.library.Library, operation: torch._ops.OpOverload) -> None:
    """Makes an operation that writes its arguments count that."""
    _written[operation] = _written[operation.overloadpacket] = _by_schema(operation)

    def kernel(keyset, *args, **kwargs):
        keyset = keyset & torch._C._after_ADInplaceOrView_keyset
        # Below it, a kernel made of torch's operations does not count them.
        with torch._C._AutoDispatchBelowADInplaceOrView():
            results = backend.call(operation.redispatch, keyset, *args, **kwargs)
        count(operation, args, kwargs)
        return results

    name = operation._schema.name.split("::")[1]
    library.impl(name, kernel, "ADInplaceOrView", with_keyset=True)


def count(operation: Callable[..., Any], args: tuple, kwargs: dict) -> None:
    """Counts what a call of a registered operation wrote."""
    written = _written[operation](args, kwargs)
    if written:
        torch.autograd.graph.increment_version(written)  # inference tensors have none: left out


def _by_schema(operation: torch._ops.OpOverload) -> Callable[[tuple, dict], Sequence[Tensor]]:
    """Picks from a call's arguments, by position unless keyword-only, those that it writes."""
    arguments = operation._schema.arguments
    marked = [i for i, a in enumerate(arguments) if a.alias_info and a.alias_info.is_write]
    by_position = [i for i in marked if not arguments[i].kwarg_only]
    by_name = [arguments[i].name for i in marked if arguments[i].kwarg_only]
    names = [argument.name for argument in arguments]
    # A cache is written where new keys come along.
    new_keys = names.index("k") if "k_cache" in names else None

    def written(args: tuple, kwargs: dict) -> Sequence[Tensor]:
        if new_keys is not None and args[new_keys] is None:
            return ()
        given = [args[i] for i in by_position] + [kwargs.get(name) for name in by_name]
        return [x for x in given if x is not None]

    return written
