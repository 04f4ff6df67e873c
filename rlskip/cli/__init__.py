"""The ``rlskip`` command. One file a command: its options, what it works out, how that is shown.

Nothing else of rlskip imports this. A command imports what takes long only when it runs: the help
lists all commands.
"""
