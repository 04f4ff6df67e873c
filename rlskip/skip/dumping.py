"""What the built-in roles share: a directory of dumps, their identity, their log lines."""

from __future__ import annotations

import functools
import logging
import os
import re
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import Any, ClassVar

import attrs
import torch

from rlskip._human import age, short
from rlskip._nodes import ABOVE, NODES, as_typed
from rlskip._version import __version__
from rlskip.batch.fields import drop_fields, field_names, score_fields
from rlskip.batch.meta import meta_of, plain
from rlskip.config.facts import HostFacts
from rlskip.config.skip import TRAINING_ROLES
from rlskip.errors import MismatchError
from rlskip.jobs.records import job_id
from rlskip.skip import config_copy
from rlskip.skip.call import Call
from rlskip.skip.config_copy import flat_config
from rlskip.skip.role import BaseSkip, SkipAction
from rlskip.skip.visit import Found
from rlskip.store import (
    CorruptDumpError,
    DumpMeta,
    Identity,
    StepStore,
    UnsupportedTypeError,
    fingerprint,
    run_directory,
)
from rlskip.store.layout import as_step, refuse_links

log = logging.getLogger(__name__)

# Sampling parameters that a host may override in the prompts' meta.
_IN_META = ("temperature", "top_p", "top_k", "do_sample", "repetition_penalty", "ignore_eos")
_SHAPE = re.compile(r"GBS(?P<gbs>.+)_N(?P<n>.+)_in(?P<prompt_len>.+)_out(?P<response_len>.+)")
_MAX_CHANGES = 10


class DumpingSkip(BaseSkip):
    """A role with a directory of dumps: what they record, and what is logged of them."""

    takes_facts: ClassVar[bool] = True

    def __init__(self, local_config: Any, facts: HostFacts) -> None:
        super().__init__(local_config, facts.config)
        self.facts = facts
        c = local_config
        # A host without such a number still gets its own directory.
        shape = (x if x is not None else "any" for x in (c.gbs, c.n, c.prompt_len, c.response_len))
        names = (("experiment", c.experiment_name), ("project", c.project_name))
        named = (f"default_{what}_name" if name is None else name for what, name in names)
        self.directory = run_directory(c.dump_dir, *named, *shape)
        if self.role not in TRAINING_ROLES:
            self.directory /= self.role
            refuse_links(self.directory)
        #: The part of the identity that the config decides. It is read now, as the config is copied
        #: now, because rlskip may change the config later.
        self.conditions = self._read_conditions()
        self._config = flat_config(facts.config)
        self._warned: set[str] = set()

    @functools.cached_property
    def store(self) -> StepStore:
        c = self.local_config
        return StepStore(self.directory, keep_last=c.keep_last, max_size=c.max_size)

    # -- what a dump records -------------------------------------------------------------

    def _info(self, call: Call, result: Any) -> dict[str, Any]:
        info: dict[str, Any] = {"seconds": call.seconds, "job": job_id()}
        if lacking := call.stage.lacking(result):
            info["lacks"] = lacking
        try:
            info["config"] = config_copy.keep(self.directory, self._config)
        except OSError as error:
            self._warn_once("config", "the config cannot be kept with the dumps: %s", error)
        return info

    # -- what makes two calls the same ---------------------------------------------------

    def _identity(self, call: Call) -> Identity:
        """What the call's rollouts depend on.

        Raises
        ------
        UnsupportedTypeError
            The prompts or a value of the stage's identity cannot be compared, and
            ``on_mismatch`` is ``error``. Else the identity has no prompts' hash.
        """
        conditions = attrs.evolve(self.conditions, stage=call.stage.stage)
        try:
            return attrs.evolve(
                conditions, prompts_hash=fingerprint(call.prompts), extra=self._extra(call)
            )
        except UnsupportedTypeError as error:
            if self.local_config.on_mismatch == "error":
                raise
            self._warn_uncomparable(error)
            return conditions

    def _extra(self, call: Call) -> dict[str, Any]:
        """What the call adds to the identity: the stage's own, and sampling that it overrides.

        A host may ask for other sampling in the prompts' meta, for a greedy baseline, say.
        """
        meta = meta_of(call.prompts)
        asked = {name: plain(meta[name]) for name in _IN_META if name in meta}
        usual = self.conditions.sampling
        unusual = {k: v for k, v in asked.items() if k not in usual or usual[k] != v}
        return {
            **self.conditions.extra,
            **{f"meta_info.{name}": value for name, value in unusual.items()},
            **call.stage.identity_of(call.args, call.kwargs),
        }

    def _read_conditions(self) -> Identity:
        """The part of the identity that the config decides."""
        c, facts = self.local_config, self.facts
        sampling = dict(facts.val_shaping if self.serves_validation else facts.shaping)
        # Plain text: torch's own kind of string parses both sides whenever it is compared.
        versions = {"rlskip": __version__, "torch": str(torch.__version__)}
        if facts.engine is not None:  # another one is logged as a warning, as a version is
            versions["engine"] = str(facts.engine)
        return Identity(
            role=self.role,
            n=sampling.pop("n", c.n),
            prompt_len=c.prompt_len,
            response_len=c.response_len,
            sampling=sampling,
            extra={k: facts.value_at(k, f"skip.{self.role}.identity") for k in c.identity or ()},
            model=facts.model,
            versions=versions,
        )

    def _differences(self, present: Identity, meta: DumpMeta) -> list[str]:
        """What makes the dump another call's. What is only noteworthy is logged."""
        if meta.identity is None:
            self._warn_once(
                "no-identity", "dumps in %s record no prompts; they are not compared",
                self.directory,
            )  # fmt: skip
            return []
        differs, noteworthy = present.differences(meta.identity)
        if noteworthy:
            self._warn_once("noteworthy", "replayed although it differs: %s", "; ".join(noteworthy))
        return differs

    def _check_fields(self, rollouts: Any, meta: DumpMeta, call: Call) -> None:
        """Apply ``on_mismatch`` to a dump without fields that this run needs.

        A field that the stage itself did not return when the run that made the dump needed it
        does not count, because generating again would not help.
        """
        never = meta.info.get("lacks")
        never = never if isinstance(never, list) else []
        lacking = [name for name in call.stage.lacking(rollouts) if name not in never]
        if lacking:
            found = call.found or Found(meta.step)
            what = f"the dump of {found} lacks what this run needs: {', '.join(lacking)}"
            if not self._accepts(what, found):
                raise CorruptDumpError(what, str(self.directory / str(meta.step)))

    def _accepts(self, what: str, found: Found, hint: str = "") -> bool:
        """Whether `what`, a mismatch of a dump, is ignored; False if the dump is quarantined."""
        if self.local_config.on_mismatch == "ignore":
            self._warn_once("ignored", "%s; replayed anyway (on_mismatch=ignore)", what)
            return True
        if self.local_config.on_mismatch == "regenerate":
            self.store.quarantine(found.step, what, found.part)
            return False
        raise MismatchError(
            what,
            str(self.directory / found.path),
            f"choose one: {hint}skip.{self.role}.on_mismatch=regenerate runs the stage and "
            "replaces the dump (the old one is quarantined); on_mismatch=ignore replays it anyway; "
            f"another skip.dump_dir or {self.facts.key('experiment')} starts from nothing",
        )

    # -- what is logged ------------------------------------------------------------------

    def _log_replay(self, step: int, meta: DumpMeta, found: Found | None = None) -> None:
        found = found or Found(meta.step)
        written = datetime.fromisoformat(meta.created).timestamp()
        source = self.directory / found.path
        made = f"made {age(written)} ago by job {meta.info.get('job', 'unknown')}"
        if found.step == step:
            log.info("rlskip: %s replayed from %s, %s", found, source, made)
        elif self.local_config.action == SkipAction.REPEAT:
            log.info(
                "rlskip: step %d REPEATS %s from %s, %s; its prompts were not checked",
                step, found, source, made,
            )  # fmt: skip
        else:
            log.info(
                "rlskip: a call of step %d replayed from %s of the run (match=run), %s, %s",
                step, found, source, made,
            )  # fmt: skip
        if self.serves_validation:
            what = "replayed validation does not show how the weights have changed since"
        else:
            what = "replayed rollouts are off-policy for the present weights"
        self._warn_once("off-policy", what)
        self._log_changes(meta)

    def _log_changes(self, meta: DumpMeta) -> None:
        """On the first replay, name the keys of the config that changed and are not compared."""
        name, facts = meta.info.get("config"), self.facts
        if "changes" in self._warned or not isinstance(name, str):
            return
        self._warned.add("changes")
        try:
            then = config_copy.read(self.directory, name)
        except (OSError, ValueError) as error:
            log.info("rlskip: role %s: the config of the dump cannot be read: %s", self.role, error)
            return
        compared = {*(self.local_config.identity or ()), "hydra", *NODES, ABOVE}
        changed = [
            key
            for key in config_copy.changed(then, self._config)
            if facts.may_shape(key) and not any(f"{key}.".startswith(f"{one}.") for one in compared)
        ]
        of_rollouts = [key for key in changed if facts.concerns_rollouts(key)]
        others = [key for key in changed if not facts.concerns_rollouts(key)]
        for level, keys, most in (
            (logging.WARNING, of_rollouts, len(of_rollouts)),
            (logging.INFO, others, _MAX_CHANGES),
        ):
            if keys:
                shown = ", ".join(
                    f"{key} ({_short(then.get(key))} then, {_short(self._config.get(key))} now)"
                    for key in keys[:most]
                )
                more = f" and {len(keys) - most} more" if len(keys) > most else ""
                log.log(
                    level,
                    "rlskip: role %s: changed since the dump was made, and not compared: %s%s; "
                    "%s=[%s] compares",
                    self.role, shown, more, as_typed("skip.identity"), keys[0],
                )  # fmt: skip

    def _warn_of_other_shapes(self) -> None:
        """On the first miss, name the run's dumps that another batch size or length hides."""
        if "shapes" in self._warned:
            return
        self._warned.add("shapes")
        ours = self.directory if self.role in TRAINING_ROLES else self.directory.parent
        mine = _SHAPE.fullmatch(ours.name)
        try:
            siblings = sorted(path for path in ours.parent.iterdir() if path != ours)
        except OSError:
            return
        for path in siblings:
            other = _SHAPE.fullmatch(path.name)
            steps = _steps_in(path / self.directory.relative_to(ours)) if other else 0
            if mine and other and steps:
                differs = ", ".join(
                    f"{name} is {mine[name]} now, {other[name]} there"
                    for name in mine.groupdict()
                    if mine[name] != other[name]
                )
                log.warning(
                    "rlskip: role %s: %s has dumps of %d steps, which are not found: %s",
                    self.role, path, steps, differs,
                )  # fmt: skip

    def _without_dropped(self, rollouts: Any) -> Any:
        unwanted = self.local_config.drop_fields or []
        unknown = sorted(set(unwanted) - field_names(rollouts))
        if unknown:
            self._warn_once(
                "unknown-fields", "drop_fields names %s, which the dump does not have; it has %s",
                ", ".join(unknown), ", ".join(sorted(field_names(rollouts))),
            )  # fmt: skip
        rollouts = drop_fields(rollouts, unwanted)
        scores = score_fields(rollouts)
        if scores:
            self._warn_once(
                "scores", "scores are replayed with the rollouts (%s); to compute them again: "
                "%s=[%s]", ", ".join(scores), as_typed("skip.drop_fields"), ",".join(scores),
            )  # fmt: skip
        return rollouts

    def _warn_uncomparable(self, error: UnsupportedTypeError) -> None:
        what = f"{error.where}: {error.what}"
        self._warn_once("uncomparable", "calls cannot be compared with dumps: %s", what)

    def _warn_once(self, topic: str, message: str, *values: Any) -> None:
        if topic not in self._warned:
            self._warned.add(topic)
            log.warning(f"rlskip: role {self.role}: {message}", *values)


def seconds_saved(metas: Iterable[DumpMeta], loading: float) -> float:
    """What the stage took to make the dumps, less the time to load them; 0 where not known."""
    took = sum(meta.info.get("seconds", 0.0) for meta in metas)
    return took - loading if took else 0.0


def _steps_in(directory: Path) -> int:
    try:
        return sum(as_step(name) is not None for name in os.listdir(directory))
    except OSError:
        return 0


def _short(value: Any) -> str:
    return short(repr(value), 40)
