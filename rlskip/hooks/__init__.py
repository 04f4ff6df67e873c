"""The Hydra callback: installs SkipManager and the recorder of stages, and writes a summary."""

from rlskip.hooks.callback import SkipCallback

__all__ = ["SkipCallback"]
