"""Inputs, tolerances, timing and memory measurement, shared by the tests and the benchmarks."""
