"""What a caller meant by a keyword that there is not; on the failing path alone."""

from __future__ import annotations

from collections.abc import Callable

# Names of other attention functions, and the one here.
_NO_MASK = (
    "there is no mask tensor: causal and window_size say which keys are seen, alibi_slopes adds to "
    "scores, and flash_attn_varlen_func leaves out padding"
)
_MEANT = {
    "attention_mask": _NO_MASK,
    "attn_bias": _NO_MASK,
    "attn_mask": _NO_MASK,
    "cu_seqlens": "cu_seqlens_q",
    "dropout": "dropout_p",
    "is_causal": "causal",
    "logits_soft_cap": "softcap",
    "page_table": "block_table",
    "scale": "softmax_scale",
    "sinks": "s_aux",
    "sliding_window": "window_size",
    "sm_scale": "softmax_scale",
}
# Functions that take what another does not.
_ELSEWHERE = {
    **dict.fromkeys(("block_table", "cu_seqlens_q", "max_seqlen_q"), "flash_attn_varlen_func"),
    **dict.fromkeys(("cache_seqlens", "num_splits"), "flash_attn_with_kvcache"),
}


def unexpected(function: Callable, unknown: dict) -> TypeError:
    """The error for the first keyword that ``function`` has not."""
    import inspect

    name = next(iter(unknown))
    accepted = [n for n, p in inspect.signature(function).parameters.items() if p.kind < 4]
    return TypeError(
        f"{function.__name__}() got an unexpected keyword argument {name!r}"
        f"{_suggestion(name, accepted)}"
    )


def _suggestion(name: str, accepted: list[str]) -> str:
    meant = _MEANT.get(name, name)
    if meant is _NO_MASK:
        return f"; {meant}"
    if meant in accepted:
        return f"; did you mean {meant!r}?"
    if meant in _ELSEWHERE:
        return f"; {_ELSEWHERE[meant]} takes {meant!r}"
    import difflib

    close = difflib.get_close_matches(name, accepted, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; accepted are {', '.join(accepted)}"
