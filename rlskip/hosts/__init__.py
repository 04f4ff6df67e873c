"""Hosts: where rlskip attaches to somebody else's trainer. One small file a host."""
