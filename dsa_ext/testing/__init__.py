"""Inputs, tolerances, timing and memory, shared by the tests and the benchmarks."""
