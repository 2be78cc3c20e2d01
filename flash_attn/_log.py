"""What calls say of themselves: to Python's ``logging``, logger ``flash_attn``, level ``INFO``.

Whether they do is decided once, when the package is imported, by the logger's own level, which
FLASH_ATTN_LOG=1 sets. A call without costs the look at one bool.
"""

from __future__ import annotations

import logging

from flash_attn import _switches

logger = logging.getLogger("flash_attn")


def start() -> bool:
    """Whether calls are to be logged. An inherited level does not count: a program that has all
    loggers say what they do did not ask for this one."""
    if _switches.flag("FLASH_ATTN_LOG"):
        logger.setLevel(logging.INFO)
        _print_without_other_handlers()
    return logging.NOTSET < logger.level <= logging.INFO


def _print_without_other_handlers() -> None:
    """To stderr, in programs without handlers, as logging itself does with warnings."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("flash_attn: %(message)s"))
    handler.addFilter(lambda record: logger.handlers == [handler] and not logging.root.handlers)
    logger.addHandler(handler)


def trace(line: str) -> None:
    """Logs a line that was not logged before."""
    if line not in _traced:
        _traced.add(line)
        logger.info("%s", line)


_traced: set[str] = set()
