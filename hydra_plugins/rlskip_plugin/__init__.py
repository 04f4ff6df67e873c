"""What Hydra discovers, and imports at the start of every application: keep it light."""

from rlskip._hydra import RlskipConfigSource, RlskipSearchPathPlugin

__all__ = ["RlskipConfigSource", "RlskipSearchPathPlugin"]
