"""Unit tests of csrc/core, whose functions also compile for the host, against brute force."""
