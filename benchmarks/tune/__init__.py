"""Measures the numbers of the cost model on a GPU and writes that machine's file."""
