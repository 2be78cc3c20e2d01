"""A small byte-level GPT, to read and to run: ``python -m examples.train_gpt``."""
