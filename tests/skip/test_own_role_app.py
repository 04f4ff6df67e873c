"""Roles of a Hydra application's own: without a class, and with one that adds a key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

APP = """
import sys
from dataclasses import dataclass
import hydra
from rlskip import RoleConfig, SkipManager, register_skip
from rlskip.skip import RolloutSkip

@dataclass
class CriticConfig(RoleConfig):
    warmup: int = 3

@register_skip("critic", config=CriticConfig)
class CriticSkip(RolloutSkip):
    def meet_precondition(self, step, func, *args, **kwargs):
        warm = step > self.local_config.warmup
        return warm and super().meet_precondition(step, func, *args, **kwargs)

@SkipManager.annotate(role="critic")
def compute_values(batch):
    sys.stdout.write(f"COMPUTED {batch['step']}" + chr(10))  # at once: a thread may log meanwhile
    return {"values": [1.0, 2.0]}

@SkipManager.annotate(role="reward")
def compute_reward(batch):
    print("REWARDED", batch["step"])
    return {"rewards": [batch["step"]]}

@hydra.main(version_base="1.3", config_path=None)
def main(cfg):
    for step in range(1, 5):
        SkipManager.set_step(step)
        assert compute_values({"step": step}) == {"values": [1.0, 2.0]}
        assert compute_reward({"step": step}) == {"rewards": [step]}

main()
"""


def test_roles_of_ones_own(python: Any, tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(APP)
    on = ("+skip=rollout_cache", "skip.dump_dir=dumps", "skip.rollout.enable=false",
          "skip.critic.enable=true", "skip.critic.warmup=2", "skip.reward.enable=true")  # fmt: skip
    first, second = (python.run("app.py", *on, cwd=tmp_path) for _ in range(2))
    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    assert first.stdout.count("COMPUTED") == 4
    computed = [line for line in second.stdout.splitlines() if "COMPUTED" in line]
    assert computed == ["COMPUTED 1", "COMPUTED 2"]
    assert "role critic: 2 hits, 2 misses" in second.stdout + second.stderr
    assert (first.stdout.count("REWARDED"), second.stdout.count("REWARDED")) == (4, 0)
    assert "role reward: 4 hits, 0 misses" in second.stdout + second.stderr
