"""What a caller's arguments meet: checks, warnings, packed tensors. Not public; no operation."""
