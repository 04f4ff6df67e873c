"""Cached rollouts, scored again by a reward function."""
