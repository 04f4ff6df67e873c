"""What a host says of its run, where that comes from, and names of keys that shape rollouts."""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import attrs

from rlskip.config.check import did_you_mean, is_below, leaves, look_up, readable
from rlskip.config.dump_dir import hydra_config, original_directory
from rlskip.errors import ConfigError

# Names by which any application calls what shapes a rollout: the last names of a key.
SHAPING_NAMES = (
    "temperature", "top_p", "top_k", "min_p", "do_sample", "n", "num_generations",
    "num_return_sequences", "max_tokens", "max_new_tokens", "stop", "stop_token_ids",
    "repetition_penalty", "presence_penalty", "frequency_penalty", "length_penalty", "typical_p",
    "min_tokens", "min_new_tokens", "num_beams", "logit_bias", "bad_words", "ignore_eos",
    "model.path", "model.name", "model_path", "model_name", "model_name_or_path",
)  # fmt: skip

# What the last name of other keys looks like, for which only a change of the config is warned. A
# global of such a name that a stage reads is said to be left.
SHAPING_PATTERNS = (
    "model*", "base_model*", "pretrained*", "adapter*", "lora_path*", "tokenizer*", "*temperature*",
    "system*prompt*", "prompt_prefix", "prompt_suffix", "*template*", "*instruction*",
    "stop_words*", "stop_str*", "stop_seq*", "max_len*", "max_*len*", "max_*tokens*", "max_turns",
    "group*", "num_samples*", "n_samples*", "*samples_per_prompt", "*thinking*",
)  # fmt: skip
# What such a name may hold that concerns training, and how fast it is.
_OF_TRAINING = ("dtype", "parallel", "per_gpu")

# Words by which attributes are named that shape no rollout, so that none is said to be left.
NEUTRAL_WORDS = frozenset(
    ("accelerator", "callback", "callbacks", "checkpoint", "checkpoints", "ckpt", "counter",
     "dir", "directory", "elapsed", "epoch", "epochs", "folder", "grad", "history", "log",
     "logger", "logs", "loss", "losses", "lr", "metric", "metrics", "optimizer", "pbar",
     "progress", "save", "step", "steps", "timer", "timings", "wandb")
)  # fmt: skip
# Nodes of what generates no rollouts of training, where the same names mean something else.
OTHER_NODES = frozenset(
    ("critic", "reward", "reward_model", "judge", "teacher", "ref", "val", "validation", "eval",
     "logger", "logging", "wandb", "mlflow", "optimizer")
)  # fmt: skip


# For the processes that a job starts: their own script is another one.
ORIGIN_VARIABLE = "RLSKIP_ORIGIN"

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
        inherited = os.environ.get(ORIGIN_VARIABLE)
        if inherited:
            found = cls(*json.loads(inherited))
        else:
            found = cls.at(next(filter(is_own, scripts), None))
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

    def to_variable(self) -> str:
        """As :data:`ORIGIN_VARIABLE` hands it to other processes."""
        return json.dumps(attrs.astuple(self))


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

    #: Whether a step takes batch after batch until a filter has kept enough: other rewards move
    #: prompts to other steps, so ``skip.match`` is ``run`` by default, and `steps` are the most
    #: that the run may take.
    samples_dynamically: bool = False

    #: By role what each call adds to the identity of its dump, as far as it is known before: the
    #: check before the first step names what differs.
    called_with: Mapping[str, Mapping[str, Any]] = attrs.field(factory=dict)

    #: The host's keys that make it validate, each with the value that keeps it from that.
    validates: Mapping[str, Any] = attrs.field(factory=dict)

    model: str | None = None
    engine: str | None = None  #: the kind of inference engine
    tokenizer: str | None = None  #: its path or its name

    #: The values that shape a rollout, in training and in validation, by dotted key. A dump that
    #: was made with others is a mismatch.
    shaping: Mapping[str, Any] = attrs.field(factory=dict)
    val_shaping: Mapping[str, Any] = attrs.field(factory=dict)

    #: Keys of `config`, each with all keys below it, whose changes are not logged: they are
    #: compared, or told elsewhere. Any other that seems to shape rollouts is a warning.
    known: tuple[str, ...] = ()

    def value_at(self, key: str, where: str) -> Any:
        """The value of a key of `config` that the list at config key `where` names.

        Raises ConfigError where the config has no such key.
        """
        config = readable(self.config)
        there = [name for name, _ in leaves(config, resolve=False)]
        if not any(is_below(name, [key]) for name in there):
            remedy = did_you_mean(key, there, otherwise="name a full key of the config")
            raise ConfigError(f"the config has no key {key}", where, remedy)
        below = dict(leaves(look_up(config, key)))
        return below.get("", below)


@functools.lru_cache(1 << 12)
def seems_to_shape(key: str) -> bool:
    """Whether a key shapes rollouts by its name."""
    *nodes, last = key.split(".")
    named = f".{key}".endswith(tuple(f".{name}" for name in SHAPING_NAMES))
    if not named and not any(word in last.lower() for word in _OF_TRAINING):
        named = any(fnmatchcase(last.lower(), pattern) for pattern in SHAPING_PATTERNS)
    return named and OTHER_NODES.isdisjoint([*nodes, last])
