"""Reads the `skip` node of any full config, once, into complete roles.

A role takes each key that is null from the shared keys, and one that is null there from the host.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import attrs

from rlskip.config import skip
from rlskip.config.check import Problem, did_you_mean, look_up, raise_all, read, refuse_own_resolver
from rlskip.config.facts import HostFacts, application_facts
from rlskip.config.nodes import chosen_options, find_node
from rlskip.config.skip import SHARED_KEYS, VALIDATION_ROLE, AttachConfig, RoleConfig, as_given

# Keys of a role that are null take these facts of the host.
_FROM_HOST = {
    "experiment_name": "experiment", "project_name": "project", "gbs": "prompts", "n": "n",
    "prompt_len": "prompt_len", "response_len": "response_len",
}  # fmt: skip

_OF_VERL = {"enable": False, "steps": [], "dump_dir": "~/.verl/rollout_dump", "action": "cache"}


@attrs.frozen(eq=False)
class SkipSettings:
    """The `skip` node of a config, read and checked. What takes a config also takes this."""

    facts: HostFacts  #: only `config` where no role is on
    #: The enabled roles, each complete: ``steps`` is a :class:`Steps`, ``dump_dir`` an absolute
    #: path. Empty when `skip` is absent or switched off.
    roles: dict[str, RoleConfig] = attrs.field(factory=dict)
    attach: dict[str, AttachConfig] = attrs.field(factory=dict)  #: by role the function to attach
    node: dict[str, Any] | None = None  #: the plain `skip` mapping, without verl's own defaults
    start_engine: bool = True  #: whether the host starts its inference engine
    log_metrics: bool = True  #: whether it logs what was replayed

    def gives_match(self, role: str) -> bool:
        """Whether the node says how `role` matches."""
        node = self.node or {}
        return any(place.get("match") is not None for place in (node, node.get(role) or {}))

    def complete(self, facts: HostFacts) -> SkipSettings:
        """These settings for a host: each key of a role that is still null takes its fact."""
        if facts.config is None:
            facts = attrs.evolve(facts, config=self.facts.config)
        roles = {name: copy.copy(role) for name, role in self.roles.items()}
        for name, role in roles.items():
            # Validation goes the way of training, the first role.
            if (next(iter(roles)) if name == VALIDATION_ROLE else name) == "rollout_tq":
                _fill(role, {"gbs": facts.queued_prompts})
            _fill(role, {key: getattr(facts, fact) for key, fact in _FROM_HOST.items()})
            for key in _FROM_HOST:
                refuse_own_resolver(getattr(role, key), f"skip.{key}")
            if name == "rollout" and facts.samples_dynamically and not self.gives_match(name):
                role.match = "run"
        return attrs.evolve(self, facts=facts, roles=roles)


def read_skip(config: Any, facts: HostFacts | None = None) -> SkipSettings:
    """Read the `skip` node of a config; ConfigError names *every* problem, in any of its roles.

    `config` is a full one (a DictConfig, a mapping or a dataclass), a SkipManagerConfig, or
    SkipSettings, which are not read again. Without `facts` those of a plain application count. A
    host that knows its own later passes ``HostFacts()``, then the settings with the facts.
    """
    if isinstance(config, SkipSettings):
        return config if facts is None else config.complete(facts)
    node = find_node(config, "skip", skip.SkipManagerConfig)
    if node is None:
        return SkipSettings(HostFacts(config))
    if str(node.pop("_target_", None)).startswith("verl.utils.skip"):
        for name, value in node.items():  # verl's own defaults do not mean that a user set them
            if isinstance(value, Mapping):
                usual = {**_OF_VERL, "_target_": value.get("_target_")}
                node[name] = {k: v for k, v in value.items() if k not in usual or v != usual[k]}
    whole = {"skip": node} if isinstance(config, skip.SkipManagerConfig) else config
    settings = _read_roles(node, whole)
    return settings.complete(facts or application_facts(config)) if settings.roles else settings


def _read_roles(node: dict[str, Any], config: Any) -> SkipSettings:
    """The settings of `node`, the mapping at ``skip`` in `config`, without a host's facts."""
    problems: list[Problem] = []

    def refuse(key: str, what: str, remedy: str = "") -> None:
        problems.append(Problem(f"skip.{key}", what, remedy))

    for_all = {key: node[key] for key in node if key in SHARED_KEYS}
    shared = read(skip.SkipManagerConfig, for_all, "skip", problems)
    given = {k: node[k] for k in (*skip.BUILT_IN_ROLES, *node) if k in node.keys() - SHARED_KEYS}
    replays_validation = shared.validation == "replay"
    if replays_validation:  # last: its place is the first training role's, whatever their order
        given[VALIDATION_ROLE] = given.pop(VALIDATION_ROLE, None) or {}

    known = skip.role_configs()
    # A mapping under a name of its own is a role that needs no class, unless it looks misspelt.
    bare = [
        name
        for name, value in given.items()
        if isinstance(value, Mapping) and name.isidentifier()
        if not difflib.get_close_matches(name, [*known, "attach"], n=1, cutoff=0.75)
    ]
    configs: dict[str, Any] = {**dict.fromkeys(bare, RoleConfig), **known}
    attach = _read_attach(shared.attach, configs, problems)
    roles: dict[str, RoleConfig] = {}
    for name, value in given.items():
        if name == "skip":
            how = "in a defaults list choose the option as `/skip: OPTION`, without a package"
            refuse(name, "a node inside the node `skip` is not read", how)
            continue
        if name not in configs:
            keys, otherwise = [*SHARED_KEYS, *configs], "docs/keys.md lists all keys"
            role, _, key = name.partition(".")
            nested = f"nest it: {{{role}: {{{key}: {value}}}}}" if role in known and key else ""
            refuse(name, "unknown key", nested or did_you_mean(name, keys, "skip", otherwise))
            continue
        if not isinstance(value, Mapping):
            turns_on = "validation=replay" if name == VALIDATION_ROLE else f"{name}.enable=true"
            refuse(name, f"expected a mapping, got {value!r}", f"set skip.{turns_on}")
            continue
        # Keys of its own need a class.
        register = f"import the module with `@register_skip({name!r}, config=...)` before the job"
        otherwise = f"{register} starts" if name in bare else ""
        role = read(configs[name], value, f"skip.{name}", problems, otherwise=otherwise)
        if name == VALIDATION_ROLE:
            if role.enable and not replays_validation:
                how = "set skip.validation=replay"
                refuse(f"{name}.enable", "skip.validation turns it on", how)
            role.enable = replays_validation
            # It belongs to the run of the role of training.
            training = next((one for one in roles.values() if one.enable), None)
            _fill(role, {key: getattr(training, key, None) for key in ("dump_dir", *_FROM_HOST)})
        roles[name] = role
        problems += _inherit(role, shared, name)
    # What contradicts a shared key was found again in each role that inherits it.
    raise_all(list(dict.fromkeys(problems)))
    on = {name: role for name, role in roles.items() if shared.enable and role.enable}
    if on.keys() == {VALIDATION_ROLE}:  # it goes with what is skipped in training
        on = {}
    starts = shared.start_engine or not on
    return SkipSettings(HostFacts(config), on, attach, node, starts, shared.log_metrics)


def _read_attach(
    node: Mapping[str, Any], roles: Collection[str], problems: list[Problem]
) -> dict[str, AttachConfig]:
    """The function of each of the `roles`; `node` is the mapping at ``skip.attach``."""
    attach: dict[str, AttachConfig] = {}
    attached: dict[str, str] = {}
    for role, entry in node.items():
        at = f"skip.attach.{role}"
        given = entry if isinstance(entry, Mapping) else {"target": entry}
        one = read(AttachConfig, {"target": "", **given}, at, problems)
        has_step = getattr(skip.SKIP_REGISTRY.get(role), "support_online_step", False)
        if role not in roles:
            known = did_you_mean(str(role), roles, "skip.attach")
            problems.append(Problem(at, "this role is not registered", known))
        elif role == "rollout_tq":
            remedy = f"decorate them: SkipManager.annotate({role!r}, queue=..., phase=...)"
            problems.append(Problem(at, "its stages need a queue, which no path names", remedy))
        elif one.step and (has_step or role == "async_rollout"):
            what = "this role reads the step from each call"
            problems.append(Problem(f"{at}.step", what, "leave it out"))
        elif one.target and (other := attached.setdefault(one.target, at)) != at:
            what = f"{one.target} is already attached at {other}"
            problems.append(Problem(at, what, "one function is one stage"))
        attach[role] = one
    return attach


def _fill(role: RoleConfig, values: Mapping[str, Any]) -> None:
    for key, value in values.items():
        if getattr(role, key) is None:
            setattr(role, key, value)


def _inherit(role: RoleConfig, shared: skip.SkipManagerConfig, name: str) -> Iterator[Problem]:
    """Fill in place what `role` was not given from the shared keys; return what does not fit."""
    keys = [f.name for f in dataclasses.fields(RoleConfig)]
    own = frozenset(key for key in keys if getattr(role, key) is not None)
    role.given_keys, role.lacks_engine = own, not shared.start_engine
    _fill(role, {key: getattr(shared, key) for key in keys})
    on, on_miss = role.enable, role.on_miss
    role.match = role.match or "step"  # a host with another default looks whether the node gives it
    if name == VALIDATION_ROLE and role.match == "run":
        role.match = "step"
    # A role of another name may be a stage without an engine: there `generate` can be set.
    no_engine = not shared.start_engine and (name in skip.BUILT_IN_ROLES or "on_miss" not in own)
    if no_engine:
        role.on_miss = "error"
    never_runs, because = ("start_engine", "false") if no_engine else ("on_miss", "error")
    able = getattr(skip.SKIP_REGISTRY.get(name), "support_actions", skip.SkipAction)
    contradictions = (
        (role.action not in [*able] and (on or "action" in own), "action",
         f"role {name} does not support {role.action!r}",
         f"use one of {', '.join(action.value for action in able)}"),
        (on and no_engine and "on_miss" in own and on_miss != "error", "on_miss",
         "skip.start_engine=false leaves no inference engine to generate with",
         "remove one of them"),
        (on and role.match == "prompt" and role.restore_rng, "restore_rng",
         "a batch of several dumps has no one state of the generators, and skip.match is prompt",
         "choose one"),
        (on and role.on_miss == "error" and role.on_mismatch == "regenerate", never_runs,
         f"{because} never runs the stage, and skip.on_mismatch=regenerate runs it",
         "choose one of them"),
    )  # fmt: skip
    for contradicts, key, *said in contradictions:
        if contradicts:
            yield Problem(*(as_given(text, name, role) for text in (f"skip.{key}", *said)))


def has_own_key(config: Any) -> bool:
    """Whether `skip` at the top of a config has a value, and no key of rlskip's."""
    node = look_up(config, "skip")
    given = node if hasattr(node, "keys") else ()
    return node is not None and {*SHARED_KEYS, *skip.role_configs()}.isdisjoint(given)


def why_off(settings: SkipSettings) -> list[Problem]:
    """Why roles that a Hydra job chose are off; one problem at least if no role is on."""
    node = settings.node
    if node is None:
        return [Problem("skip", "the config has no such node", "add +skip=rollout_cache")]
    # However it is written: a command line has `0` and `no`, too.
    if not read(skip.SkipManagerConfig, {"enable": node.get("enable", True)}, "skip", []).enable:
        return [Problem("skip.enable", "it is false, so every role is off", "set skip.enable=true")]
    off = []
    for option, _ in chosen_options(settings.facts.config, "skip"):
        if (role := option.rpartition("_")[0]) not in settings.roles:
            what = f"it is false, although the option {option} was chosen: what is composed after "
            remedy = f"remove that override, or in the defaults list put `- skip: {option}` after "
            remedy += "it (in verl's ppo_trainer.yaml after `_self_`)"
            off.append(Problem(f"skip.{role}.enable", f"{what}it sets it", remedy))
    nothing = Problem("skip", "no role is enabled", "choose an option, e.g. +skip=rollout_cache")
    return off or ([] if settings.roles else [nothing])
