"""``flash_attn.explain`` and ``flash_attn.explain_call``."""

from .call import explain_call as explain_call
from .describe import explain as explain
from .describe import trace as trace
from .explanation import Explanation as Explanation
