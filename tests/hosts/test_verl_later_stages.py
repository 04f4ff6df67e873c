"""Roles `ref` and `reward` of verl: what their settings say, and what is left out. No verl."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import DictConfig

from rlskip.errors import ConfigError, MismatchError
from rlskip.hosts.verl import later_stages
from rlskip.hosts.verl.later_stages import identity
from rlskip.hosts.verl.no_engine import before_workers
from rlskip.hosts.verl.trainer import begin
from rlskip.skip import SkipManager
from tests.hosts import verl_config

ON = tuple(f"skip.{role}.enable=true" for role in ("rollout", "ref", "reward"))
verl = functools.partial(verl_config.verl, *ON, "trainer.total_training_steps=2")


@pytest.mark.parametrize(
    ("role", "change", "differs"),
    [
        ("ref", "actor_rollout_ref.model.path=other", True),
        ("ref", "actor_rollout_ref.model.override_config.attn=sdpa", True),
        ("ref", "actor_rollout_ref.ref.fsdp_config.dtype=float32", True),
        ("ref", "actor_rollout_ref.rollout.temperature=0.7", True),
        ("ref", "actor_rollout_ref.model.lora_rank=8", True),
        ("ref", "actor_rollout_ref.model.lora_adapter_path=adapter", True),
        ("ref", "actor_rollout_ref.ref.log_prob_micro_batch_size=8", False),
        ("ref", "actor_rollout_ref.ref.fsdp_config.param_offload=true", False),
        ("ref", "reward.reward_manager.name=dapo", False),
        ("reward", "reward.custom_reward_function.name=other", True),
        ("reward", "reward.custom_reward_function.reward_kwargs.scale=2", True),
        ("reward", "reward.reward_manager.name=dapo", True),
        ("reward", "reward.reward_kwargs.overlong=1", True),
        ("reward", "reward.reward_model.model_path=other", True),
        ("reward", "reward.sandbox_fusion.url=http://sandbox", True),
        ("reward", "reward.num_workers=1", False),
        ("reward", "actor_rollout_ref.model.path=other", False),
    ],
)
def test_what_shapes_a_result_belongs_to_its_identity(
    role: str, change: str, differs: bool
) -> None:
    assert (identity(role, verl()) != identity(role, verl(change))) is differs


PATHS = ("reward.custom_reward_function.path", "reward.reward_manager.module.path")


@pytest.mark.parametrize("key", PATHS)
@pytest.mark.parametrize(
    "form", ["{file}", "file://{file}", "pkg://rewards_{n}.own", "pkg://rewards_{n}/own"]
)
def test_a_reward_function_that_is_edited_is_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, form: str
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    n = tmp_path.name
    file = tmp_path / f"rewards_{n}" / "own.py"
    file.parent.mkdir()
    config = verl(f"{key}={form.format(file=file, n=n)}")
    found = []
    for text in ("return 1", "return 2", "return 2"):
        file.write_text(text)
        found.append(identity("reward", config))
    assert found[0] != found[1] == found[2]
    file.unlink()
    importlib.invalidate_caches()
    with pytest.raises(ConfigError, match=f"^{key}: .* cannot be read here"):
        identity("reward", config)


def test_what_workers_have_loaded_counts_and_not_what_was_edited_later(
    begun: Callable[..., DictConfig], tmp_path: Path
) -> None:
    file = tmp_path / "reward.py"
    path = f"{PATHS[0]}={file}"
    file.write_text("return 1")
    config = begun(path)
    loaded = identity("reward", config)
    file.write_text("return 2")
    before_workers(config, 2)
    assert SkipManager.settings is not None
    called_with = SkipManager.settings.facts.called_with
    assert called_with["reward"] == loaded != identity("reward", config)
    file.unlink()
    with pytest.raises(ConfigError, match="cannot be read here"):
        begun(path)
    begun(path, "skip.reward.enable=false")


@pytest.fixture
def begun(tmp_path: Path, verl_process: None) -> Callable[..., DictConfig]:
    def begin_with(*more: str) -> DictConfig:
        config = verl(f"skip.dump_dir={tmp_path}", *more)
        begin(config)
        return config

    return begin_with


def test_tokens_that_were_sampled_again_are_computed_and_another_model_is_refused(
    begun: Callable[..., DictConfig],
) -> None:
    """The dump of the rollouts was damaged, say, and that of their log-probs was not."""
    computed: list[str] = []

    @later_stages._computing_ref
    def compute(self: Any, batch: Any) -> str:
        computed.append(batch.batch["responses"])
        return f"log-probs of {computed[-1]}"

    def run(tokens: str, *more: str) -> str:
        trainer = SimpleNamespace(config=begun(*more))
        SkipManager.set_step(1)
        batch = SimpleNamespace(batch={"responses": tokens}, non_tensor_batch={})
        return str(compute(trainer, batch))

    for tokens in ("a", "b", "b", "a"):
        assert run(tokens) == f"log-probs of {tokens}"
    assert computed == ["a", "b"]
    with pytest.raises(MismatchError, match=r"actor_rollout_ref\.model\.path: 'other' now"):
        run("b", "actor_rollout_ref.model.path=other")


def test_log_probs_of_v1_go_to_its_queue_whoever_computed_them(
    begun: Callable[..., DictConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    put: list[Any] = []
    queue = SimpleNamespace(kv_batch_put=lambda fields, **_: put.append(fields))
    monkeypatch.setitem(sys.modules, "transfer_queue", queue)
    monkeypatch.setattr(
        later_stages, "rows_of", lambda batch, names: {n: batch.rows.get(n) for n in names}
    )

    @later_stages._computing_ref_v1
    def compute(self: Any, batch: Any, metrics: Any) -> None:
        batch.rows["ref_log_prob"] = f"after {len(put)}"

    for _ in range(2):
        trainer = SimpleNamespace(config=begun())
        SkipManager.set_step(1)
        batch = SimpleNamespace(rows={"responses": "a"}, keys=["k"], partition_id="train")
        assert compute(trainer, batch, {}) is batch
    assert put == [{"ref_log_prob": "after 0"}] * 2


@pytest.mark.parametrize("how", ["skip.action=repeat", "algorithm.filter_groups.enable=true"])
def test_dropped_scores_are_those_of_rollouts_and_a_repeat_goes_by_tokens(
    begun: Callable[..., DictConfig], how: str
) -> None:
    begun("skip.drop_fields=[rm_scores,other]", how)
    roles = {name: skip.local_config for name, skip in SkipManager.skip_instances.items()}
    for name in ("ref", "reward"):
        assert (roles[name].drop_fields, roles[name].action, roles[name].match) == (
            ["other"], "cache", "run",
        )  # fmt: skip
