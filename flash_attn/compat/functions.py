"""Classes whose only use is ``.apply``, for clients that call those of the 2.8 package.

There they are ``torch.autograd.Function``; here autograd belongs to the operations, and ``apply``
is the public function with its arguments in the order that those classes take them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch


class Applied(Protocol):
    """A class that is called by ``apply`` alone."""

    apply: Callable[..., Any]


def function_class(
    name: str, function: Callable[..., Any], module: str, takes_grad_mode: bool = False
) -> Applied:
    """A class with ``apply``. takes_grad_mode: the last argument there, is_grad_enabled, may come
    after those of the function."""
    count = function.__code__.co_argcount

    def apply(*args):
        if not takes_grad_mode or len(args) <= count:
            return function(*args)
        *args, is_grad_enabled = args
        with torch.set_grad_enabled(torch.is_grad_enabled() and is_grad_enabled):
            return function(*args)

    apply.__doc__ = f"``{function.__name__}`` by position."
    members = {
        "__doc__": f"``{name}.apply(…)`` is ``{function.__name__}(…)``.",
        "__module__": module,
        "apply": staticmethod(apply),
    }
    return type(name, (), members)
