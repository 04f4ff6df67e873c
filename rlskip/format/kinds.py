"""The packer and the unpacker, with all kinds of values registered."""

from rlskip.format import plain, tensordicts, tensors  # noqa: F401 - each registers its kinds
from rlskip.format.codec import Packer, Unpacker, register_codec

# After those of hosts, whose batches may be dataclasses.
from rlskip.format import objects  # isort: skip # noqa: F401

__all__ = ["Packer", "Unpacker", "register_codec"]
