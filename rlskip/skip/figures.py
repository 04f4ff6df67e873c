"""How many of the rollouts that a host trains on next were replayed, for its logged metrics."""

from __future__ import annotations

import threading

import attrs


@attrs.define
class Figures:
    """What was generated and replayed since the host logged last; stages may run side by side."""

    rollouts: int = 0
    replayed: int = 0
    #: Of the replayed ones those that were generated at another step.
    off_policy: int = 0
    seconds_saved: float = 0.0
    _lock: threading.Lock = attrs.field(factory=threading.Lock, init=False, eq=False)

    def add(
        self, rollouts: int = 0, replayed: int = 0, off_policy: int = 0, seconds_saved: float = 0.0
    ) -> None:
        with self._lock:
            self.rollouts += rollouts
            self.replayed += replayed
            self.off_policy += off_policy
            self.seconds_saved += seconds_saved

    def take(self) -> dict[str, float]:
        """The figures by the names under which hosts log them; empty if there was no rollout."""
        with self._lock:
            counted, self.rollouts, replayed, self.replayed = self.rollouts, 0, self.replayed, 0
            off_policy, self.off_policy = self.off_policy, 0
            seconds, self.seconds_saved = self.seconds_saved, 0.0
        if not counted:
            return {}
        return {
            "rlskip/replayed": replayed / counted,
            "rlskip/off_policy": off_policy / counted,
            "rlskip/seconds_saved": max(0.0, seconds),
        }
