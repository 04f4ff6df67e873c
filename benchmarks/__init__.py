"""Benchmarks: `python -m benchmarks.<name> [--json FILE]`, rlskip next to the genuine peer."""
