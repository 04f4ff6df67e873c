"""Values to bytes and back: typed, compressed, verified, never pickled.

``docs/store.md`` describes the format, and :mod:`rlskip.store` exports the public names. Importing
the room is light: ``rlskip ls`` needs no torch.
"""
