"""A reward function's verdicts, each of which is asked for once."""
