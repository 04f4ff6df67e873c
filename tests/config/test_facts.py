"""Which modules know a host's keys, and what the others take from its facts."""

from __future__ import annotations

import re
from pathlib import Path

import rlskip

ROOM = Path(rlskip.__file__).parent

#: Keys that the config of verl has, whatever is below them.
VERLS = re.compile(
    r"actor_rollout_ref|async_training|ray_kwargs|(gen|train)_batch_size|max_(prompt|response)_len"
    r"|trainer\.(experiment_name|project_name|total_training_steps|v1|use_v1|val_)|data\.seed"
)


def test_no_other_module_knows_a_key_of_verls() -> None:
    allowed = ("hosts/verl/", "config/facts.py")
    # SkyRL's config and TRL's arguments have some of the same names.
    others = ("hosts/skyrl/", "hosts/trl/")
    found = {
        f"{name}: {match[0]}"
        for path in ROOM.rglob("*.py")
        if not (name := path.relative_to(ROOM).as_posix()).startswith((*allowed, *others))
        for match in VERLS.finditer(path.read_text(encoding="utf-8"))
    }
    assert not found
