"""The CPU backend: every operation of the package on torch operations, tiled, in O(seqlen) memory.

The functions have exactly the parameters of the ops of the same name in `flash_attn._ops`, which
registers them; they run below autograd and check only what the static checks cannot: values.
"""

from .dense import backward, forward
from .kvcache import with_kvcache
from .varlen import varlen_backward, varlen_forward

__all__ = ["backward", "forward", "varlen_backward", "varlen_forward", "with_kvcache"]
