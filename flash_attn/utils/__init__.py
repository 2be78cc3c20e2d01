"""Small helpers that clients import by name."""
