"""What is logged of a role's dumps, mostly once a run."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import attrs

from rlskip._human import age, counted, short
from rlskip.batch.columns import SCORES, field_names
from rlskip.config.check import is_below
from rlskip.config.facts import HostFacts
from rlskip.config.skip import BUILT_IN_ROLES, TRAINING_ROLES, VALIDATION_ROLE, SkipAction, as_given
from rlskip.skip.call import Call
from rlskip.skip.kept_config import changed_keys, read_config
from rlskip.skip.names import seems_to_shape
from rlskip.store import DumpMeta
from rlskip.store.layout import Place, places_among, shape_of
from rlskip_conf import NODES

log = logging.getLogger(__name__)

_MAX_CHANGES = 10


@attrs.define(eq=False)
class Notices:
    """The log lines of one role about the dumps in `directory`."""

    role: str
    _local_config: Any
    _facts: HostFacts
    directory: Path
    #: The run's config by dotted key, as it is kept with the dumps.
    _config: dict[str, Any]
    # The topics of lines that were given, each with who asked first.
    _given: dict[str, object] = attrs.field(init=False, factory=dict)
    _left: dict[str, dict[str, str]] = attrs.field(init=False, factory=dict)

    def once(self, topic: str, message: str, *values: Any, level: int = logging.WARNING) -> None:
        """Warn, unless a line of this topic was given before."""
        if self.is_new(topic):
            log.log(level, f"rlskip: role {self.role}: {message}", *values)

    def replayed(self, step: int, meta: DumpMeta, found: Any) -> None:
        """Name the dump, or what else is replayed; the first time, say what that does not show.

        The first dump of each job is named with its path and its age.
        """
        repeats = self._local_config.action == SkipAction.REPEAT
        job, source = meta.info.get("job", "unknown"), ""
        is_new = self.is_new(f"dumps of {job}, {meta.info.get('config')}")
        if is_new and self.is_new(f"dumps of {job}"):
            written = datetime.fromisoformat(meta.created).timestamp()
            path = found.directory if isinstance(found, Place) else self.directory
            source = f" from {path}, made {age(written)} ago by job {job}"
        if not isinstance(found, Place):
            what = f"step {step} replayed: {found} (match=prompt){source}"
        elif found.step == step:
            what = f"step {_numbered(step, meta.info.get('place', 0))} replayed{source}"
        elif repeats:
            what = f"step {step} REPEATS step {found.step}{source}; its prompts were not checked"
        else:
            dump = _numbered(found.step, meta.info.get("place", 0))
            what = f"a call of step {step} replayed from step {dump} (match=run){source}"
        own = "" if self.role in TRAINING_ROLES else f" (role {self.role})"
        log.info("rlskip: %s%s", what, own)
        if not repeats:  # which compares nothing
            self._say_left()
        if not is_new:
            return
        if self.role == VALIDATION_ROLE:
            what = "replayed validation does not show how the weights have changed since"
            self.once("off-policy", what)
        elif self.role in TRAINING_ROLES:
            self.once("off-policy", "replayed rollouts are off-policy for the present weights")
        self.changed(meta, self.directory)

    def generated(self, call: Call) -> None:
        """Say why a call is generated at a step that has dumps."""
        what = "rlskip: role %s: step %s is generated: %s"
        log.info(what, self.role, _numbered(call.step, call.place), call.reason)

    def leave(self, stage: str, left: Mapping[str, str], changing: Iterable[str]) -> None:
        """Note what a call of a stage leaves uncompared, for when a dump is replayed."""
        noted = self._left.setdefault(stage, {})
        if f"left of {stage}" not in self._given:
            noted.update(left)
        noted.update(dict.fromkeys(changing, "it changes while stages run"))

    def _say_left(self) -> None:
        """Warn once of what no replay of a stage compares; of what changes, when it first does."""
        for stage, left in list(self._left.items()):
            names = [name for name in sorted(left) if self.is_new(f"left of {stage}: {name}")]
            if names:
                log.warning(
                    "rlskip: role %s: %s: not compared, so other values replay the same dump: %s; "
                    "annotate(identity=...) or skip.attach.%s.identity compares what shapes "
                    "rollouts; annotate(ignore=[...]) or '%s=[%s]' says what does not",
                    self.role, stage, _first([f"{name} ({left[name]})" for name in names]),
                    self.role, self.typed("skip.ignore"), ",".join(names[:_MAX_CHANGES]),
                )  # fmt: skip
            self.is_new(f"left of {stage}")  # no more of it

    def dropped(self, unwanted: Iterable[str], rollouts: Any, kept: Any) -> None:
        """Warn of names in ``drop_fields`` that no field has, and of scores."""
        there = field_names(rollouts)
        if unknown := sorted({*unwanted} - there):
            self.once(
                "unknown-fields", "drop_fields names %s, which the dump does not have; it has %s",
                ", ".join(unknown), ", ".join(sorted(there)),
            )  # fmt: skip
        if (scores := sorted(field_names(kept) & SCORES)) and self.role in BUILT_IN_ROLES:
            self.once(
                "scores", "scores are replayed with the rollouts (%s); to compute them again: "
                "%s=[%s]", ", ".join(scores), self.typed("skip.drop_fields"), ",".join(scores),
            )  # fmt: skip

    def log_hidden(self) -> None:
        """On the first miss, name the dumps that another batch size or length hides."""
        if self.is_new("hidden"):
            for hidden in self.other_shapes():
                self.once(hidden, "%s", hidden)

    def other_shapes(self) -> Iterator[str]:
        """The run's directories for another batch size or length that have dumps, and why."""
        for run, path, differing in self.siblings():
            if not (self._local_config.match == "prompt" and {*differing} == {"gbs"}):
                differs = ", ".join(f"{k} is {a} now, {b} there" for k, (a, b) in differing.items())
                has = f"has dumps of {counted(_steps_in(path), 'step')}, which are not found"
                yield f"{run} {has}: {differs}"

    def siblings(self) -> Iterator[tuple[Path, Path, dict[str, tuple[str, str]]]]:
        """The run's directories of other batch sizes or lengths, and the role's there, with dumps.

        With each what is other: now, and there.
        """
        ours = self.directory if self.role in TRAINING_ROLES else self.directory.parent
        mine = shape_of(ours.name)
        with contextlib.suppress(OSError):
            for run in sorted(ours.parent.iterdir()) if mine else ():
                other, path = shape_of(run.name), run / self.directory.relative_to(ours)
                if mine and other and run != ours and _steps_in(path):
                    yield run, path, {k: (mine[k], other[k]) for k in mine if mine[k] != other[k]}

    def changed(self, meta: DumpMeta, directory: Path) -> None:
        for level, what in self.changes(meta, directory):
            log.log(level, "rlskip: role %s: %s", self.role, what)

    def changes(self, meta: DumpMeta, directory: Path) -> Iterator[tuple[int, str]]:
        """Name the keys of the config that changed since the dump was made and are not compared.

        Once for each kept config, without what was named before. The dump is in `directory`.
        """
        if not self.is_new(f"config {meta.info.get('config')}"):
            return
        then, now = self.kept_config(meta, directory), self._config
        settled = (*(self._local_config.identity or ()), "hydra", *NODES, *self._facts.known)
        shaping, others = dict[str, str](), list[str]()
        for key in changed_keys(then, now) if then else ():
            was, is_now = (short(repr(config.get(key)), 40) for config in (then, now))
            text = f"{key} ({was} then, {is_now} now)"
            if is_below(key, settled) or not self.is_new(text):
                continue
            if seems_to_shape(key):
                shaping[key] = text
            else:
                others.append(text)
        what = "changed since the dump was made, and not compared: "
        if shaping:
            named = ",".join(key for key in shaping if key in now)
            it = "them" if "," in named else "it"
            advice = f"; {self.typed('skip.identity')}=[{named}] compares {it}" if named else ""
            yield logging.WARNING, what + ", ".join(shaping.values()) + advice
        if others:
            yield logging.INFO, what + _first(others)

    def kept_config(self, meta: DumpMeta, directory: Path) -> dict[str, Any]:
        """The config that is kept with a dump in the role's `directory`; empty without one."""
        name = meta.info.get("config")
        try:
            return read_config(directory, name) if isinstance(name, str) else {}
        except (OSError, ValueError) as error:
            what = "the config of the dump cannot be read: %s"
            self.once(f"unread {name}", what, error, level=logging.INFO)
            return {}

    def typed(self, key: str) -> str:
        return as_given(key, self.role, self._local_config)

    def is_new(self, topic: str) -> bool:
        """Whether this is the first time that anyone asks about the topic."""
        asks = object()
        return self._given.setdefault(topic, asks) is asks  # in one step: calls are side by side


def _steps_in(directory: Path) -> int:
    try:
        return len({place.step for place in places_among(directory, os.listdir(directory))})
    except OSError:
        return 0


def _first(texts: list[str]) -> str:
    """The first of these, and how many more there are."""
    more = len(texts) - _MAX_CHANGES
    return ", ".join(texts[:_MAX_CHANGES]) + (f" and {more} more" if more > 0 else "")


def _numbered(step: int, number: int) -> str:
    """A step, or a call of it as ``rlskip ls`` names it: 3, or 3/1 for the second one."""
    return f"{step}/{number}" if number else str(step)
