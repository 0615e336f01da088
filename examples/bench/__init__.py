"""Benchmarks: what the package promises, measured."""
