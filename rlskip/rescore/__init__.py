"""Reward functions: what they said of a session is kept, and they score cached rollouts again."""
