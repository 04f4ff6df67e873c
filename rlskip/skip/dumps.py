"""A role's directory of dumps: what they record, and what is refused."""

from __future__ import annotations

import contextlib
import functools
import os
import random
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from rlskip.batch.columns import column_length, columns_of, drop_fields, field_names
from rlskip.batch.row_fields import RowFields, RowsError
from rlskip.batch.rows import RecordError, RowColumns
from rlskip.config.check import look_up
from rlskip.config.facts import HostFacts, Origin
from rlskip.config.skip import TRAINING_ROLES, SkipAction, as_given, to_generate
from rlskip.errors import ConfigError, MismatchError
from rlskip.format.fingerprint import canonical
from rlskip.jobs.records import job_id
from rlskip.jobs.served import ledger_of
from rlskip.skip.call import Call, Stage
from rlskip.skip.identities import Identities
from rlskip.skip.kept_config import FOLDER, flat_config, holds_time, keep_config, value_in
from rlskip.skip.names import seems_to_shape
from rlskip.skip.notices import Notices
from rlskip.skip.prompt_rows import rows_per_prompt
from rlskip.skip.run_dumps import Group, RunDumps
from rlskip.store import CorruptDumpError, DumpMeta, StepStore, run_directory
from rlskip.store.identity import ABSENT
from rlskip.store.index import PROMPTS, ROWS_PER_PROMPT
from rlskip.store.layout import Place, refuse_links

_FITTING = frozenset({"attention", "prompt_mask", "mask", "log_probs", "reward"})
"""What has a value for each token."""


class Dumps:
    """What a role keeps: where, with what, and for which calls.

    `shard`, the rank and the number of ranks, is asked when the store is first used: a job starts
    before torch.distributed knows its ranks. If ``is_named_by_time``, no later run has this name.
    """

    def __init__(
        self,
        role: str,
        local_config: Any,
        facts: HostFacts,
        shard: Callable[[], tuple[int, int]] = lambda: (0, 1),
    ) -> None:
        c = local_config
        self.role, self.local_config, self.facts = role, c, facts
        self.by_prompt: bool = c.match == "prompt"
        self.repeats: bool = c.action == SkipAction.REPEAT
        # A host without such a number still gets its own directory.
        shape = (x if x is not None else "any" for x in (c.gbs, c.n, c.prompt_len, c.response_len))
        origin = facts.origin or Origin.of(facts.config)
        experiment = origin.name if c.experiment_name is None else c.experiment_name
        project = origin.project if c.project_name is None else c.project_name
        self.directory = run_directory(c.dump_dir, experiment, project, *shape)
        if role not in TRAINING_ROLES:
            self.directory /= role
            refuse_links(self.directory)
        self.ledger = ledger_of(self.directory)
        self.run = RunDumps(self)
        self._config = flat_config(facts.config)
        self._kept: str | None = None  # the name under which the run's directory has it
        self.notices = Notices(role, c, facts, self.directory, self._config)
        names = {"experiment_name": experiment, "project_name": project, "dump_dir": c.dump_dir}
        given = {as_given(f"skip.{key}", role, c): value for key, value in names.items()}
        if look_up(facts.config, next(iter(given))) is None:  # it is the host's
            given |= dict.fromkeys((facts.experiment_key, "hydra.job.name"), experiment)
        timed = [key for key in given if holds_time(facts.config, key)]
        self.is_named_by_time = bool(timed)
        for key in timed:
            what = "%s, %s, has the time in it (${now:}), so no later run finds its dumps"
            self.notices.once("time", f"{what}; name one without it", key, given[key])
        # Who names the run shares its dumps on purpose.
        place = origin.place if c.experiment_name is None else None
        self.identities = Identities(role, c, facts, place, self.notices)
        self._shard = shard

    @functools.cached_property
    def store(self) -> StepStore:
        rank, ranks = self._shard()
        keep_last = self.local_config.keep_last
        return self.store_at(self.directory, rank=rank, world_size=ranks, keep_last=keep_last)

    def store_at(self, directory: Path, **options: Any) -> StepStore:
        """A store of the role's whose metas have what ``skip.identity`` names now."""
        if self.local_config.identity:
            options["complete"] = functools.partial(self._completed, directory)
        return StepStore(directory, **{"max_bytes": self.local_config.max_bytes, **options})

    def _completed(self, directory: Path, meta: DumpMeta) -> DumpMeta:
        """Made before a key was named, a dump has the value in the config that is kept with it."""
        keys, made, known = self.local_config.identity, meta.identity, {}
        lacking = [k for k in keys if made is not None and f"config.{k}" not in made.compared]
        if made is None or not lacking:
            return meta
        kept = self.notices.kept_config(meta, directory)
        for key in lacking:
            then, now = (value_in(config, key) for config in (kept, self._config))
            if then is not ABSENT:
                name, given = f"config.{key}", self.identities.conditions.compared
                known[name] = given.get(name) if canonical(then) == canonical(now) else then
        return attrs.evolve(meta, identity=made.adding(known))

    def info(self, call: Call, result: Any) -> dict[str, Any]:
        """What ``meta.json`` of a dump says besides the identity.

        Raises RowsError where the stage's description does not fit its rows, or where calls are
        served prompt by prompt and it is not known which rows are which prompt's; LengthError
        where a mask, log-probs or rewards do not fit their tokens.
        """
        info: dict[str, Any] = {"seconds": call.seconds, "job": job_id()}
        fields, described = _fields_of(call.stage, result)
        info |= described
        if not _FITTING.isdisjoint(*described.values()):
            with contextlib.suppress(RecordError):  # it has no tokens
                RowColumns.of(result, fields).refuse_misfits(call.stage.name)
        if self.facts.tokenizer is not None:
            info["tokenizer"] = str(self.facts.tokenizer)
        lacks, is_told = call.stage.lacks, call.needs.is_told
        if lacks and (lacking := lacks(result)) and is_told:
            info["lacks"] = list(lacking)
        if not call.is_observed:  # else its prompts are those of another call
            counts: list[int] | str = "the prompts cannot be told apart"
            if (prompts := call.prompt_rows) is not None:
                info[PROMPTS] = attrs.asdict(prompts)
                counts = rows_per_prompt(result, prompts.digests, call.prompts, fields)
            if not isinstance(counts, str):
                info[ROWS_PER_PROMPT] = counts[0] if len({*counts}) == 1 else counts
            elif self.by_prompt:
                remedy = f"or set skip.{self.role}.match=step"
                raise RowsError(counts, f"skip.{self.role}.match=prompt", remedy)
        try:
            if self._kept is None or not os.path.isdir(self.directory / FOLDER):
                self._kept = keep_config(self.directory, self._config)
            info["config"] = self._kept
        except OSError as error:
            self.notices.once("config", "the config cannot be kept with the dumps: %s", error)
        return info

    @functools.cached_property
    def stores(self) -> dict[Path, StepStore]:
        """Where the role's dumps are looked for, by their directories: first its own store."""
        return {store.directory: store for store in (self.store, *self.other_sizes())}

    def other_sizes(self) -> list[StepStore]:
        """The directories of the run with other numbers of prompts a step.

        None unless calls are served prompt by prompt.
        """
        siblings = self.notices.siblings() if self.by_prompt else ()
        return [self.store_at(path) for _, path, differs in siblings if {*differs} == {"gbs"}]

    def reject(self, what: str, found: Place, hint: str = "", *, replaces: bool = True) -> None:
        """Raise MismatchError for `what` if ``on_mismatch`` is ``error``; else the stage runs.

        Then the dump is quarantined if what the stage returns `replaces` it.
        """
        if self.local_config.on_mismatch == "error":
            runs = "runs the stage"
            runs += " and replaces the dump (the old one is quarantined)" if replaces else ""
            raise MismatchError(what, str(found.directory), self.ways_out(runs, hint))
        if replaces:
            self.store.quarantine(found.step, what, found.call)

    def reject_group(self, odd: Group, differs: Sequence[str], *, replaces: bool = False) -> str:
        """As :meth:`reject`, for a group that `differs` in this from a call; returns the reason."""
        what = f"the dump of step {odd.key.step} was made for another call: {'; '.join(differs)}"
        self.reject(what, odd.key, self.ignoring(differs), replaces=replaces)
        return what

    def ignoring(self, differs: Iterable[str]) -> str:
        """How to say that what differs does not count; empty if it seems to shape rollouts."""
        places = [line.partition(": ")[0] for line in differs]
        names = [place.removeprefix("arguments.") for place in places]
        for place, name in zip(places, names, strict=True):
            if place == name or seems_to_shape(name) or not re.fullmatch(r"[\w.]+", name):
                return ""
        typed = self.notices.typed("skip.ignore")
        return f"'{typed}=[{','.join(names)}]' says that it does not count"

    def ways_out(self, regenerates: str, hint: str = "") -> str:
        """What to type after a mismatch: `hint`, a run that `regenerates`, or other names."""
        role, local = self.role, self.local_config
        ways = [hint, f"skip.{role}.on_mismatch=regenerate {regenerates}"]
        if local.on_miss == "error":
            ways[1] = f"{to_generate(role, local)} {ways[1]}"
        else:
            dump_dir = as_given("skip.dump_dir", role, local)
            ways.append(f"another {dump_dir} or {self.facts.experiment_key} starts from nothing")
        ways = [way for way in ways if way]
        return ways[0] if len(ways) == 1 else f"choose one: {'; '.join(ways)}"

    def load(self, call: Call, found: Any) -> tuple[Any, Any]:
        """The rollouts that serve the call, and the generators' states.

        Raises DumpError where a dump is unusable.
        """
        if not isinstance(found, Place):
            return self.run.load(call, found), None
        meta = call.meta
        part = ("rollouts", "aside") if self.local_config.restore_rng else ("rollouts",)
        with call.timed():
            rollouts, *states = self.store.load(found.step, call=found.call, meta=meta, part=part)
            rollouts = self.usable(rollouts, meta, call, found)
        call.is_served(found.step, self.store.size_of(meta), meta.info.get("seconds", 0.0))
        call.facts["call"] = found.call
        return rollouts, states[0] if states else None

    def usable(self, rollouts: Any, meta: DumpMeta, call: Call, found: Place) -> Any:
        """The rollouts of a dump, `found`, without the fields that are dropped.

        Without fields that this run needs ``on_mismatch`` applies to it, or CorruptDumpError. What
        the stage did not return when it was needed then does not count: nor would it now.
        """
        lacks, never = call.stage.lacks, meta.info.get("lacks")
        never = never if isinstance(never, list) else []
        if lacks and (lacking := [one for one in lacks(rollouts) if one not in never]):
            what = f"the dump of {found} lacks what this run needs: {', '.join(lacking)}"
            self.reject(what, found, replaces=found.root == self.directory)
            if found == call.found and found.step == call.step:
                call.replaces = found.call  # as a mismatch: what is generated has its name
            call.again += f"-{meta.checksum}"  # its sessions in a journal lack it, too
            raise CorruptDumpError(what, str(found.directory))
        unwanted = self.local_config.drop_fields or []
        kept = drop_fields(rollouts, unwanted) if unwanted else rollouts
        if self.notices.is_new("fields"):  # the stage's other dumps have the same
            self.notices.dropped(unwanted, rollouts, kept)
        return kept


def _fields_of(stage: Stage, result: Any) -> tuple[RowFields, dict[str, Any]]:
    """What the fields of `result` hold, and what a meta says of that; or RowsError."""
    names = []
    for name, column in columns_of(result).items():
        if column_length(column) is not None:
            names.append(str(name))
    if stage.rows is None:
        return _described(*names)
    fields = RowFields.of(names, stage.rows(result) if callable(stage.rows) else stage.rows)
    fields.refuse_missing(field_names(result))
    return fields, fields.to_meta()


@functools.lru_cache(1 << 6)
def _described(*names: str) -> tuple[RowFields, dict[str, Any]]:  # most results have the same
    fields = RowFields.of(names)
    return fields, fields.to_meta()


# -- the states of the global random generators, as they were after a stage ----------------------


def capture_rng() -> dict[str, Any]:
    """States of the global python, numpy and torch generators (CUDA's too, where in use)."""
    import torch  # here and below: a job that starts without a call needs none

    version, words, gauss = random.getstate()
    of_numpy: dict[str, Any] = np.random.get_state(legacy=False)
    inner = {name: np.asarray(part).tolist() for name, part in of_numpy["state"].items()}
    return {
        "python": [version, list(words), gauss],
        "numpy": {**of_numpy, "state": inner},
        "torch": torch.get_rng_state().numpy().tobytes(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
    }


def restore_rng(states: dict[str, Any] | None) -> None:
    """Put the generators where :func:`capture_rng` found them.

    Raises ConfigError where the dump has none, and CorruptDumpError where they are something else.
    """
    if states is None:
        raise ConfigError(
            "the dump has no states of the random generators",
            "skip.restore_rng",
            "replay it with skip.restore_rng=false",
        )
    import torch

    try:
        version, words, gauss = states["python"]
        random.setstate((version, tuple(words), gauss))
        np.random.set_state(states["numpy"])
        torch.set_rng_state(torch.frombuffer(bytearray(states["torch"]), dtype=torch.uint8))
        if states["cuda"] and len(states["cuda"]) == torch.cuda.device_count():
            torch.cuda.set_rng_state_all(states["cuda"])
    except Exception as error:  # a file's values may be anything
        raise CorruptDumpError("it does not hold states of the random generators") from error
