"""The ``rlskip`` command. One file a command: its options, what it works out, how that is shown.

A command imports what takes long only when it runs: the help lists all commands.
"""
