"""What a host says of its run, where that comes from, and what a plain application says."""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from contextlib import nullcontext
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import attrs
from omegaconf import DictConfig
from omegaconf.omegaconf import read_write

from rlskip.config.check import did_you_mean, is_below, leaves, look_up, readable
from rlskip.config.dump_dir import hydra_config, original_directory
from rlskip.errors import ConfigError

# For the processes that a job starts, whose script is another one: its parts as JSON.
ORIGIN_VARIABLE = "RLSKIP_ORIGIN"
# Set where only a config is asked for: a script without Hydra ends before it generates.
COMPOSES_VARIABLE = "RLSKIP_COMPOSES"

_ROOTS = (".git", ".hg", "pyproject.toml", "setup.py")
_INSTALLED = {"site-packages", "dist-packages"}
# Ray copies a working_dir into a directory whose name is a hash of what is in it.
_OF_RAY = "_ray_pkg_"


@attrs.frozen
class Origin:
    """Where a run comes from."""

    name: str  #: of its Hydra job, else of its script, else of the working directory
    project: str  #: the name of the project's root directory
    place: str  #: the script, else the working directory, in full

    @classmethod
    def of(cls, config: Any) -> Origin:
        """That of a run with this full config: its job may have started this process."""
        # A worker of joblib's has its own `__main__`, and the arguments of the script.
        files = (getattr(sys.modules.get("__main__"), "__file__", None), sys.argv[0])
        scripts = (Path(os.path.abspath(file)) for file in files if file)
        found = cls.at(next(filter(is_own, scripts), None))
        if inherited := os.environ.get(ORIGIN_VARIABLE):
            found = cls(*json.loads(inherited))
        job = look_up(config, "hydra.job.name") or look_up(hydra_config(), "hydra.job.name")
        return attrs.evolve(found, name=str(job)) if job else found

    @classmethod
    def at(cls, script: Path | None) -> Origin:
        """That of a script, or of what has none: a notebook, ``-c``, an installed command."""
        folder = Path(os.path.realpath(script.parent if script else original_directory()))
        above = (folder, *folder.parents)
        root = next((f for f in above if any(os.path.exists(f / name) for name in _ROOTS)), folder)
        parts = (folder / script.name if script else folder).parts
        copied = next((i for i, part in enumerate(parts) if part.startswith(_OF_RAY)), 0)
        names = ["ray" if f.name.startswith(_OF_RAY) else f.name or "root" for f in (folder, root)]
        name = script.stem if script and script.stem != "__main__" else names[0]
        return cls(name, names[1], os.path.join(*parts[copied:]))


def is_own(script: Path) -> bool:
    """Whether a file is a script of the user's, and not an installed command or module."""
    in_environment = script.parent.name == "bin" and script.suffix != ".py"
    return script.is_file() and not in_environment and _INSTALLED.isdisjoint(script.parts)


@attrs.frozen(eq=False)
class HostFacts:
    """What a host says of its run, once. None: it does not know."""

    config: Any = None  #: in which ``skip.identity`` names keys; a copy is kept with the dumps
    experiment: str | None = None  #: with `project` the name of the run, else `origin` names it
    project: str | None = None
    origin: Origin | None = None  #: None: that of this process
    experiment_key: str = "skip.experiment_name"  #: the key of `experiment`, for messages
    prompts: int | None = None  #: a step
    queued_prompts: int | None = None  #: that a step submits to a queue, if that is another number
    n: int | None = None  #: sessions a prompt
    prompt_len: int | None = None  #: of the longest prompt, in tokens
    response_len: int | None = None  #: of the longest response, in tokens
    steps: Sequence[int] = ()  #: that the run will take, as far as they are known
    validated: Sequence[int] = ()  #: steps at which it validates, as far as they are known
    model: str | None = None
    engine: str | None = None  #: the kind of inference engine
    tokenizer: str | None = None  #: its path or its name

    #: Whether a step takes batch after batch until a filter has kept enough. Other rewards then
    #: move prompts to other steps: ``skip.match`` is ``run`` by default, and `steps` are the most.
    samples_dynamically: bool = False

    #: By role what each call adds to the identity of its dump, as far as it is known before.
    called_with: Mapping[str, Mapping[str, Any]] = attrs.field(factory=dict)

    #: The host's keys that make it validate, each with the value that keeps it from that.
    validates: Mapping[str, Any] = attrs.field(factory=dict)

    #: The values that shape a rollout, in training and in validation, by dotted key.
    shaping: Mapping[str, Any] = attrs.field(factory=dict)
    val_shaping: Mapping[str, Any] = attrs.field(factory=dict)

    #: Keys of `config`, each with all below it, whose changes are compared, or told elsewhere.
    known: tuple[str, ...] = ()

    def value_at(self, key: str, where: str) -> Any:
        """The value of a key of `config`, which it must have, that the list at `where` names."""
        config = readable(self.config)
        there = [name for name, _ in leaves(config, resolve=False)]
        if not any(is_below(name, [key]) for name in there):
            remedy = did_you_mean(key, there, otherwise="name a full key of the config")
            raise ConfigError(f"the config has no key {key}", where, remedy)
        below = dict(leaves(look_up(config, key)))
        return below.get("", below)


# A plain application has verl's keys, as far as it has any; only ``hosts/verl`` knows them, too.
ROLLOUT = "actor_rollout_ref.rollout"
DISTILLATION = "distillation"
TOTAL_STEPS = "trainer.total_training_steps"

# Another value is a mismatch that names the key and both values. A key includes all keys below it.
# Seeds are never compared: another draw from the same distribution is an equally good sample.
COMPARED: dict[str, tuple[str, ...]] = {
    ROLLOUT: (
        "temperature", "top_p", "top_k", "min_p", "do_sample", "repetition_penalty",
        "presence_penalty", "frequency_penalty", "ignore_eos", "stop", "stop_token_ids",
        "agent.default_agent_loop", "agent.agent_loop_config_path", "multi_turn",
    ),
    "data": (
        "apply_chat_template_kwargs", "mm_processor_kwargs", "tool_config_path",
        "function_tool_path",
    ),
    "actor_rollout_ref.model": ("custom_chat_template",),
}  # fmt: skip
# Of an enabled ``distillation``, too: the rollouts of training bring its log-probs.
OF_TEACHERS = (
    "teacher_key", "teacher_models.*.key", "teacher_models.*.model_path",
    "distillation_loss.loss_mode", "distillation_loss.topk",
)  # fmt: skip
# Compared elsewhere, part of the directory, warned about by name, or only how fast it is.
_SAID_ELSEWHERE = (
    "actor_rollout_ref.model.path", f"{ROLLOUT}.n", f"{ROLLOUT}.val_kwargs",
    f"{ROLLOUT}.max_num_batched_tokens", "data.max_prompt_length", "data.max_response_length",
)  # fmt: skip
_COMPARED_KEYS = tuple(f"{node}.{name}" for node, names in COMPARED.items() for name in names)

# The first of these keys that has a value is the fact, or counts where a key of a node is null.
_KEYS = {
    "experiment": ["trainer.experiment_name"],
    "project": ["trainer.project_name"],
    "prompts": ["data.gen_batch_size", "data.train_batch_size"],
    # verl's V1 trainer submits train_batch_size prompts a step, gen_batch_size per fetch.
    "queued_prompts": ["data.train_batch_size", "data.gen_batch_size"],
    "n": [f"{ROLLOUT}.n"],
    # The rollouts' own limits in tokens, which verl takes from the data unless they are set.
    "prompt_len": [f"{ROLLOUT}.prompt_length", "data.max_prompt_length"],
    "response_len": [f"{ROLLOUT}.response_length", "data.max_response_length"],
    "model": ["actor_rollout_ref.model.path"],
    "engine": [f"{ROLLOUT}.name"],
    "tokenizer": ["actor_rollout_ref.model.tokenizer_path", "actor_rollout_ref.model.path"],
    # From here on of nodes.
    "val_n": [f"{ROLLOUT}.val_kwargs.n"],
    "workers": [f"{ROLLOUT}.agent.num_workers"],
    "rollout_level": ["trainer.v1.rollout_level_dispatch"],
    "max_concurrent_rollouts_per_worker": ["trainer.v1.max_concurrent_rollouts_per_worker"],
    "sampling": [ROLLOUT],
    "val_sampling": [f"{ROLLOUT}.val_kwargs"],
    "seed": ["data.seed", "seed"],
    "stepwise_output": ["generator.merge_stepwise_output"],  # SkyRL's
}


def application_facts(config: Any) -> HostFacts:
    """The facts of an application; ConfigError names an interpolation that does not resolve."""
    config, given = readable(config), config
    known = attrs.fields_dict(HostFacts)
    facts = {fact: look_up(config, *keys) for fact, keys in _KEYS.items() if fact in known}
    if facts["experiment"] is not None:
        facts["experiment_key"] = "trainer.experiment_name"
    total = look_up(config, TOTAL_STEPS)
    # Names are relative to the rollout node, where most are.
    shaping = {
        key.removeprefix(f"{ROLLOUT}."): value
        for compared in _COMPARED_KEYS
        for key, value in leaves(look_up(config, compared), compared)
        if value is not None and not key.endswith("._target_")
    }
    # The keys of val_kwargs replace those of the same name, and add `n`.
    of_validation = leaves(look_up(config, f"{ROLLOUT}.val_kwargs"))
    own = {name: value for name, value in of_validation if name and name != "_target_"}
    teachers = look_up(config, DISTILLATION) if look_up(config, f"{DISTILLATION}.enabled") else {}
    of_teachers = {
        f"{DISTILLATION}.{key}": value
        for key, value in leaves(teachers)
        if value is not None and any(fnmatchcase(key, name) for name in OF_TEACHERS)
    }
    return HostFacts(
        given,
        **facts,
        steps=range(1, total + 1) if isinstance(total, int) else (),
        samples_dynamically=look_up(config, "algorithm.filter_groups.enable") is True,
        shaping={**shaping, **of_teachers},
        val_shaping={**shaping, **own},
        known=(*_COMPARED_KEYS, *_SAID_ELSEWHERE),
    )


def of_host(config: Any, names: Iterable[str]) -> Mapping[str, tuple[str, Any]]:
    """For those of the `names` of a node's keys that have one: the host's key, and its value."""
    config, found = readable(config), dict[str, tuple[str, Any]]()
    for name in names:
        for key in _KEYS.get(name, ()):
            value = look_up(config, key)
            if name in ("sampling", "val_sampling"):
                given = {one: look_up(value, one) for one in ("temperature", "top_p", "top_k")}
                value = {one: each for one, each in given.items() if each is not None}
            if value is not None:
                found.setdefault(name, (key, value))
    return found


# The skip flag of older versions of verl, which must not act beside rlskip.
LEGACY_FLAG = f"{ROLLOUT}.skip.enable"


class LegacyFlagWarning(DeprecationWarning):
    """An older trainer's skip flag is in use."""


# Python hides DeprecationWarning outside `__main__`; this one is for the user who typed the flag.
warnings.simplefilter("default", LegacyFlagWarning)


def retire_legacy_flag(config: Any, *, reaches_task: bool = True) -> None:
    """Set the flag False in `config`, where it is on, and warn; raise if the task keeps it."""
    if look_up(config, LEGACY_FLAG) is not True:
        return
    if not reaches_task:
        what = "is true beside skip.rollout.enable, and a multirun keeps rlskip from turning it off"
        raise ConfigError(what, LEGACY_FLAG, f"add the override {LEGACY_FLAG}=False")
    node = look_up(config, f"{ROLLOUT}.skip")
    with read_write(node) if isinstance(node, DictConfig) else nullcontext():
        (node if isinstance(node, MutableMapping) else vars(node)).update(enable=False)
    said = f"{LEGACY_FLAG} and skip.rollout.enable are both true; the flag is set False: remove it"
    warnings.warn(said, LegacyFlagWarning, stacklevel=3)
