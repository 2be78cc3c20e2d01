"""Measure attention: ``python -m benchmarks --help``."""
