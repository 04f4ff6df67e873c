"""Rollouts that come in by hand, and steps that leave in one file."""
