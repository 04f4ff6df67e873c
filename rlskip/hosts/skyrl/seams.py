"""What rlskip puts in the place of SkyRL's own: no inference engine, and turns that are merged."""

from __future__ import annotations

import functools
import inspect
from typing import Any

from rlskip._wrap import AttachError
from rlskip.config.nodes import read_node
from rlskip.config.other_nodes import MergeConfig
from rlskip.errors import ConfigError, NoEngineError
from rlskip.merge import merge


async def _nothing(*_: Any, **__: Any) -> None: ...


class NoClient:
    """Takes the place of the client of SkyRL's engines where none is started."""

    sleep = wake_up = staticmethod(_nothing)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise NoEngineError.of(f"SkyRL's {name} is called")


def send_no_weights(trainer: Any) -> None:
    """Let `trainer` neither connect its workers to the engines nor send weights to them."""

    def connect_to_nothing() -> None:
        trainer.dispatch.save_weights_for_sampler = _nothing

    trainer.init_weight_sync_state = connect_to_nothing


def merge_turns(trainer: Any, merge_node: Any) -> None:
    """Make `trainer` merge the turns of its trajectories, as `merge_node` says.

    Reward metrics are those of the unmerged turns. SkyRL's own merge is turned off.
    """
    generator = trainer.cfg.generator
    flag = {"merge_stepwise_output": generator.merge_stepwise_output}
    settings = read_node(MergeConfig, {"merge": merge_node, "generator": flag})
    if not settings.stepwise_output:
        return
    if not generator.step_wise_trajectories:
        remedy = "set generator.step_wise_trajectories=true"
        raise ConfigError("there are no turns to merge", "merge.stepwise_output", remedy)
    postprocess = trainer.postprocess_generator_output
    if "metrics_generator_output" not in inspect.signature(postprocess).parameters:
        what = "postprocess_generator_output takes no metrics_generator_output"
        raise AttachError(what, "rlskip.hosts.skyrl", "merging needs SkyRL 0.3")
    generator.merge_stepwise_output = False

    @functools.wraps(postprocess)
    def merging(
        generator_output: Any,
        uids: list[str],
        metrics_generator_output: Any = None,
        metrics_uids: list[str] | None = None,
    ) -> Any:
        if metrics_generator_output is None:
            metrics_generator_output, metrics_uids = generator_output, uids
        merged, merged_uids, report = merge(generator_output, settings, uids, trainer.tokenizer)
        done = postprocess(merged, merged_uids, metrics_generator_output, metrics_uids)
        trainer.all_metrics.update(report)
        return done

    trainer.postprocess_generator_output = merging
