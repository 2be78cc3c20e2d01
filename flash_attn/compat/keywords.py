"""What a caller meant by a keyword that does not exist; on the failing path alone."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable
from typing import Any

from flash_attn.compat.other_arguments import ARGUMENTS

_ALIKE = 0.8  # of 1: `casual` is causal, `k_descale` is not k_cache
_FUNCTIONS = ("flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache")


def unexpected(function: Callable[..., Any], unknown: dict[str, Any]) -> TypeError:
    """The error for the first keyword that ``function`` does not have."""
    name = next(iter(unknown))
    return TypeError(
        f"{function.__name__}() got an unexpected keyword argument {name!r}; "
        f"{_suggestion(name, _accepted(function))}"
    )


def _accepted(function: Callable[..., Any]) -> list[str]:
    return [n for n, p in inspect.signature(function).parameters.items() if p.kind < p.VAR_KEYWORD]


def _suggestion(name: str, accepted: list[str]) -> str:
    meant = ARGUMENTS.get(name)
    if meant is not None and not meant.name:
        return meant.use.replace("`", "")
    if meant is not None:
        name = meant.name
    close = difflib.get_close_matches(name, accepted, n=1, cutoff=_ALIKE)
    if close:
        return f"did you mean {close[0]!r}?"
    for other in _FUNCTIONS:
        if name in _accepted(_public(other)):
            return f"{other} takes {name!r}"
    return f"accepted are {', '.join(accepted)}"


def _public(name: str) -> Callable[..., Any]:
    from flash_attn import flash_attn_interface  # which imports this module

    return getattr(flash_attn_interface, name)
