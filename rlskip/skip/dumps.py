"""A role's directory of dumps: what they record, which calls are the same, what was random."""

from __future__ import annotations

import contextlib
import functools
import logging
import random
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import attrs
import numpy as np
import torch

from rlskip._version import __version__
from rlskip.batch.columns import column_length, columns_of
from rlskip.batch.fields import drop_fields, field_names, score_fields
from rlskip.batch.meta import meta_of
from rlskip.batch.row_fields import RowFields, RowsError
from rlskip.batch.rows import RecordError, RowColumns
from rlskip.config.facts import HostFacts
from rlskip.config.origin import Origin
from rlskip.config.skip import TRAINING_ROLES, VALIDATION_ROLE, as_given, to_generate
from rlskip.errors import ConfigError, MismatchError
from rlskip.format.prompt_digests import digest_of_batch
from rlskip.jobs.records import job_id
from rlskip.skip.arguments import NEUTRAL_META, Arguments, plain_entries
from rlskip.skip.call import Call, Stage
from rlskip.skip.hidden import FirstValues
from rlskip.skip.notices import Notices, flat_config, holds_time, keep_config, value_in
from rlskip.skip.prompt_rows import PromptRows, rows_per_prompt
from rlskip.skip.step_calls import Key
from rlskip.store import (
    CorruptDumpError,
    DumpMeta,
    Identity,
    StepStore,
    UnsupportedTypeError,
    run_directory,
)
from rlskip.store.comparable import ABSENT, canonical, comparable, differences
from rlskip.store.index import PROMPTS, ROWS_PER_PROMPT
from rlskip.store.layout import role_directory

#: In ``skip.identity``: the code of the stage.
_CODE = "code"


class Dumps:
    """What a role keeps: where, with what, and for which calls.

    Parameters
    ----------
    role, local_config
        The role's name and its complete config.
    facts
        What the host says of the run.
    shard
        The rank whose shards these are, and the number of ranks. It is asked when the store is
        first used: a job starts before torch.distributed knows its ranks.

    Attributes
    ----------
    directory
        Where the dumps are.
    is_named_by_time
        Whether no later run will have the name of this one.
    conditions
        The part of the identity that the config decides.
    notices
        What is logged of these dumps.
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
        # A host without such a number still gets its own directory.
        shape = (x if x is not None else "any" for x in (c.gbs, c.n, c.prompt_len, c.response_len))
        origin = facts.origin or Origin.of(facts.config)
        experiment = origin.name if c.experiment_name is None else c.experiment_name
        project = origin.project if c.project_name is None else c.project_name
        self.directory = run_directory(c.dump_dir, experiment, project, *shape)
        # Who names the run shares its dumps on purpose.
        self._place = origin.place if c.experiment_name is None else None
        if role not in TRAINING_ROLES:
            self.directory = role_directory(self.directory, role)
        # Read now, as the config is copied now: rlskip may change the config later.
        self.conditions = self._read_conditions()
        self._config = flat_config(facts.config)
        self.notices = Notices(role, c, facts, self.directory, self._config)
        self.is_named_by_time = holds_time(facts.config, self._config, experiment)
        if self.is_named_by_time:
            self.notices.once(
                "time", "the experiment's name, %s, has the time in it (${now:}), so no later run "
                "finds its dumps; set skip.experiment_name=NAME", experiment,
            )  # fmt: skip
        self._shard = shard
        self._first: dict[str, FirstValues] = {}

    @functools.cached_property
    def store(self) -> StepStore:
        rank, world_size = self._shard()
        return self.store_at(
            self.directory,
            rank=rank,
            world_size=world_size,
            keep_last=self.local_config.keep_last,
        )

    def store_at(self, directory: Path, **options: Any) -> StepStore:
        """A store of the role's whose metas have what ``skip.identity`` names now.

        A dump that was made before a key was named has its value in the config that is kept with
        it.
        """

        def complete(meta: DumpMeta) -> DumpMeta:
            made, compared = meta.identity, self.conditions.compared
            keys = self.local_config.identity or ()
            lacking = [k for k in keys if made is not None and f"config.{k}" not in made.compared]
            kept = self.notices.kept_config(meta, directory) if lacking else {}
            known = {}
            for key in lacking:
                then, now = (value_in(config, key) for config in (kept, self._config))
                if then is not ABSENT:
                    name = f"config.{key}"
                    known[name] = compared.get(name) if canonical(then) == canonical(now) else then
            return meta if made is None else attrs.evolve(meta, identity=made.adding(known))

        most = self.local_config.max_bytes
        return StepStore(directory, complete=complete, max_bytes=most, **options)

    # -- what a dump records -------------------------------------------------------------

    def info(self, call: Call, result: Any) -> dict[str, Any]:
        """What ``meta.json`` of a dump says besides the identity.

        Raises
        ------
        RowsError
            The stage's description does not fit its rows.
        LengthError
            A mask, log-probs or rewards do not fit their tokens.
        """
        info: dict[str, Any] = {"seconds": call.seconds, "job": job_id()}
        fields = self.fields_of(call.stage, result)
        with contextlib.suppress(RecordError):  # it has no tokens
            RowColumns.of(result, fields).refuse_misfits(call.stage.name)
        info |= fields.to_meta()
        if self.facts.tokenizer is not None:
            info["tokenizer"] = str(self.facts.tokenizer)
        if call.awaited:
            info["awaited"] = call.awaited
        if call.prompt_rows is not None:
            info[PROMPTS] = attrs.asdict(call.prompt_rows)
            counts = rows_per_prompt(result, len(call.prompt_rows.digests), call.prompts, fields)
            if isinstance(counts, str):
                self._refuse_by_prompt(counts)
            else:
                info[ROWS_PER_PROMPT] = counts[0] if len({*counts}) == 1 else counts
        else:
            self._refuse_by_prompt("the prompts cannot be told apart")
        if (lacking := call.stage.lacking(result)) and call.needs.is_told:
            info["lacks"] = lacking
        try:
            info["config"] = keep_config(self.directory, self._config)
        except OSError as error:
            self.notices.once("config", "the config cannot be kept with the dumps: %s", error)
        return info

    def fields_of(self, stage: Stage, result: Any) -> RowFields:
        """What the fields of `result` hold; raises RowsError where the stage describes others."""
        columns = columns_of(result).items()
        names = {str(name) for name, column in columns if column_length(column) is not None}
        described = RowFields.of(names, stage.rows(result) if callable(stage.rows) else stage.rows)
        described.refuse_missing(field_names(result))
        return described

    @property
    def by_prompt(self) -> bool:
        """Whether a call may be served prompt by prompt."""
        return bool(self.local_config.match == "prompt")

    def _refuse_by_prompt(self, why: str) -> None:
        if self.by_prompt and self.role != "rollout_tq":
            remedy = f"or set skip.{self.role}.match=step"
            raise RowsError(why, f"skip.{self.role}.match=prompt", remedy)

    @functools.cached_property
    def stores(self) -> dict[str, StepStore]:
        """Where the role's dumps are looked for.

        By the directory of the run, if that has another number of prompts a step: "" is the role's
        own store.
        """
        return {"": self.store, **(self.other_sizes() if self.by_prompt else {})}

    def other_sizes(self) -> dict[str, StepStore]:
        """The dumps of the same run with other numbers of prompts a step."""
        return {name: self.store_at(path) for name, path in self.notices.other_sizes().items()}

    # -- what makes two calls the same ---------------------------------------------------

    def identity_of(self, call: Call) -> Identity:
        """What the call's rollouts depend on.

        Raises
        ------
        UnsupportedTypeError
            The prompts or a value of the stage's identity cannot be compared, and
            ``on_mismatch`` is ``error``. Else the identity has no prompts' hash.
        """
        try:
            made = self.of_call(call, self.arguments_of(call), self.asked_of(call))
            return made.for_prompts(digest_of_batch(call.prompts, call.digests))
        except UnsupportedTypeError as error:
            self.refuse_uncomparable(call.stage.explained(call, error))
            return self.of_call(call)

    def of_call(
        self,
        call: Call,
        arguments: Arguments | None = None,
        asked: Mapping[str, Any] = MappingProxyType({}),
    ) -> Identity:
        """The `conditions` with a call's stage, what it is `asked` for, and its `arguments`."""
        named = {} if call.stage.stage is None else {"stage": call.stage.stage}
        compared = {**self.conditions.compared, **named, **asked}
        if arguments is None:
            return attrs.evolve(self.conditions, compared=compared)
        values = {**arguments.values, **arguments.attributes}
        compared |= {f"arguments.{name}": value for name, value in values.items()}
        noted = {**self.conditions.noted, "defaults": sorted(arguments.usual)}
        if arguments.changing:
            noted["changing"] = arguments.changing
        if (code := call.stage.code) is not None:
            noted["code"] = code
            if _CODE in (self.local_config.identity or ()):
                compared["code"] = code
        return Identity(compared, noted, self._ignored_of(call))

    def _ignored_of(self, call: Call) -> Collection[str]:
        return call.stage.ignored_of(call, self.local_config.ignore or ())

    def arguments_of(self, call: Call) -> Arguments | None:
        """The stage's other arguments that count; None where they are not known."""
        first = self._first.setdefault(call.stage.name, FirstValues())
        arguments = call.stage.arguments_of(call, self._ignored_of(call), first)
        if arguments is not None and call.stage.identity is None:
            self.notices.leave(call.stage.name, arguments.left, arguments.changing)
        return arguments

    def replayed(self, call: Call, meta: DumpMeta, found: Key | str) -> None:
        """Say what is replayed, and learn which attributes change while stages run."""
        now, then = call.identity, meta.identity
        if isinstance(now, Identity) and then is not None:
            changing = {name for name in then.changing if f"arguments.{name}" in now.compared}
            if changing:
                self._first[call.stage.name].changing |= changing
            if call.stage.identity is None:
                self.notices.leave(call.stage.name, {}, changing)
        self.notices.replayed(call.step, meta, found)

    def asked_of(self, call: Call) -> dict[str, Any]:
        """What the call adds to the identity: the stage's own, and what the prompts' meta asks for.

        A host may ask for other sampling there, for a greedy baseline, say.
        """
        asked, known = {}, self.conditions.compared
        for name, value in plain_entries(meta_of(call.prompts), NEUTRAL_META).items():
            usual = known.get(name if name == "n" else f"sampling.{name}")
            if value is not None and differences(name, value, usual):
                asked[f"meta_info.{name}"] = value
        for name, value in call.stage.identity_of(call.args, call.kwargs).items():
            asked[f"identity.{name}"] = comparable(value, f"identity.{name}")
        return asked

    def _read_conditions(self) -> Identity:
        c, facts = self.local_config, self.facts
        sampling = dict(facts.val_shaping if self.role == VALIDATION_ROLE else facts.shaping)
        # Plain text: torch's own kind of string parses both sides whenever it is compared.
        versions = {"rlskip": __version__, "torch": str(torch.__version__)}
        if facts.engine is not None:  # another one is logged as a warning, as a version is
            versions["engine"] = str(facts.engine)
        where = f"skip.{self.role}.identity"
        return Identity.of(
            {
                "role": self.role,
                "n": sampling.pop("n", c.n),
                "prompt_len": c.prompt_len,
                "response_len": c.response_len,
                **{f"sampling.{name}": value for name, value in sampling.items()},
                **{
                    f"config.{key}": facts.value_at(key, where)
                    for key in c.identity or ()
                    if key != _CODE
                },
            },
            {
                "model": facts.model,
                **({"place": self._place} if self._place else {}),
                **{f"versions.{name}": v for name, v in versions.items()},
            },
        )

    def differences(self, present: Identity, meta: DumpMeta) -> list[str]:
        """What makes the dump another call's. What is only noteworthy is logged."""
        if meta.identity is None:
            self.notices.once(
                "no-identity", "dumps in %s record no prompts; they are not compared",
                self.directory,
            )  # fmt: skip
            return []
        differs, noteworthy = present.differences(meta.identity)
        if not differs and (place := present.moved_from(meta.identity)):
            what = "the dumps were made in %s, by the same function, and are replayed in %s"
            here = present.noted["place"]
            self.notices.once(f"place {place}", what, place, here, level=logging.INFO)
        code = [line for line in noteworthy if line.startswith("code: ")]
        if others := [line for line in noteworthy if line not in code]:
            what = "; ".join(others)
            self.notices.once(f"noteworthy {what}", "replayed although it differs: %s", what)
        if code:
            name = present.noted["code"].partition(",")[0]
            self.notices.code_changed(name)
        return differs

    def in_words(self, call: Call, found: Key, differs: list[str]) -> list[str]:
        """The lines of `differs`, with how the prompts differ, as far as the dump records them."""
        meta = self.store.read_meta(found.step, found.call)
        now = call.summarize_prompts()
        then = None if meta is None else PromptRows.recorded(meta.info.get(PROMPTS))
        how = now.difference(then, self.facts.tokenizer) if now and then else ""
        if not how:
            return differs
        return [f"prompts: {how}" if line.startswith("prompts: ") else line for line in differs]

    # -- what does not fit ---------------------------------------------------------------

    def refuse_uncomparable(self, error: UnsupportedTypeError) -> None:
        """Raise `error`, by which calls cannot be compared, if ``on_mismatch`` is ``error``."""
        if self.local_config.on_mismatch == "error":
            raise error
        what = f"{error.where}: {error.what}"
        self.notices.once("uncomparable", "calls cannot be compared with dumps: %s", what)

    def reject(self, what: str, found: Key, hint: str = "", *, replaces: bool = True) -> None:
        """Refuse the run for `what`, a mismatch of a dump, or let the stage run instead.

        Then the dump is quarantined if what the stage returns `replaces` it.

        Raises
        ------
        MismatchError
            ``on_mismatch`` is ``error``.
        """
        if self.local_config.on_mismatch == "error":
            runs = "runs the stage"
            runs += " and replaces the dump (the old one is quarantined)" if replaces else ""
            raise MismatchError(what, self.path_of(found), self.ways_out(runs, hint))
        if replaces:
            self.store.quarantine(found.step, what, found.call)

    def ways_out(self, regenerates: str, hint: str = "") -> str:
        """What to type after a mismatch: `hint`, a run that `regenerates`, or other names."""
        role, local = self.role, self.local_config
        ways = [hint] if hint else []
        if local.on_miss == "error":
            generate = to_generate(role, local)
            ways.append(f"{generate} skip.{role}.on_mismatch=regenerate {regenerates}")
        else:
            dump_dir = as_given("skip.dump_dir", role, local)
            ways.append(f"skip.{role}.on_mismatch=regenerate {regenerates}")
            ways.append(f"another {dump_dir} or {self.facts.experiment_key} starts from nothing")
        return ways[0] if len(ways) == 1 else f"choose one: {'; '.join(ways)}"

    def path_of(self, found: Key) -> str:
        """Where a dump is, for messages."""
        return str(self.stores[found.size].directory / found.path)

    def check_fields(
        self, rollouts: Any, meta: DumpMeta, call: Call, found: Key, *, replaces: bool = True
    ) -> None:
        """Apply ``on_mismatch`` to a dump, `found`, without fields that this run needs.

        A field that the stage itself did not return when the run that made the dump needed it
        does not count, because generating again would not help.
        """
        never = meta.info.get("lacks")
        never = never if isinstance(never, list) else []
        lacking = [name for name in call.stage.lacking(rollouts) if name not in never]
        if lacking:
            what = f"the dump of {found} lacks what this run needs: {', '.join(lacking)}"
            self.reject(what, found, replaces=replaces)
            if replaces and found.step == call.step:
                call.replaces = found.call  # as a mismatch: what is generated has its name
            call.again += f"-{meta.checksum}"  # its sessions in a journal lack it, too
            raise CorruptDumpError(what, self.path_of(found))

    def without_dropped(self, rollouts: Any) -> Any:
        """`rollouts` without the fields that ``drop_fields`` names."""
        unwanted = self.local_config.drop_fields or []
        kept = drop_fields(rollouts, unwanted)
        self.notices.dropped(unwanted, field_names(rollouts), score_fields(kept))
        return kept


def seconds_saved(metas: Iterable[DumpMeta], loading: float) -> float:
    """What the stage took to make the dumps, less the time to load them; 0 where not known."""
    took = sum(meta.info.get("seconds", 0.0) for meta in metas)
    return took - loading if took else 0.0


# -- the global random generators ----------------------------------------------------------


def capture_rng() -> dict[str, Any]:
    """States of the global python, numpy and torch generators (CUDA's too, where in use).

    Returns plain data: ints, strings, and uint8/uint32 arrays and tensors.
    """
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": {"version": version, "words": np.array(words, dtype=np.int64), "gauss": gauss},
        "numpy": {
            "name": name,
            "keys": keys,
            "position": int(position),
            "has_gauss": int(has_gauss),
            "cached": float(cached),
        },
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
    }


def restore_rng(states: dict[str, Any] | None) -> None:
    """Put the generators where :func:`capture_rng` found them.

    Raises
    ------
    ConfigError
        The dump has none.
    CorruptDumpError
        They are not states of generators; those of this process are as they were.
    """
    if states is None:
        raise ConfigError(
            "the dump has no states of the random generators",
            "skip.restore_rng",
            "replay it with skip.restore_rng=false",
        )
    before = capture_rng()
    try:
        _set(states)
    except Exception as error:  # a file's values may be anything
        _set(before)
        raise CorruptDumpError("it does not hold states of the random generators") from error


def check_rng(states: dict[str, Any] | None) -> None:
    """Raise what :func:`restore_rng` would; the generators stay where they are."""
    before = capture_rng()
    restore_rng(states)
    _set(before)


def _set(states: dict[str, Any]) -> None:
    python, np_state = states["python"], states["numpy"]
    words = tuple(int(word) for word in python["words"])
    random.setstate((python["version"], words, python["gauss"]))
    names = ("name", "keys", "position", "has_gauss", "cached")
    np.random.set_state(tuple(np_state[name] for name in names))
    torch.set_rng_state(states["torch"])
    if states["cuda"] and len(states["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(states["cuda"])
