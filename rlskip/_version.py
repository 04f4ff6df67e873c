"""The version of rlskip, in the one place that the build reads it from."""

__version__ = "0.4.0"
