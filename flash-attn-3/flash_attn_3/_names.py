"""What is wrong with a call, in the names of the function called; on the failing path alone.

Checks are shared with ``flash_attn`` and among functions that call one thing by different names.
"""

from __future__ import annotations

import re

from flash_attn_3._asked import Asked

#: Arguments of ``flash_attn_with_kvcache``, by what checks may call them.
_OF_A_CACHE = {"seqused_k": "cache_seqlens", "leftpad_k": "cache_leftpad"}
#: Arguments of the other functions.
_OF_ROWS = {
    "cache_seqlens": "seqused_k",
    "cache_leftpad": "leftpad_k",
    "cache_batch_idx": "kv_batch_idx",
    "rotary_seqlens": "seqlens_rotary",
}
_ROWS_WITHOUT_NEW_KEYS = {**_OF_ROWS, "k_cache": "k", "v_cache": "v"}


def renamed(error: Exception, asked: Asked, is_cache: bool, table: str) -> Exception:
    """What to raise for a call that failed; ``error`` if it has the caller's names.

    Arguments:
        is_cache: ``flash_attn_with_kvcache`` was called.
        table: the name of the page table there.
    """
    if type(error) not in (TypeError, ValueError):
        return error
    of_rows = _ROWS_WITHOUT_NEW_KEYS if asked.k_new is asked.v_new is None else _OF_ROWS
    names = {**(_OF_A_CACHE if is_cache else of_rows), "block_table": table, "page_table": table}
    text = re.sub(rf"\b({'|'.join(names)})\b", lambda found: names[found[0]], str(error))
    return error if text == str(error) else type(error)(text)
