"""Reads the `skip` node of any full config, once, into complete roles.

A role inherits each key that it was not given (None) from the shared keys. A key that is null
there, too, gets the value that the host's facts have.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
from collections.abc import Iterator, Mapping
from typing import Any

import attrs

from rlskip.config.application import application_facts
from rlskip.config.attachments import AttachConfig, read_attach
from rlskip.config.check import (
    Problem,
    calls_own_resolver,
    did_you_mean,
    look_up,
    raise_all,
    read,
)
from rlskip.config.choices import chosen_options
from rlskip.config.facts import HostFacts
from rlskip.config.nodes import find_node
from rlskip.config.skip import (
    BUILT_IN_ROLES,
    SHARED_KEYS,
    SKIP_REGISTRY,
    VALIDATION_ROLE,
    RoleConfig,
    RoleSpec,
    SkipManagerConfig,
    role_specs,
)
from rlskip.errors import ConfigError

# Keys of a role that the host's facts fill where they are null.
_FROM_HOST = {
    "experiment_name": "experiment",
    "project_name": "project",
    "gbs": "prompts",
    "n": "n",
    "prompt_len": "prompt_len",
    "response_len": "response_len",
}

# verl fills every leaf of every role with these, so they do not mean that a user set them.
_VERL_TARGET = "verl.utils.skip"
_VERL_DEFAULTS: dict[str, Any] = {
    "enable": False,
    "steps": [],
    "dump_dir": "~/.verl/rollout_dump",
    "action": "cache",
}


# The remedies for an unknown key that is near to none: of `skip`, and of a role without a class.
_ALL_KEYS = "docs/keys.md lists all keys"
_REGISTER = (
    "import the module with the class of a role that has keys of its own "
    "(`@register_skip({role!r}, config=...)`) before the job starts"
)


@attrs.frozen(eq=False)
class SkipSettings:
    """The `skip` node of a config, read and checked. Functions that take a config also take this.

    Parameters
    ----------
    facts
        What the host says of the run; only `config` where no role is on.
    roles
        The enabled roles, each complete: ``steps`` is a :class:`Steps`, ``dump_dir`` an absolute
        path. Empty when `skip` is absent or switched off.
    attach
        For each role the function that ``skip.attach`` names.
    node
        The plain `skip` mapping, without the defaults that verl fills in; None if there is none.
    start_engine
        Whether the host starts its inference engine.
    log_metrics
        Whether the host logs what was replayed.
    """

    facts: HostFacts
    roles: dict[str, RoleConfig] = attrs.field(factory=dict)
    attach: dict[str, AttachConfig] = attrs.field(factory=dict)
    node: dict[str, Any] | None = None
    start_engine: bool = True
    log_metrics: bool = True

    def gives(self, key: str, role: str) -> bool:
        """Whether the node gives `key` for `role`, or for all."""
        node = self.node or {}
        return any(place.get(key) is not None for place in (node, node.get(role) or {}))

    def complete(self, facts: HostFacts) -> SkipSettings:
        """These settings for a host: each key of a role that is still null takes its fact.

        Raises ConfigError for a fact that only the application's own resolver knows.
        """
        if facts.config is None:
            facts = attrs.evolve(facts, config=self.facts.config)
        roles = {name: copy.copy(role) for name, role in self.roles.items()}
        for name, role in roles.items():
            # Validation goes the way of training, the first role.
            way = next(iter(roles)) if name == VALIDATION_ROLE else name
            if role.gbs is None and way == "rollout_tq":
                role.gbs = facts.queued_prompts
            for key, fact in _FROM_HOST.items():
                if getattr(role, key) is None:
                    setattr(role, key, getattr(facts, fact))
                if calls_own_resolver(value := getattr(role, key)):
                    what = f"the host's value, {value!r}, needs a resolver of the application's "
                    what += "own, which rlskip does not call"
                    raise ConfigError(what, f"skip.{key}", f"give the value: skip.{key}=...")
            if name == "rollout" and facts.samples_dynamically and not self.gives("match", name):
                role.match = "run"
        return attrs.evolve(self, facts=facts, roles=roles)


def read_skip(config: Any, facts: HostFacts | None = None) -> SkipSettings:
    """Read the `skip` node of a config against the registered roles.

    Parameters
    ----------
    config
        A full config (a DictConfig, a mapping or a dataclass), a :class:`SkipManagerConfig`, or
        SkipSettings, which are not read again.
    facts
        What the host says of the run; None: what a plain application's config says. A host that
        knows them later passes ``HostFacts()``, then the settings with the facts.

    Raises
    ------
    ConfigError
        Names *every* problem, whether the role it concerns is enabled or not.
    """
    if isinstance(config, SkipSettings):
        return config if facts is None else config.complete(facts)
    node = find_node(config, "skip", SkipManagerConfig)
    if node is None:
        return SkipSettings(HostFacts(config))
    whole = {"skip": node} if isinstance(config, SkipManagerConfig) else config
    settings = read_values(_without_host_defaults(node), whole)
    return settings.complete(facts or application_facts(config)) if settings.roles else settings


def has_own_key(config: Any) -> bool:
    """Whether `skip` at the top of a config has a value, and no key of rlskip's."""
    node = look_up(config, "skip")
    names = {field.name for field in dataclasses.fields(SkipManagerConfig)} | {*SKIP_REGISTRY}
    return node is not None and names.isdisjoint(node if hasattr(node, "keys") else ())


def read_values(node: dict[str, Any], config: Any) -> SkipSettings:
    """The settings of `node`, the mapping at ``skip`` in `config`; raises as :func:`read_skip`.

    Its null keys are not filled from a host's facts yet.
    """
    problems: list[Problem] = []
    known = role_specs()
    bare = _without_class(node, known)
    registry = known | bare
    shared_node = {key: node[key] for key in node if key in SHARED_KEYS}
    shared = read(SkipManagerConfig, shared_node, "skip", problems)
    attach = read_attach(shared.attach, registry, problems)

    replays_validation = shared.validation == "replay"
    if replays_validation:  # last: it takes its place from the role of training
        given = node.get(VALIDATION_ROLE) or {}
        node = {**{k: v for k, v in node.items() if k != VALIDATION_ROLE}, VALIDATION_ROLE: given}
    roles: dict[str, RoleConfig] = {}
    for key, value in node.items():
        if key in SHARED_KEYS:
            continue
        spec = registry.get(key)
        if spec is None:
            remedy = did_you_mean(key, [*SHARED_KEYS, *registry], "skip", _ALL_KEYS)
            problems.append(Problem(f"skip.{key}", "unknown key", remedy))
        elif not isinstance(value, Mapping):
            problems.append(Problem(f"skip.{key}", f"expected a mapping, got {value!r}"))
        else:
            otherwise = _REGISTER.format(role=key) if key in bare else ""
            role = read(spec.config, value, f"skip.{key}", problems, otherwise=otherwise)
            if key == VALIDATION_ROLE:
                if role.enable and not replays_validation:
                    what = "skip.validation turns it on"
                    remedy = "set skip.validation=replay"
                    problems.append(Problem(f"skip.{key}.enable", what, remedy))
                role.enable = replays_validation
                _place_beside(roles, role)
            problems += _inherit(role, shared, key, spec)
            roles[key] = role
    # What contradicts a shared key was found again in each role that inherits it.
    raise_all(list(dict.fromkeys(problems)))
    on = {key: role for key, role in roles.items() if shared.enable and role.enable}
    if on.keys() == {VALIDATION_ROLE}:  # it goes with what is skipped in training
        on = {}
    starts = shared.start_engine or not on
    return SkipSettings(HostFacts(config), on, attach, node, starts, shared.log_metrics)


def _place_beside(roles: Mapping[str, RoleConfig], validation: RoleConfig) -> None:
    """Give validation the directory of the run that it belongs to, key by key."""
    training = next((role for role in roles.values() if role.enable), None)
    for key in ("dump_dir", *_FROM_HOST):
        if training is not None and getattr(validation, key) is None:
            setattr(validation, key, getattr(training, key))


def _inherit(
    role: RoleConfig, shared: SkipManagerConfig, name: str, spec: RoleSpec
) -> Iterator[Problem]:
    """Fill in place what `role` was not given from the shared keys; say what does not fit."""
    keys = [f.name for f in dataclasses.fields(RoleConfig)]
    own = frozenset(key for key in keys if getattr(role, key) is not None)
    role.given_keys, role.lacks_engine = own, not shared.start_engine

    def typed(key: str) -> str:
        """The full key that holds the value of `key`."""
        return f"skip.{name}.{key}" if key in own else f"skip.{key}"

    for key in keys:
        if key not in own:
            setattr(role, key, getattr(shared, key))
    # Their defaults depend on the host, which looks whether the node gives them.
    role.match = role.match or "step"
    role.restore_rng = bool(role.restore_rng)
    if name == VALIDATION_ROLE and role.match == "run":
        role.match = "step"  # another step's shows another model
        if role.enable and "match" in own:
            what = "validation is replayed from the dumps of its own step only"
            yield Problem(typed("match"), what, f"remove {typed('match')}")
    never_runs, because = typed("on_miss"), "error"
    # A role of another name may be a stage without an engine: there `generate` can be set.
    if not shared.start_engine and (name in BUILT_IN_ROLES or "on_miss" not in own):
        never_runs, because = "skip.start_engine", "false"
        if role.enable and "on_miss" in own and role.on_miss != "error":
            what = "skip.start_engine=false leaves no inference engine to generate with"
            yield Problem(typed("on_miss"), what, "remove one of them")
        role.on_miss = "error"
    if role.action not in spec.actions and (role.enable or "action" in own):
        what = f"role {name} does not support {role.action!r}"
        yield Problem(typed("action"), what, f"use one of {', '.join(spec.actions)}")
    if role.enable and role.match == "prompt" and role.restore_rng:
        what = "a batch of several dumps has no one state of the generators, and "
        yield Problem(typed("restore_rng"), f"{what}{typed('match')} is prompt", "choose one")
    if role.enable and role.on_miss == "error" and role.on_mismatch == "regenerate":
        what = f"{because} never runs the stage, and {typed('on_mismatch')}=regenerate runs it"
        yield Problem(never_runs, what, "choose one of them")


def why_off(settings: SkipSettings) -> list[Problem]:
    """Why roles that a Hydra job chose are off; one problem at least if no role is on."""
    node, config = settings.node, settings.facts.config
    if node is None:
        what = "the config has no such node"
        return [Problem("skip", what, "add +skip=rollout_cache to the command")]
    if node.get("enable") is False:
        return [Problem("skip.enable", "it is false, so every role is off", "set skip.enable=true")]
    chosen = {option.rpartition("_")[0]: option for option, _ in chosen_options(config, "skip")}
    off = [
        Problem(
            f"skip.{role}.enable",
            f"it is false, although the option {option} was chosen: something after it in the "
            "composition sets it",
            f"remove that override; or in the defaults list, put `- skip: {option}` after that "
            "entry, which is `_self_` in verl's ppo_trainer.yaml; or put it into a config that "
            "includes this one",
        )
        for role, option in chosen.items()
        if role not in settings.roles
    ]
    if not (off or settings.roles):
        what = "no role is enabled"
        return [Problem("skip", what, "choose an option, e.g. +skip=rollout_cache")]
    return off


def _without_class(
    node: Mapping[str, Any], registry: Mapping[str, RoleSpec]
) -> dict[str, RoleSpec]:
    """The roles of a `skip` mapping that need no class: mappings under a name of their own.

    A name that looks like that of a known role, or of the key that holds a mapping, is none.
    """
    names = [k for k, v in node.items() if isinstance(v, Mapping) and k not in SHARED_KEYS]
    return {
        name: RoleSpec()
        for name in names
        if name not in registry and name.isidentifier()
        if not difflib.get_close_matches(name, [*registry, "attach"], n=1, cutoff=0.75)
    }


def _without_host_defaults(node: dict[str, Any]) -> dict[str, Any]:
    """Drop verl's `_target_` and every leaf of a role that holds verl's own default."""
    target = node.pop("_target_", None)
    if str(target).startswith(_VERL_TARGET):
        for key, value in node.items():
            if isinstance(value, Mapping):
                given = {k: v for k, v in value.items() if (k, v) not in _VERL_DEFAULTS.items()}
                given.pop("_target_", None)
                node[key] = given
    return node
