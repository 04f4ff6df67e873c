"""The one home of the layout: what is where in a dump_dir, and what names mean.

::

    {dump_dir}/{experiment_name}_{project_name}/GBS{gbs}_N{n}_in{prompt_len}_out{response_len}/
        {step}/gen_batch.dp             meta.json
        {step}/{part}/gen_batch.dp      meta.json            later calls, or the parts of a queue
        {step}/gen_batch.r0-of-2.dp     meta.r0-of-2.json    one pair per rank
        {step}.journal                  finished sessions of a step without a dump
        {step}.bad-{time}-{random}      a quarantined dump; parts and journals likewise
        .work/                          staging directories, marks of readers
        {role}/{step}/...               of every role but those that train share
    {dump_dir}/stages/{job}/{step}/{part}/...   what the stages of a step computed

Whatever is not a dump has a name that is not an integer.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import attrs
import xxhash

from rlskip._files import guard, open_folder
from rlskip.config.dump_dir import parse_dump_dir
from rlskip.errors import ConfigError

_UNSAFE = re.compile(r"[^A-Za-z0-9._=+@,-]")
_MAX_NAME = 120  # two make one name of a directory, which may have 255
_JOURNAL = ".journal"
_BAD = ".bad-"
_SHAPE = re.compile(r"GBS(?P<gbs>.+)_N(?P<n>.+)_in(?P<prompt_len>.+)_out(?P<response_len>.+)")
_SHARD = re.compile(r"gen_batch\.r([0-9]{1,6})-of-([0-9]{1,6})\.dp")
_ROLLOUTS = re.compile(r"gen_batch(\.r[0-9]+-of-[0-9]+)?\.dp")
_META = re.compile(r"meta(\.r[0-9]+-of-[0-9]+)?\.json")

WORK = ".work"

# No run's directory has this name: those contain an underscore.
STAGES = "stages"


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

    ``~`` is expanded; a relative `dump_dir` stays relative. Names are made safe: none leaves
    `dump_dir`, and no two names are changed into the same one.

    Raises
    ------
    ConfigError
        `dump_dir` is a URL or empty, or the directory is reached by a symbolic link below it
        (`dump_dir` itself may be one).
    """
    run = f"{safe_name(experiment_name)}_{safe_name(project_name)}"
    shape = f"GBS{gbs}_N{n}_in{prompt_len}_out{response_len}"
    outermost = parse_dump_dir(dump_dir)
    directory = outermost / run / safe_name(shape)
    refuse_links(directory)
    guard(outermost)
    return directory


def role_directory(run: Path, role: str) -> Path:
    """The directory of a role that has its own below the run's; raises as :func:`run_directory`."""
    directory = run / role
    refuse_links(directory)
    return directory


def stages_directory(dump_dir: str | Path, job: str) -> Path:
    """The directory of what the stages of a job computed; raises as :func:`run_directory`."""
    directory = parse_dump_dir(dump_dir) / STAGES / safe_name(job)
    refuse_links(directory)
    return directory


def shape_of(name: str) -> dict[str, str] | None:
    """What a directory of this name says of its run's batches; None for any other name.

    The keys are ``gbs``, ``n``, ``prompt_len`` and ``response_len``.
    """
    found = _SHAPE.fullmatch(name)
    return found.groupdict() if found else None


def run_name(directory: Path) -> str:
    """A run's directory below the dump_dir: of an experiment, a shape, and maybe a role."""
    levels = 3 if shape_of(directory.parent.name) else 2
    return "/".join(directory.parts[-levels:])


def refuse_links(directory: Path) -> None:
    """Raise ConfigError where one of a run's two directories in a dump_dir is a symbolic link."""
    for path in (directory.parent, directory):
        if os.path.islink(path):
            raise ConfigError(
                f"{path} is a symbolic link; below dump_dir none is followed",
                where="skip.dump_dir",
                remedy="replace it by what it points to, or give a dump_dir that is there",
            )


def safe_name(name: object) -> str:
    """`name` as one path component; a changed one carries a hash of the original.

    >>> safe_name("qwen3-8b"), safe_name("../x")
    ('qwen3-8b', '-x~ade92630f33b')
    """
    text = str(name)
    clean = _UNSAFE.sub("-", text)
    if clean == text and text.strip(".") and len(text) <= _MAX_NAME:
        return text
    tag = xxhash.xxh3_64_hexdigest(text.encode("utf-8", "surrogatepass"))[:12]
    return f"{clean.strip('.')[: _MAX_NAME - 20]}~{tag}"


def as_step(name: str) -> int | None:
    """The step or part that a directory is named after; None for any other name."""
    if name.isascii() and name.isdigit() and (name == "0" or name[0] != "0"):
        return int(name)
    return None


def journal_name(step: int) -> str:
    """The name of the step's journal."""
    return f"{step}{_JOURNAL}"


def journaled_step(name: str) -> int | None:
    """The step whose journal has this name; None for any other name."""
    return as_step(name.removesuffix(_JOURNAL)) if name.endswith(_JOURNAL) else None


def journaled_steps(directory: Path) -> list[int]:
    """The steps that have a journal in a run's directory, ascending; none if it cannot be read."""
    try:
        found = map(journaled_step, os.listdir(directory))
    except OSError:
        return []
    return sorted({step for step in found if step is not None})


def steps_among(names: Iterable[str]) -> list[int]:
    """The steps that directories of a run are named after, or the parts of a step, ascending."""
    return sorted(step for name in names if (step := as_step(name)) is not None)


def quarantine_name(name: str, tag: str | None = None) -> str:
    """A name, not an integer, to keep a bad dump or journal under.

    With a `tag`, a hash of what is kept, the name is the same each time; else it is a new one.
    """
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    return f"{name}{_BAD}{tag or f'{stamp}-{secrets.token_hex(3)}'}"


def name_before_quarantine(name: str) -> str:
    """What a dump, a part or a journal was called that is kept under this name; else empty."""
    before, found, _ = name.partition(_BAD)
    return before if found else ""


def holds_rollouts(names: Iterable[str], *, of_run: bool) -> bool:
    """Whether files of these names are those of a dump.

    A lone ``meta.json`` may be of any program, except in the directory of a run (`of_run`).
    """
    return any(_ROLLOUTS.fullmatch(name) or (of_run and _META.fullmatch(name)) for name in names)


def call_numbers(names: Iterable[str]) -> list[int]:
    """The later calls of a step, ascending, by the names in its directory.

    None where there is a part 0: such parts are those of a queue.
    """
    found = steps_among(names)
    return [] if 0 in found else found


@attrs.frozen
class Place:
    """Where the dump of one step (or of a part of it) is, for one rank.

    Parameters
    ----------
    root
        The run's directory. Below it no symbolic link is followed.
    """

    root: Path
    step: int
    part: int | None = None
    rank: int = 0
    world_size: int = 1

    @property
    def parts(self) -> tuple[str, ...]:
        return (str(self.step),) if self.part is None else (str(self.step), str(self.part))

    @property
    def directory(self) -> Path:
        return self.root.joinpath(*self.parts)

    @property
    def dump(self) -> str:
        return f"gen_batch{self._shard}.dp"

    @property
    def meta(self) -> str:
        return f"meta{self._shard}.json"

    @property
    def _shard(self) -> str:
        return "" if self.world_size == 1 else f".r{self.rank}-of-{self.world_size}"

    def shards(self) -> Iterator[Place]:
        """The same step's places of all ranks."""
        return (attrs.evolve(self, rank=rank) for rank in range(self.world_size))

    def among(self, names: Iterable[str]) -> list[Place]:
        """The places, of one rank or of several, whose dumps have files of these `names`."""
        names = set(names)
        ranks = [(int(m[1]), int(m[2])) for name in names if (m := _SHARD.fullmatch(name))]
        shards = [
            attrs.evolve(self, rank=rank, world_size=size)
            for rank, size in sorted(ranks)
            if rank < size > 1
        ]
        return [self, *shards] if {self.dump, self.meta} & names else shards


def has_dump(directory: Path, step: int) -> bool:
    """Whether a step of a run has files of a dump, its own or a part's, as far as can be read.

    Its directory may be there without one: all of its parts may be quarantined.
    """
    itself = Place(directory, step)
    names = _names_at(itself)
    parts = (attrs.evolve(itself, part=part) for part in steps_among(names))
    return bool(itself.among(names)) or any(part.among(_names_at(part)) for part in parts)


def _names_at(place: Place) -> list[str]:
    with contextlib.suppress(OSError), open_folder(place.root, *place.parts) as folder:
        return folder.names()
    return []
