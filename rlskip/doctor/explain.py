"""`rlskip doctor -- COMMAND`: what a command would skip, from the config that it composes."""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import attrs
from omegaconf import DictConfig

from rlskip._hydra import sets_own_key
from rlskip.config.check import look_up
from rlskip.config.facts import HostFacts, Origin, retire_legacy_flag
from rlskip.config.nodes import add_callback, find_node, read_record, record_chosen_by
from rlskip.config.settings import SkipSettings, read_skip, why_off
from rlskip.config.skip import RoleConfig, role_configs, to_generate
from rlskip.config.steps import compact
from rlskip.doctor import ERROR, NOTE, OK, WARNING, Finding
from rlskip.doctor.command import CannotComposeError, Command, compose
from rlskip.doctor.environment import dump_dir_finding
from rlskip.errors import RlskipError
from rlskip.hosts.verl.facts import is_verls
from rlskip.hosts.verl.handshake import attached_by
from rlskip.hosts.verl.no_engine import problems
from rlskip.hosts.verl.trainer_config import judge
from rlskip.runs.opened import Run
from rlskip.skip.preflight import preflight, unusable
from rlskip.skip.role import Role
from rlskip.skip.roles import make_roles
from rlskip.skip.said import chosen_by

CALLBACK = "rlskip.hooks.SkipCallback"

_SHOWN_STEPS = 100_000
_OTHERS = 8  # jobs of a multirun that are composed, if the first skips nothing


def explain(command: Sequence[str]) -> list[Finding]:
    """What is found of the command, and of the dumps that it would use."""
    try:
        split, config = _composed(command)
    except CannotComposeError as error:
        return [Finding("config", ERROR, error.what, error.remedy)]
    settings, about = _settings(config)
    settings = _started_by(split, settings)
    roles = settings.roles
    findings = [*_sweep(config, split), *_wiring(config, split, bool(roles)), *about]
    try:
        if "rollout" in roles and split.multirun and _has_callback(config):
            retire_legacy_flag(config, reaches_task=False)
        if roles and is_verls(config):
            judge(config.copy(), settings, split.module)
    except RlskipError as error:
        findings.append(_refusal("verl", error))
    try:
        instances = make_roles(roles, settings.facts)
    except RlskipError as error:
        return [*findings, _refusal("skip", error)]
    for skip in instances.values():
        findings += _role(skip, settings.facts)
    findings += _engine(settings, instances) if roles else ()
    dump_dirs = sorted({Path(str(role.dump_dir)) for role in roles.values()})
    return [*findings, *map(dump_dir_finding, dump_dirs)]


def directory_of(command: Sequence[str]) -> Path:
    """The directory in which the rollouts of a command are looked for; it is not run."""
    split, config = _composed(command)
    settings = _started_by(split, read_skip(config))
    for name, skip in make_roles(settings.roles, settings.facts).items():
        if name.startswith("rollout") and skip.dumps is not None:
            return skip.dumps.directory
    what = "the command skips no rollouts"
    raise CannotComposeError(what, " ".join(command), "add an option: +skip=rollout_cache")


def _composed(command: Sequence[str]) -> tuple[Command, DictConfig]:
    """A command taken apart, and its config; of a multirun those of the first job that skips."""
    split = Command.parse(command)
    config = compose(split)
    params = look_up(config, "hydra.sweeper.params") or {}
    if (split.multirun and params) or str(look_up(config, "hydra.mode")).endswith("MULTIRUN"):
        split = Command.parse(command, [f"{key}={value}" for key, value in params.items()])
        config = compose(split)
    for other in itertools.islice(split.others(_groups(config)), _OTHERS):
        if chosen_by(config) or record_chosen_by(config):
            break
        split, config = other, compose(other)
    return split, config


def _groups(config: DictConfig) -> set[str]:
    """The groups of which a job chose an option."""
    choices = look_up(config, "hydra.runtime.choices") or {}
    return {str(key).partition("@")[0] for key in choices}


def _started_by(command: Command, settings: SkipSettings) -> SkipSettings:
    """The settings of a run that has the origin of the command, and not of this process."""
    name = Origin.of(settings.facts.config).name
    origin = attrs.evolve(Origin.at(command.script), name=name)
    return attrs.evolve(settings, facts=attrs.evolve(settings.facts, origin=origin))


def _refusal(topic: str, error: RlskipError) -> Finding:
    where = f"{error.where}: " if error.where else ""
    return Finding(topic, ERROR, where + error.what.replace("\n", " "), error.remedy)


def _sweep(config: DictConfig, command: Command) -> Iterator[Finding]:
    """Whether Hydra drops the callback, because a swept choice brings it."""
    choices = look_up(config, "hydra.runtime.choices") or {}
    if command.multirun:
        swept = [one for values in command.swept.values() for one in values]
        job = ", ".join(word for word in command.arguments if word in swept)
        yield Finding("command", NOTE, f"a multirun: one job is explained, {job or 'the first'}")
    groups = command.swept.keys() & _groups(config)
    if not (groups and _has_callback(config)):
        return
    # Hydra builds the callbacks of a multirun from the command without what is swept.
    try:
        unswept = compose(attrs.evolve(command, arguments=[*command.unswept]))
        level, loses = ERROR, not _has_callback(unswept)
    except CannotComposeError:  # then it is not known what brings the callback
        level, loses = WARNING, "rlskip" not in str(choices.get("hydra/callbacks"))
    if loses:
        what = f"{', '.join(sorted(groups))} is swept: Hydra drops a callback that comes with it, "
        what += "and each job refuses" if "skip" in config else "and nothing is recorded"
        yield Finding("sweep", level, what, add_callback(config))


def _has_callback(config: DictConfig) -> bool:
    callbacks = look_up(config, "hydra.callbacks") or {}
    return CALLBACK in [look_up(callback, "_target_") for callback in callbacks.values()]


def _wiring(config: DictConfig, command: Command, on: bool) -> Iterator[Finding]:
    """Plug-in and callback, as that command's own Hydra sees them."""
    version = look_up(config, "hydra.runtime.version")
    sources = look_up(config, "hydra.runtime.config_sources") or []
    if not any(source.get("provider") == "rlskip" for source in sources):
        if sets_own_key(command.arguments):  # then rlskip hides from Hydra, and `skip` says why
            return
        what = f"the Hydra {version} of that command does not discover rlskip's plug-in"
        remedy = f"install rlskip into the environment of {command.start[0]}"
        yield Finding("plug-in", ERROR, what, remedy)
        return
    yield Finding("plug-in", OK, f"discovered by that command's Hydra {version}")
    if _has_callback(config):
        yield Finding("callback", OK, f"{CALLBACK} starts and ends the job")
    elif on and is_verls(config) and (way := attached_by()):
        what = f"none, so there is no summary; verl's processes load rlskip by {way}"
        yield Finding("callback", NOTE, what)
    elif on:
        what = "hydra.callbacks has no rlskip: nothing would install SkipManager"
        remedy = f"{add_callback(config)}, or choose an option (+skip=rollout_cache) instead of "
        remedy += "single keys; or call SkipManager.init(cfg) in the application"
        yield Finding("callback", ERROR, what, remedy)


def _settings(config: DictConfig) -> tuple[SkipSettings, list[Finding]]:
    """The settings of `skip`, and why no role or not every chosen one is on."""
    ours, known = config.copy(), {field.name for field in dataclasses.fields(RoleConfig)}
    try:
        # Roles whose class only the application's own code registers: they have other keys.
        foreign = [
            role
            for role, value in (find_node(config, "skip") or {}).items()
            if isinstance(value, Mapping) and value.get("enable") is True
            if role not in role_configs() and value.keys() - known
        ]
        for role in foreign:
            del ours.skip[role]
        settings = read_skip(ours)
        read_record(ours if record_chosen_by(ours) else None)
    except RlskipError as error:
        return SkipSettings(HostFacts(config)), [_refusal("skip", error)]
    said = [
        Finding("skip", NOTE, f"role {name} is the application's own; its dumps are not looked at")
        for name in foreign
    ]
    if settings.roles or not foreign:
        level = WARNING if settings.roles else ERROR
        said += [Finding("skip", level, f"{p.key}: {p.what}", p.remedy) for p in why_off(settings)]
    return settings, said


def _role(skip: Role, facts: HostFacts) -> Iterator[Finding]:
    name, role = skip.role, skip.local_config
    on = f"on: {role.action} at steps {role.steps}"
    if skip.dumps is None:  # its class keeps what it replays
        yield Finding(name, OK, on)
        return
    directory = skip.dumps.directory
    yield Finding(name, OK, f"{on}; {directory}")
    dumps = Run(directory).dumps()
    if bad := ", ".join(dump.name for dump in dumps if dump.problem is not None):
        yield Finding(name, WARNING, f"unusable: {bad}", "run rlskip verify to see why")
    # The listed steps among those of the run, where they are known, and those dumped.
    steps = {dump.step for dump in dumps}
    if 0 < len(facts.steps) <= _SHOWN_STEPS:
        steps |= set() if skip.serves_validation else {*facts.steps}
        steps = {step for step in steps if step <= facts.steps[-1]}
    listed = sorted(step for step in steps if step in role.steps)
    why_not = unusable(skip, listed, facts.called_with.get(name, {}))
    replayed = [step for step in listed if step not in why_not]
    if role.action == "repeat" and replayed:
        there = compact(sorted({dump.step for dump in dumps} & {*listed}))
        what = f"steps {compact(listed)} would be replayed from the dumps of {there}"
        yield Finding(name, OK, what if there else "replayed from another step's dump")
        return
    reasons = {why: [s for s in sorted(why_not) if why_not[s] == why] for why in why_not.values()}
    missing = reasons.pop("", [])
    # Where the job would end: it replays no step after that.
    fatal = ("were made",) if role.on_mismatch == "error" else ()
    fatal = ("",) if role.on_miss == "error" else fatal
    ends = {reason: steps[0] for reason, steps in reasons.items() if reason.startswith(fatal)}
    replayed = [step for step in replayed if step < min(ends.values(), default=step + 1)]
    if replayed:
        what = f"steps {compact(replayed)} have dumps and would be replayed, if prompts and "
        yield Finding(name, OK, f"{what}arguments are the same (they are compared as the job runs)")
        for dump in dumps:
            if dump.step in replayed and dump.problem is None:
                for severity, changes in skip.dumps.notices.changes(dump.full_meta(), directory):
                    level = WARNING if severity == logging.WARNING else NOTE
                    yield Finding(name, level, changes)
    elif role.on_miss == "generate" and not reasons:
        yield Finding(name, NOTE, "no dump yet: the listed steps are generated")
    for reason, those in reasons.items():
        then = "the job would end there" if reason in ends else "they are generated again"
        level = ERROR if reason in ends else WARNING
        yield Finding(name, level, f"the dumps of steps {compact(those)} {reason}: {then}")
    if role.on_miss == "generate" and missing and replayed:
        yield Finding(name, NOTE, f"steps {compact(missing)} would be generated and dumped")
    if role.on_miss == "error" and not listed and not skip.serves_validation:
        what = "on_miss=error, and the job would end at the first step: no dump"
        yield Finding(name, ERROR, what, f"generate it once with {to_generate(name, role)}")


def _engine(settings: SkipSettings, roles: Mapping[str, Role]) -> Iterator[Finding]:
    """Whether an inference engine is started, and what the job would need one for."""
    starts, verls = settings.start_engine, is_verls(settings.facts.config)
    if verls:
        found = problems(settings, roles)
    else:
        found = preflight(roles, settings.facts, engine=starts, here=False)
    for problem in found:
        yield Finding("engine", ERROR, f"{problem.key}: {problem.what}", problem.remedy)
    if not starts:
        then = ": the job refuses to start" if found else ""
        yield Finding("engine", NOTE if found else OK, f"no inference engine will be started{then}")
    elif verls:
        said = "an inference engine will be started: skip.start_engine is true"
        yield Finding("engine", NOTE, said)
