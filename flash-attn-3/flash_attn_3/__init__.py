"""The names of FlashAttention-3 on the kernels of ``flash_attn``: its second distribution.

Nothing is imported here: ``find_spec("flash_attn_3._C")`` imports this, and programs ask so.
"""

#: The version of the API that is served.
__version__ = "3.0.0"
