"""Benchmarks: `python -m benchmarks.<name> [--json FILE]`, ours beside the genuine peer."""
