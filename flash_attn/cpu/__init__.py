"""The CPU backend: every operation of the package on torch operations, tiled, in O(seqlen) memory.

The functions have exactly the parameters of the ops of the same name in `flash_attn._ops`, which
registers them; they run below autograd and check only what the static checks cannot: values.
CONTENT_CHECKS makes these checks alone, for tensors of any device.
"""

from . import kvcache, varlen
from .dense import backward, forward
from .kvcache import with_kvcache
from .merge import merge_attention
from .varlen import varlen_backward, varlen_forward

__all__ = [
    "CONTENT_CHECKS",
    "backward",
    "forward",
    "merge_attention",
    "varlen_backward",
    "varlen_forward",
    "with_kvcache",
]

#: By operation: takes some of its arguments, by name; raises for what their tensors contain.
CONTENT_CHECKS = {
    "_flash_attn_varlen_forward": varlen.locate,
    "_flash_attn_varlen_backward": varlen.locate,
    "_flash_attn_with_kvcache": kvcache.locate,
}
