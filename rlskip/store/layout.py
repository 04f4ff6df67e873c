"""The one home of the layout: what is where in a dump_dir, and what names mean.

::

    {dump_dir}/{experiment_name}_{project_name}/GBS{gbs}_N{n}_in{prompt_len}_out{response_len}/
        {step}/gen_batch.dp  meta.json       the first call of a step
        {step}.{digest}-{k}/...              each later one: k counts the calls of a digest
        {step}.part-{k}/...                  each later part of a queue's step
        {step}[.{call}].r0-of-2/...          a rank's shard of any of these
        {step}.journal                       finished sessions of a step without a dump
        {name}.bad-{time}-{random}           a quarantined dump
        dumps.index                          which prompts were dumped where (advisory)
        .work/                               what jobs hold: rlskip.jobs.alive
        {role}/{step}/...                    of every role but those that train share
    {dump_dir}/stages/{job}/{step}[.part-{k}]/...   what the stages of a step computed

A dump is one directory, which one rename publishes: that rename alone decides who was first. The
digest is of role, stage and prompts (:meth:`rlskip.store.identity.Identity.digest`): it says where
to look, and what the dump was made for is in its ``meta.json``.
"""

from __future__ import annotations

import bisect
import contextlib
import logging
import math
import os
import re
import secrets
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar

import attrs

from rlskip._files import safe_name
from rlskip.config.dump_dir import parse_dump_dir
from rlskip.errors import ConfigError

logger = logging.getLogger(__name__)

_TICK_S = 1.0  # longer than a tick of any file system's clock
_BAD = ".bad-"
_SHAPE = re.compile(r"GBS(?P<gbs>.+)_N(?P<n>.+)_in(?P<prompt_len>.+)_out(?P<response_len>.+)")
_NUMBER = "0|[1-9][0-9]{0,18}"
_PART = "part"
_NAME = re.compile(
    rf"(?P<step>{_NUMBER})"
    rf"(?:\.(?P<call>(?:[0-9a-f]{{16}}|{_PART})-(?:{_NUMBER})))?"
    r"(?:\.r(?P<rank>[0-9]{1,6})-of-(?P<ranks>[0-9]{1,6}))?"
)

INDEX = "dumps.index"
JOURNAL = ".journal"
STAGES = "stages"  # no run's directory has this name: those contain an underscore


def run_directory(
    dump_dir: str | Path,
    experiment_name: str,
    project_name: str,
    gbs: int | str | None,
    n: int | str | None,
    prompt_len: int | str | None,
    response_len: int | str | None,
) -> Path:
    """The directory of a run's dumps; nothing is created.

    ``~`` is expanded; a relative `dump_dir` stays relative. No name leaves `dump_dir`, and no two
    are changed into the same one. Raises ConfigError where `dump_dir` is a URL or empty, or where a
    symbolic link below it leads to the directory.
    """
    run = f"{safe_name(experiment_name)}_{safe_name(project_name)}"
    shape = safe_name(f"GBS{gbs}_N{n}_in{prompt_len}_out{response_len}")
    return refuse_links(parse_dump_dir(dump_dir) / run / shape)


def stages_directory(dump_dir: str | Path, job: str) -> Path:
    """The directory of what the stages of a job computed; raises as :func:`run_directory`."""
    return refuse_links(parse_dump_dir(dump_dir) / STAGES / job)


def shape_of(name: str) -> dict[str, str] | None:
    """What a directory's name says: gbs, n, prompt_len, response_len; None for any other name."""
    found = _SHAPE.fullmatch(name)
    return found.groupdict() if found else None


def run_name(directory: Path) -> str:
    """A run's directory below the dump_dir: of an experiment, a shape, and maybe a role."""
    return "/".join(directory.parts[-3 if shape_of(directory.parent.name) else -2 :])


def refuse_links(directory: Path) -> Path:
    """It; raises ConfigError where it or the one above it, a run's two, is a symbolic link."""
    for path in (directory.parent, directory):
        if os.path.islink(path):
            raise ConfigError(
                f"{path} is a symbolic link; below dump_dir none is followed",
                where="skip.dump_dir",
                remedy="replace it by what it points to, or give a dump_dir that is there",
            )
    return directory


def as_step(name: str) -> int | None:
    """The step or part that a directory is named after; None for any other name."""
    return int(name) if re.fullmatch(_NUMBER, name) else None


def journal_name(step: int) -> str:
    return f"{step}{JOURNAL}"


def journaled_steps(directory: Path) -> list[int]:
    """The steps that have a journal in a run's directory, ascending; none if it cannot be read."""
    with contextlib.suppress(OSError):
        named = (name.removesuffix(JOURNAL) for name in os.listdir(directory) if JOURNAL in name)
        return sorted(int(name) for name in named if as_step(name) is not None)
    return []


def part_name(number: int) -> str:
    """The name among those of its step of part `number` of a queue: the first has none."""
    return f"{_PART}-{number}" if number else ""


def part_number(call: str) -> int | None:
    """The number of a queue's part by its name, as :func:`part_name` makes it; None of a call."""
    number = int(call.rpartition("-")[2] or 0)
    return number if call == part_name(number) else None


def quarantine_name(name: str) -> str:
    """A new name to keep a bad dump under."""
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    return f"{name}{_BAD}{stamp}-{secrets.token_hex(3)}"


def name_before_quarantine(name: str) -> str:
    """What a dump or a part was called that is kept under this name; else empty."""
    return name.rpartition(_BAD)[0]


@attrs.frozen
class Place:
    """Where a dump's two files are: below the run's directory `root`.

    `call` names it among those of its step, ``{digest}-{k}`` or ``part-{k}``; empty: the first.
    """

    dump: ClassVar[str] = "gen_batch.dp"
    meta: ClassVar[str] = "meta.json"

    root: Path
    step: int
    call: str = ""
    rank: int = 0
    world_size: int = 1

    @classmethod
    def parse(cls, root: Path, name: str) -> Place | None:
        """The place of the directory of this name; None if none of a dump's has such a name."""
        if (found := _NAME.fullmatch(name)) is None:
            return None
        rank, ranks = int(found["rank"] or 0), int(found["ranks"] or 1)
        place = cls(root, int(found["step"]), found["call"] or "", rank, ranks)
        return place if rank < ranks and place.name == name else None

    def __str__(self) -> str:
        return f"step {self.step}" + (f", call {self.call}" if self.call else "")

    @property
    def name(self) -> str:
        call = f".{self.call}" if self.call else ""
        rank = f".r{self.rank}-of-{self.world_size}" if self.world_size > 1 else ""
        return f"{self.step}{call}{rank}"

    @property
    def directory(self) -> Path:
        return self.root / self.name

    @property
    def whose(self) -> dict[str, Any]:
        """What both files of a dump record of its place."""
        ranks = {"rank": self.rank, "world_size": self.world_size}
        return {"step": self.step, "call": self.call, **ranks}

    @property
    def order(self) -> tuple[int, bool, str, int, int]:
        """Within a run: by step, the first call first, then by name, and by rank."""
        digest, _, number = self.call.rpartition("-")
        return self.step, bool(self.call), digest, int(number or 0), self.rank


def places_among(root: Path, names: Iterable[str]) -> list[Place]:
    """The places of the directories of these names that are a dump's, in order."""
    found = filter(None, (Place.parse(root, name) for name in names))
    return sorted(found, key=lambda place: place.order)


@attrs.define(eq=False)
class Listed:
    """What a directory held when it was `changed` last, in ns; believed until that time.

    By step the ``dumps`` of all ranks, to copy first: other threads may add to it; and those of
    which something was moved away as ``bad``.
    """

    changed: int | None = None
    until: float = 0.0
    dumps: dict[int, list[Place]] = attrs.field(factory=dict)
    bad: dict[int, list[Place]] = attrs.field(factory=dict)


class Listing:
    """The dumps in a run's directory, listed again only if it has changed: a run has many steps.

    One that changes again within a tick of the file system's clock may show no newer time. So a
    listing of one that has just changed, by this process or another, is believed for a second.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.forget()

    def forget(self) -> None:
        self._listed = Listed()

    def note(self, place: Place) -> None:
        """Know of a dump of this process without listing all others again."""
        listed = self._listed
        family = listed.dumps.setdefault(place.step, [])
        at = bisect.bisect_left(family, place.order, key=lambda other: other.order)
        if listed.changed is not None and family[at : at + 1] != [place]:
            family.insert(at, place)  # not sorted again: a step may have thousands of calls
            # This time hides what others added before: from now on it is believed for a second.
            listed.changed = self._changed()
            listed.until = min(listed.until, time.monotonic() + _TICK_S)

    def look(self) -> Listed:
        """What is there now."""
        # The time before the names: what is added meanwhile is a change at the next look.
        listed, changed = self._listed, self._changed()
        is_same = changed is not None and changed == listed.changed
        if is_same and time.monotonic() <= listed.until:
            return listed
        names: dict[str, bool] = {}
        try:
            with os.scandir(self.directory) as entries:
                names = {entry.name: entry.is_dir(follow_symlinks=False) for entry in entries}
        except FileNotFoundError:
            pass
        except OSError as error:
            text = "rlskip: %s cannot be listed: %s; it counts as empty"
            logger.warning(text, self.directory, error)
            return Listed()
        is_settled = changed is not None and time.time() - changed / 1e9 > _TICK_S
        listed = Listed(changed, math.inf if is_settled else time.monotonic() + _TICK_S)
        for place in places_among(self.directory, (name for name in names if names[name])):
            listed.dumps.setdefault(place.step, []).append(place)
        for place in places_among(self.directory, map(name_before_quarantine, names)):
            listed.bad.setdefault(place.step, []).append(place)
        self._listed = listed  # as a whole: other threads read it
        return listed

    def _changed(self) -> int | None:
        with contextlib.suppress(OSError):
            return os.stat(self.directory).st_mtime_ns
        return None
