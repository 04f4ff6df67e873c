"""What Hydra discovers, and imports at the start of every application: keep it light."""

from rlskip._hydra import RlskipSearchPathPlugin

__all__ = ["RlskipSearchPathPlugin"]
