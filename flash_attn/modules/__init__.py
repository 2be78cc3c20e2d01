"""Ready-made attention modules."""
