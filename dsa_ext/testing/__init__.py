"""Inputs, tolerances and timing, shared by the tests and the benchmarks."""
