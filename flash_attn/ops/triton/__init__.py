"""The names that clients import from ``flash_attn.ops.triton``. They run on torch operations and
need no Triton; ``torch.compile`` fuses them where that pays."""
