"""SkyRL: the generator of `BasePPOExp` becomes the stage `rollout`, and rlskip merges the turns.

Start the training with ``trainer.override_entrypoint=rlskip.hosts.skyrl`` and ``RLSKIP_CONFIG``, or
wrap your own experiment class in :func:`with_rlskip`.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import attrs
from omegaconf import OmegaConf

from rlskip._wrap import AttachError, around
from rlskip.config.check import look_up, raise_all
from rlskip.config.dump_dir import DIRECTORY_VARIABLE
from rlskip.config.facts import HostFacts
from rlskip.config.nodes import read_record
from rlskip.config.settings import read_skip
from rlskip.config.skip import VALIDATION_ROLE
from rlskip.errors import ConfigError
from rlskip.hosts.skyrl.facts import FULLY_ASYNC, LOGPROBS, compared, facts_of, steps_of
from rlskip.hosts.skyrl.seams import NoClient, merge_turns, send_no_weights
from rlskip.hosts.standalone_config import CONFIG_VARIABLE, ROLE, is_on, read_config, warn_of_idle
from rlskip.merge import TrajectoryID
from rlskip.skip.manager import SkipManager
from rlskip.skip.names import ALL
from rlskip.skip.preflight import preflight
from rlskip.stages import comparable, record

# Training then routes the tokens as the engine did.
_ROUTES = "trainer.policy.megatron_config.moe_enable_routing_replay"
_OVERRIDE = "trainer.override_entrypoint="
# Where the ids of SkyRL's class tell groups and sessions.
_IDS = {"group": "trajectory_ids.instance_id", "session": "trajectory_ids.repetition_id"}
# Seconds per trajectory, and the metrics made of them.
_TIMES = ("trajectory_generation_times", "trajectory_time_splits")
_TIME_METRIC = re.compile(r"generate/trajectory_(completion_)?time")
# Parts of the names of metrics that a repetition need not have in common.
_OF_THE_MACHINE = ("time", "timing/", "per_second", "eval/", "vllm/", "gpu", "epoch")

E = TypeVar("E", bound=type)


def with_rlskip(experiment: E, config: Any = None) -> E:
    """A subclass of `experiment`, SkyRL's ``BasePPOExp`` say, that skips and merges as configured.

    `config` has entries `skip`, `merge` or `record`, or is the path of such a YAML file. None: the
    file that the environment variable ``RLSKIP_CONFIG`` names; without one, `experiment` is
    returned unchanged. Its methods raise ConfigError for a bad config, and AttachError for a
    version of SkyRL without the arguments that merging needs.
    """
    config = read_config(config)
    if config is None:
        return experiment

    settings, recording = read_skip(config, HostFacts()), read_record(config)
    warn_of_idle(config, "SkyRL's trainer", "dispatch", "replay")
    merges, skips = (look_up(config, node) is not None for node in ("merge", "skip"))

    class Experiment(experiment):  # type: ignore[valid-type,misc]
        def get_inference_client(self, *args: Any, **kwargs: Any) -> Any:
            if settings.start_engine:
                return super().get_inference_client(*args, **kwargs)
            return NoClient()

        def get_generator(self, *args: Any, **kwargs: Any) -> Any:
            generator = super().get_generator(*args, **kwargs)
            if skips:  # with its rewards, which `generate` returns, too
                SkipManager.init(settings.complete(facts_of(self.cfg)))
                SkipManager.count_rollouts()
            if skips and is_on(True, "SkyRL's trainer"):
                generator.generate = _skipping(generator.generate, self.cfg)
            return generator

        def get_trainer(self, *args: Any, **kwargs: Any) -> Any:
            trainer = super().get_trainer(*args, **kwargs)
            if not settings.start_engine:
                send_no_weights(trainer)
            if skips:
                check_steps(trainer)
            if merges:
                merge_turns(trainer, look_up(config, "merge"))
            if recording.enable:
                from rlskip.hosts.skyrl.stages import record_stages  # torch is the trainer's

                record_stages(trainer, recording)
            trainer.tracker.log = _logging(trainer.tracker.log)
            return trainer

    return functools.update_wrapper(Experiment, experiment, updated=())  # type: ignore[return-value]


@around
def _logging(log: Callable[..., Any], data: Any, *args: Any, **kwargs: Any) -> Any:
    """The tracker's: metrics are recorded, and what was replayed is among them."""
    record("metrics", comparable(data, _OF_THE_MACHINE))
    return log({**data, **SkipManager.logged()}, *args, **kwargs)


def check_steps(trainer: Any) -> None:
    """Refuse all that the trainer would have to generate although it must not, if that is known."""
    if (settings := SkipManager.settings) is None:
        return
    steps, validated = steps_of(trainer)
    facts = attrs.evolve(settings.facts, steps=steps, validated=validated)
    raise_all(preflight(SkipManager.skip_instances, facts, engine=settings.start_engine))


def main() -> None:
    """SkyRL's main with rlskip, for ``trainer.override_entrypoint=rlskip.hosts.skyrl``."""
    import ray
    from skyrl.train.config import SkyRLTrainConfig
    from skyrl.train.utils import validate_cfg
    from skyrl.train.utils.utils import initialize_ray

    config = read_config(None)
    if config is None:
        remedy = f"{CONFIG_VARIABLE}=/path/to/skip.yaml python -m ..."
        raise ConfigError("it is not set", CONFIG_VARIABLE, remedy)
    config = OmegaConf.to_container(config, resolve=True)
    arguments = [arg for arg in sys.argv[1:] if not arg.startswith(_OVERRIDE)]
    cfg = SkyRLTrainConfig.from_cli_overrides(arguments)
    validate_cfg(cfg)
    initialize_ray(cfg)
    # Read here and passed on: the training may run on another node, in another directory.
    ray.get(ray.remote(num_cpus=1)(_train).remote(cfg, config, os.getcwd()))


def _train(cfg: Any, config: Mapping[str, Any], directory: str) -> None:
    from skyrl.train.entrypoints.main_base import BasePPOExp

    os.environ.setdefault(DIRECTORY_VARIABLE, directory)
    with_rlskip(BasePPOExp, config)(cfg).run()


def _skipping(generate: Callable[..., Any], cfg: Any) -> Callable[..., Any]:
    """`generate` of a generator that is configured by `cfg`, SkyRL's config, as a stage."""
    if look_up(cfg, FULLY_ASYNC):
        what = "the trainer generates ahead of its steps, so a group belongs to no certain step"
        raise ConfigError(what, FULLY_ASYNC, f"set {FULLY_ASYNC}=false, or train without skip")

    @functools.wraps(generate)
    async def skipping(input_batch: Any, *args: Any, **kwargs: Any) -> Any:
        if (metadata := input_batch.get("batch_metadata")) is None:
            what = "the batch has no batch_metadata, which holds the step"
            raise AttachError(what, "rlskip.hosts.skyrl")
        role = ROLE if metadata.training_phase == "train" else VALIDATION_ROLE
        if role not in SkipManager.skip_instances:
            return await generate(input_batch, *args, **kwargs)
        SkipManager.set_step(metadata.global_step)
        sampling, needed = input_batch.get("sampling_params") or {}, {}
        if sampling.get(LOGPROBS) is not None:
            needed["rollout_logprobs"] = f"sampling_params.{LOGPROBS} is set"
        if role == ROLE and look_up(cfg, _ROUTES):
            needed["rollout_expert_indices"] = f"{_ROUTES}=true"
        stage = SkipManager.annotate(
            role=role,
            stage="skyrl.generate",
            prompts=_prompts,
            identity=compared(cfg, sampling, input_batch.get("env_classes") or ()),
            lacks=lambda out: [f"{n} ({why})" for n, why in needed.items() if not out.get(n)],
            rows=lambda out: _IDS if out.get("trajectory_ids") else {},
            totals={"rollout_metrics": lambda rows: None},
            ignore=[ALL],
            on_replay=_without_times,
        )
        output = await stage(_generating(generate))(input_batch, *args, **kwargs)
        given, ids = input_batch.get("trajectory_ids"), output["trajectory_ids"]
        id_class = type(given[0]) if given else TrajectoryID
        return {**output, "trajectory_ids": ids and [id_class(**id_) for id_ in ids]}

    return skipping


@around
async def _generating(generate: Callable[..., Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
    output = await generate(*args, **kwargs)
    # Groups and sessions are told by entries of mappings (_IDS), and SkyRL's class is none.
    ids = output.get("trajectory_ids")
    return {**output, "trajectory_ids": ids and [dataclasses.asdict(id_) for id_ in ids]}


def _prompts(input_batch: Any, *_: Any, **__: Any) -> dict[str, Any]:
    """What a batch asks for, with the ids of its rows, which the rollouts carry."""
    ids = input_batch.get("trajectory_ids") or []
    return {
        **{name: input_batch.get(name) for name in ("prompts", "env_classes", "env_extras")},
        "ids": [dataclasses.astuple(id_) for id_ in ids],
    }


def _without_times(output: Mapping[str, Any]) -> dict[str, Any]:
    """A replayed output without the times that the dump's run took; they are optional."""
    metrics = output.get("rollout_metrics")
    kept = metrics and {name: v for name, v in metrics.items() if not _TIME_METRIC.match(name)}
    return {n: v for n, v in output.items() if n not in _TIMES} | {"rollout_metrics": kept}
