"""The checks of numbers, flags and windows; see ``checks.py`` for what a check is.

A bool is no number, though Python has it as one: a caller that passes True in the place of a number
meant another argument. A flag is a bool of Python's or numpy's; any other true value was meant for
another argument, too.
"""

from __future__ import annotations

import operator
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from flash_attn.call import MaxLogits, Options

LARGEST = torch.finfo(torch.float32).max  # kernels have scores in float32
_LEAST = -LARGEST
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
_FLAGS = ("causal", "deterministic", "return_attn_probs", "batch_invariant", "return_lse",
          "return_softmax_lse")  # fmt: skip


def flag(x: Any, name: str) -> bool:
    """A flag as a bool of Python's."""
    if x is True or x is False:
        return x
    if _is_bool(x):
        return bool(x)
    raise TypeError(f"{name}: got {_shown(x)}; True or False is needed")


def flags(options: Options) -> Options:
    """The options, with every flag a bool of Python's."""
    for x in (options.causal, options.deterministic, options.return_attn_probs,
              options.batch_invariant, options.return_lse, options.return_softmax_lse):  # fmt: skip
        if x is not True and x is not False:
            given = {name: flag(getattr(options, name), name) for name in _FLAGS}
            options = options._replace(**given)
            break
    if options.return_max_logits is not False:
        wanted = max_logits(options.return_max_logits)
        if wanted and options.return_attn_probs:
            raise ValueError(
                f"return_max_logits: got {wanted!r} with return_attn_probs; a call has one of them"
            )
        options = options._replace(return_max_logits=wanted)
    return options


def max_seqlen(x: int | Tensor, name: str, rows: int, exact: bool = False) -> int:
    """The longest sequence as an int.

    A tensor on a GPU is not waited for: kernels need an upper bound alone, and ``rows``, the length
    of the packed tensor, is one. ``exact`` insists, where an output's shape depends on it.
    """
    if type(x) is int or isinstance(x, torch.SymInt):
        return x
    if isinstance(x, Tensor) and x.dim() == 0 and x.dtype in _INTEGERS:
        return rows if x.is_cuda and not exact else x.item()
    if isinstance(x, (Tensor, bool)) or not hasattr(x, "__index__"):
        raise TypeError(f"{name}: got {x!r}; an int or a 0-d integer tensor is needed")
    return operator.index(x)  # an integer of numpy's


def max_logits(x: Any) -> MaxLogits:
    """Which largest logits are wanted: False, of heads, or of each "row"."""
    if isinstance(x, str) and x == "row":
        return "row"
    try:
        return flag(x, "return_max_logits")
    except TypeError:
        raise TypeError(
            f'return_max_logits: got {_shown(x)}; True, False or "row" is needed'
        ) from None


def _is_bool(x: Any) -> bool:
    """Whether x is a bool of Python's, or of numpy's, which need not be installed."""
    if isinstance(x, (bool, torch.SymBool)):
        return True
    kind = type(x)
    return kind.__module__ == "numpy" and kind.__name__ in ("bool", "bool_")


def _shown(x: Any) -> str:
    """What a message says of a wrong argument: a tensor by its shape."""
    return f"a Tensor of shape {tuple(x.shape)}" if isinstance(x, Tensor) else repr(x)


def integer(x: Any, name: str) -> int:
    """Any integer as an int, or as the SymInt it is: numpy's, and a tensor of one, too.

    A tensor on a GPU is waited for.
    """
    if type(x) is not int:
        if isinstance(x, torch.SymInt):
            return x
        x = _as_int(x, name)
    # A number that a compiler traces has 64 bits, and must not be compared if it comes from data.
    if not is_compiling() and not -(2**63) <= x < 2**63:
        raise ValueError(f"{name}: got {x}; an integer of 64 bits is needed")
    return x


def _as_int(x: Any, name: str) -> int:
    given = x
    if isinstance(x, Tensor) and x.dim() == 0 and not (x.is_floating_point() or x.is_complex()):
        x = x.item()
    if isinstance(x, Tensor) or _is_bool(x) or not hasattr(x, "__index__"):
        raise TypeError(f"{name}: got {given!r}; an integer is needed")
    return operator.index(x)


def num_splits(x: Any) -> int:
    """The most parts to cut a sequence's keys into, or 0."""
    x = integer(x, "num_splits")
    if x < 0:
        raise ValueError(f"num_splits: got {x}; 0 (chosen inside) or more is needed")
    return x


def sm_margin(x: Any) -> int:
    """How many SMs a call leaves to others."""
    x = integer(x, "sm_margin")
    if x < 0:
        raise ValueError(f"sm_margin: got {x}; 0 SMs (a call takes all) or more are needed")
    return x


def number(x: Any, name: str) -> None:
    """A tensor would do as well on the CPU, but on a GPU it would have to be waited for."""
    kind = type(x)
    if kind is float or kind is int or isinstance(x, (torch.SymFloat, torch.SymInt)):
        return
    if isinstance(x, Tensor) and x.numel() == 1:
        raise TypeError(f"{name}: got a Tensor; a Python number is needed (call .item())")
    if _is_bool(x) or not isinstance(x, Real):
        raise TypeError(f"{name}: got {_shown(x)}; a number is needed{_order(name, x)}")


def finite(x: Any, name: str) -> None:
    """A number that kernels can count with."""
    number(x, name)
    if not _LEAST <= x <= LARGEST:
        raise ValueError(f"{name}: got {x}; a finite number (of float32) is needed")


def _order(name: str, x: Any) -> str:
    """What to add where the caller meant another argument: a mask, or causal."""
    if name == "dropout_p" or (name == "softmax_scale" and _is_bool(x)):
        return "; dropout_p, softmax_scale and causal come in this order: pass them by keyword"
    return ""


def window(window_size: Any) -> tuple[int, int]:
    """(left, right) as two ints, of any two integers: a tuple, a list, an array, a tensor."""
    if type(window_size) is tuple and len(window_size) == 2:
        left, right = window_size
    else:
        left, right = _pair(window_size)
    try:
        return integer(left, "window_size"), integer(right, "window_size")
    except (TypeError, ValueError):
        raise ValueError(
            f"window_size: got {window_size!r}; two integers of 64 bits are needed, -1 is unbounded"
        ) from None


def window_as_it_is(window_size: Any) -> tuple[int, int]:
    """``window`` outside of compilers: two ints are left to the library, which checks them."""
    if type(window_size) is tuple and len(window_size) == 2:
        left, right = window_size
        if type(left) is int and type(right) is int:
            return window_size
    return window(window_size)


def _pair(window_size: Any) -> tuple[Any, Any]:
    pair = window_size.tolist() if isinstance(window_size, Tensor) else window_size
    try:
        left, right = pair[0], pair[1]
        length = len(pair)
    except (TypeError, IndexError, KeyError):
        length = 0
    if length != 2:
        raise ValueError(f"window_size: got {window_size!r}; a pair (left, right) is needed")
    return left, right
