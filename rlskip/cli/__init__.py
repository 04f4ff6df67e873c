"""The ``rlskip`` command. One small file a command: what it works out, and how that is shown.

Nothing else of rlskip imports this, and it imports what a command needs only when that runs.
"""
