"""The CPU backend: every operation of the package on torch operations, tiled, in O(seqlen) memory.

The functions take a call as `flash_attn.call` describes it; `flash_attn.dispatch.ops` registers
them as the ops of the same names. They run below autograd and check only what the static checks
cannot: values. CONTENT_CHECKS makes these checks alone, for tensors of any device.
"""

from . import fp8_forward as _codes
from . import kvcache, varlen
from .dense import backward, forward
from .encode import make_codes, make_query_codes
from .fp8_forward import fp8_forward
from .kvcache import with_kvcache
from .merge import merge_attention
from .varlen import varlen_backward, varlen_forward

__all__ = [
    "CONTENT_CHECKS",
    "backward",
    "forward",
    "fp8_forward",
    "make_codes",
    "make_query_codes",
    "merge_attention",
    "varlen_backward",
    "varlen_forward",
    "with_kvcache",
]

#: The check of each operation: takes its arguments, by name; raises for what their tensors contain.
CONTENT_CHECKS = {
    "_flash_attn_varlen_forward": varlen.check_contents,
    "_flash_attn_varlen_backward": varlen.check_contents,
    "_flash_attn_fp8_forward": _codes.check_contents,
    "_flash_attn_with_kvcache": kvcache.check_contents,
}
