"""What is logged of a role's dumps, mostly once a run."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from rlskip._human import age, short
from rlskip._nodes import ABOVE, NODES, as_typed
from rlskip.config.facts import HostFacts
from rlskip.config.skip import TRAINING_ROLES, VALIDATION_ROLE, SkipAction
from rlskip.skip import config_copy
from rlskip.skip.visit import Found
from rlskip.store import DumpMeta
from rlskip.store.layout import shape_of, steps_among

log = logging.getLogger(__name__)

_MAX_CHANGES = 10


class Notices:
    """The log lines of one role about the dumps in `directory`.

    Parameters
    ----------
    config
        The run's config by dotted key, as it is kept with the dumps.
    """

    def __init__(
        self,
        role: str,
        local_config: Any,
        facts: HostFacts,
        directory: Path,
        config: dict[str, Any],
    ) -> None:
        self.role = role
        self._local_config = local_config
        self._facts = facts
        self._directory = directory
        self._config = config
        self._given: set[str] = set()

    def once(self, topic: str, message: str, *values: Any) -> None:
        """Warn, unless a warning of this topic was given before."""
        if self._is_new(topic):
            log.warning(f"rlskip: role {self.role}: {message}", *values)

    def replayed(self, step: int, meta: DumpMeta, found: Found) -> None:
        """Name the dump that is replayed; the first time, say what a replay does not show."""
        written = datetime.fromisoformat(meta.created).timestamp()
        source = self._directory / found.path
        made = f"made {age(written)} ago by job {meta.info.get('job', 'unknown')}"
        if found.step == step:
            log.info("rlskip: %s replayed from %s, %s", found, source, made)
        elif self._local_config.action == SkipAction.REPEAT:
            log.info(
                "rlskip: step %d REPEATS %s from %s, %s; its prompts were not checked",
                step, found, source, made,
            )  # fmt: skip
        else:
            log.info(
                "rlskip: a call of step %d replayed from %s of the run (match=run), %s, %s",
                step, found, source, made,
            )  # fmt: skip
        if self.role == VALIDATION_ROLE:
            what = "replayed validation does not show how the weights have changed since"
        else:
            what = "replayed rollouts are off-policy for the present weights"
        self.once("off-policy", what)
        self._changed(meta)

    def dropped(self, unwanted: Iterable[str], there: set[str], scores: Sequence[str]) -> None:
        """Warn of names in ``drop_fields`` that no field has, and of scores that are replayed."""
        if unknown := sorted({*unwanted} - there):
            self.once(
                "unknown-fields", "drop_fields names %s, which the dump does not have; it has %s",
                ", ".join(unknown), ", ".join(sorted(there)),
            )  # fmt: skip
        if scores:
            self.once(
                "scores", "scores are replayed with the rollouts (%s); to compute them again: "
                "%s=[%s]", ", ".join(scores), as_typed("skip.drop_fields"), ",".join(scores),
            )  # fmt: skip

    def log_other_shapes(self) -> None:
        """On the first miss, name the run's dumps that another batch size or length hides."""
        if self._is_new("shapes"):
            for hidden in self.other_shapes():
                log.warning("rlskip: role %s: %s", self.role, hidden)

    def other_shapes(self) -> Iterator[str]:
        """The run's directories for another batch size or length that have dumps, and why."""
        ours = self._directory if self.role in TRAINING_ROLES else self._directory.parent
        mine = shape_of(ours.name)
        try:
            siblings = sorted(path for path in ours.parent.iterdir() if path != ours)
        except OSError:
            return
        for path in siblings:
            other = shape_of(path.name)
            steps = _steps_in(path / self._directory.relative_to(ours)) if other else 0
            if mine and other and steps:
                differs = ", ".join(
                    f"{name} is {mine[name]} now, {other[name]} there"
                    for name in mine
                    if mine[name] != other[name]
                )
                yield f"{path} has dumps of {steps} steps, which are not found: {differs}"

    def _changed(self, meta: DumpMeta) -> None:
        """On the first replay, name the keys of the config that changed and are not compared."""
        name, facts = meta.info.get("config"), self._facts
        if not isinstance(name, str) or not self._is_new("changes"):
            return
        try:
            then = config_copy.read(self._directory, name)
        except (OSError, ValueError) as error:
            log.info("rlskip: role %s: the config of the dump cannot be read: %s", self.role, error)
            return
        compared = {*(self._local_config.identity or ()), "hydra", *NODES, ABOVE}
        changed = [
            key
            for key in config_copy.changed(then, self._config)
            if not facts.is_settled(key)
            and not any(f"{key}.".startswith(f"{one}.") for one in compared)
        ]
        shaping = [key for key in changed if facts.seems_to_shape(key)]
        others = [key for key in changed if key not in shaping]
        what = "rlskip: role %s: changed since the dump was made, and not compared: %s%s"

        def shown(keys: list[str]) -> str:
            values = ((key, then.get(key), self._config.get(key)) for key in keys)
            return ", ".join(
                f"{k} ({_short(old)} then, {_short(new)} now)" for k, old, new in values
            )

        if shaping:
            named = ",".join(key for key in shaping if key in self._config)
            advice = f"; {as_typed('skip.identity')}=[{named}] compares" if named else ""
            log.warning(what, self.role, shown(shaping), advice)
        if others:
            more = len(others) - _MAX_CHANGES
            ending = f" and {more} more" if more > 0 else ""
            log.info(what, self.role, shown(others[:_MAX_CHANGES]), ending)

    def _is_new(self, topic: str) -> bool:
        if topic in self._given:
            return False
        self._given.add(topic)
        return True


def _steps_in(directory: Path) -> int:
    try:
        return len(steps_among(os.listdir(directory)))
    except OSError:
        return 0


def _short(value: Any) -> str:
    return short(repr(value), 40)
