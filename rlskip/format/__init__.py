"""Values to bytes and back: typed, compressed, verified, never pickled.

``docs/store.md`` describes the format. The public names of this room are exported by
:mod:`rlskip.store`. Importing the room is light: ``rlskip ls`` needs no torch.
"""
