"""The `dispatch` node: its dataclass, and the way to it from any full config."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlskip.config.check import Problem, raise_all, read
from rlskip.config.skip import look_up
from rlskip.errors import ConfigError, NotInstalledError

POOLS = ("local", "ray")

_positive = {"min": 1}
_not_negative = {"min": 0}


@dataclass
class DispatchConfig:
    """How a batch of prompts becomes sessions on workers."""

    # true: sessions are handed out one by one, and counted by their markers. false, the legacy
    # path: a prompt's sessions stay on one worker, and its status says when they are done.
    # Also trainer.v1.rollout_level_dispatch.
    rollout_level: bool = False

    # Sessions that run at once on one worker; null: any number.
    # Also trainer.v1.max_concurrent_rollouts_per_worker.
    max_concurrent_rollouts_per_worker: int | None = field(default=None, metadata=_positive)

    # Sessions that run at once on all workers together; null: any number.
    max_concurrent_rollouts: int | None = field(default=None, metadata=_positive)

    # Which session goes where, and when: chunk, round_robin, least_loaded, longest_first, or a
    # function of your own as package.module:function.
    policy: str = "least_loaded"

    # Where workers live: local (this process) or ray (actors).
    pool: str = field(default="local", metadata={"choices": POOLS})

    # How many workers; null: actor_rollout_ref.rollout.agent.num_workers, else 4.
    workers: int | None = field(default=None, metadata=_positive)

    # Sessions per prompt, where the prompt does not say (`__rollout_n__`);
    # null: actor_rollout_ref.rollout.n, else 1.
    n: int | None = field(default=None, metadata=_positive)

    # The same in validation; null: actor_rollout_ref.rollout.val_kwargs.n, else 1.
    val_n: int | None = field(default=None, metadata=_positive)

    # Sampling parameters, handed to the worker as they are;
    # null: temperature, top_p and top_k of actor_rollout_ref.rollout.
    sampling: dict[str, Any] | None = None

    # The same in validation; null: those of actor_rollout_ref.rollout.val_kwargs.
    val_sampling: dict[str, Any] | None = None

    # Every session has a seed of its own: of this, the step, the prompt and the session.
    # null: data.seed, else seed, else 0.
    seed: int | None = field(default=None, metadata=_not_negative)

    # Seconds that one attempt at a session may take; null: for ever.
    session_timeout_s: float | None = field(default=3600.0, metadata={"min": 0.001})

    # More attempts after an infrastructure failure: a lost worker, a deadline, a network error.
    max_retries: int = field(default=2, metadata=_not_negative)

    # More attempts after a data failure: any other error that the worker raised.
    max_data_retries: int = field(default=1, metadata=_not_negative)

    # Journal finished sessions beside the step's dump; a killed step resumes from there.
    journal: bool = False

    # Fields that name a prompt, in a batch and in a dump alike: longest_first looks up by them
    # how long its sessions were in the dumps of earlier runs. []: it does not look there.
    history_fields: list[str] = field(default_factory=list)

    # Directory for a timeline of every batch: Chrome trace JSON and PNG; null: none is written.
    timeline_dir: str | None = None

    # A progress bar: sessions done, tokens per second, time left.
    progress: bool = False


_SAMPLING = ("temperature", "top_p", "top_k")
_ROLLOUT = "actor_rollout_ref.rollout"

# Keys of the host that mean the same as ours.
_ALIASES = {
    "rollout_level": "trainer.v1.rollout_level_dispatch",
    "max_concurrent_rollouts_per_worker": "trainer.v1.max_concurrent_rollouts_per_worker",
}
# Where a host keeps what `dispatch` leaves null, in order of preference, and the last resort.
_FROM_HOST: dict[str, tuple[tuple[str, ...], Any]] = {
    "workers": ((f"{_ROLLOUT}.agent.num_workers",), 4),
    "n": ((f"{_ROLLOUT}.n",), 1),
    "val_n": ((f"{_ROLLOUT}.val_kwargs.n",), 1),
    "seed": (("data.seed", "seed"), 0),
}


def read_dispatch(config: Any) -> DispatchConfig:
    """The `dispatch` node of a full config, complete: what it leaves null is looked up.

    Parameters
    ----------
    config
        A full DictConfig, a mapping, or a :class:`DispatchConfig`; `dispatch` may be absent.

    Raises
    ------
    ConfigError
        Names *every* problem.
    """
    node = _node(config)
    problems: list[Problem] = []
    for key, alias in _ALIASES.items():
        value = look_up(config, alias)
        if value is None or value is False:  # false is the host's default, and says nothing
            continue
        if node.get(key) is None:
            at_alias: list[Problem] = []
            found = read(DispatchConfig, {key: value}, "dispatch", at_alias)
            problems += [Problem(alias, problem.what, problem.remedy) for problem in at_alias]
            node[key] = getattr(found, key)
        elif node[key] != value:
            problems.append(
                Problem(f"dispatch.{key}", f"{node[key]!r}, but {alias} is {value!r}", "set one")
            )
    for key, (places, default) in _FROM_HOST.items():
        if node.get(key) is None:
            found_values = (look_up(config, place) for place in places)
            node[key] = next((value for value in found_values if value is not None), default)
    for key, place in (("sampling", _ROLLOUT), ("val_sampling", f"{_ROLLOUT}.val_kwargs")):
        if node.get(key) is None:
            values = {name: look_up(config, f"{place}.{name}") for name in _SAMPLING}
            node[key] = {name: value for name, value in values.items() if value is not None}
    dispatch = read(DispatchConfig, node, "dispatch", problems)
    raise_all(problems)
    return dispatch


def _node(config: Any) -> dict[str, Any]:
    if isinstance(config, DispatchConfig):
        return dataclasses.asdict(config)
    node = config.get("dispatch") if isinstance(config, (Mapping, DictConfig)) else None
    if isinstance(node, DispatchConfig):
        return dataclasses.asdict(node)
    if isinstance(node, DictConfig):
        try:
            node = OmegaConf.to_container(node, resolve=True)
        except OmegaConfBaseException as error:
            where = error.full_key or "dispatch"
            raise ConfigError(str(error).splitlines()[0], where) from error
    if isinstance(node, str):
        raise NotInstalledError(
            f"{node!r} arrived as a plain string, so Hydra did not discover rlskip's plug-in",
            "dispatch",
            "install rlskip into the environment that runs this application and check with "
            "`python <app> --info plugins` (look for RlskipSearchPathPlugin)",
        )
    if node is None:
        return {}
    if not isinstance(node, Mapping):
        raise ConfigError(f"expected a mapping, got {node!r}", "dispatch")
    return dict(node)
