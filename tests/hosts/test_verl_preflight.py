"""What verl's config or the dumps leave for an engine to do is refused, all at once. No verl."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
from omegaconf import DictConfig, OmegaConf

from rlskip.config.check import raise_all
from rlskip.config.settings import read_skip
from rlskip.errors import ConfigError, NoEngineError
from rlskip.hosts.verl import no_engine
from rlskip.hosts.verl.no_engine import NO_ENGINE, NoWorker, before_workers
from rlskip.hosts.verl.trainer import begin
from rlskip.hosts.verl.trainer_config import FULLY_ASYNC_MAIN, ONE_STEP_OFF, judge
from rlskip.skip import SkipManager
from tests.hosts import verl_config


@pytest.fixture
def verl(tmp_path: Path, verl_process: None) -> Callable[..., DictConfig]:
    """``verl("key=value", ...)``: an installed config; ``dumped=(1, 2)`` are the steps on disk."""

    def make(*more: str, dumped: tuple[int, ...] = (1, 2, 3, 4)) -> DictConfig:
        on = ("skip.rollout.enable=true", "skip.start_engine=false", f"skip.dump_dir={tmp_path}")
        config = verl_config.verl(*on, f"trainer.default_local_dir={tmp_path}/ckpt", *more)
        begin(config)
        for step in dumped:
            SkipManager.store("rollout").save(step, [step])
        return config

    return make


ALL = (1, 2, 3, 4)
VALIDATES = ("trainer.val_before_train=true", "trainer.test_freq=3", "skip.validation=replay")
VAL_ONLY = "trainer.val_only=true"
FILTERS = "algorithm.filter_groups.enable=true"
ENGINE = ("skip.start_engine=true", "skip.on_miss=error", "trainer.val_before_train=true")


@pytest.mark.parametrize(
    ("more", "dumped", "validated", "problems"),
    [
        ((), ALL, (), ()),
        (
            ("skip.steps=[1,2,3]", "trainer.val_before_train=true", "trainer.test_freq=5"),
            (1, 3),
            (),
            (
                "4 problems",
                "skip.rollout.on_miss=error: steps 2 have no usable dump in",
                "trainer.val_before_train: validation generates, and skip.start_engine=false",
                "set trainer.val_before_train=False",
                "set trainer.test_freq=-1, or skip.validation=replay",
                "skip.rollout.steps: steps 4 are not listed and would generate",
                "set 'skip.steps=\"1-4\"'",  # and not fewer: the others would generate
            ),
        ),
        # Validation needs a dump at each step that validates, the last one too.
        (VALIDATES, ALL, (3,), ("skip.rollout_val.on_miss=error: steps 0,4 have no usable",)),
        (VALIDATES, ALL, (0, 3, 4), ()),
        (
            (*VALIDATES, "skip.rollout_val.steps=[0,3]"),
            ALL,
            (0, 3, 4),
            ("skip.rollout_val.steps: steps 4 are not listed", "set skip.rollout_val.steps=all"),
        ),
        # A run that only validates needs no dump of training.
        ((VAL_ONLY,), (), (), ("set trainer.val_only=False",)),
        ((*VALIDATES, VAL_ONLY), (), (), ("steps 0 have no usable dump",)),
        ((*VALIDATES, VAL_ONLY), (), (0,), ()),
        # DAPO's number of batches is known, and not that of its steps.
        ((FILTERS, "skip.steps=[1,2]"), (1, 2), (), ()),
        ((FILTERS, "skip.steps=[1]"), (1, 2), (), ("steps 2 are not listed",)),
        # Engines with GPUs of their own.
        (
            ("trainer.use_v1=true", "trainer.v1.trainer_mode=separate_async"),
            ALL,
            (),
            ("set trainer.v1.trainer_mode=colocate_async, or skip.start_engine=true",),
        ),
        (("async_training.staleness=0",), ALL, (), ("set skip.start_engine=true",)),
        (
            ("actor_rollout_ref.hybrid_engine=false",),
            ALL,
            (),
            ("set actor_rollout_ref.hybrid_engine=True",),
        ),
        # With an engine only holes are refused.
        (ENGINE, (1, 3), (), ("steps 2,4 have no usable dump",)),
        ((*ENGINE, "skip.steps=[1,3]"), (1, 3), (), ()),
        # Steps before a checkpoint need no dump.
        (("trainer.resume_mode=auto", "skip.steps=3-4"), (3, 4), (), ()),
        (
            (
                "trainer.resume_mode=resume_path",
                "trainer.resume_from_path=ckpt/global_step_2/",
                "skip.steps=3-4",
            ),
            (3, 4),
            (),
            (),
        ),
    ],
)
def test_all_that_would_generate_is_named_at_once(
    verl: Callable[..., DictConfig],
    tmp_path: Path,
    more: tuple[str, ...],
    dumped: tuple[int, ...],
    validated: tuple[int, ...],
    problems: tuple[str, ...],
) -> None:
    """The launcher looks before Ray starts, and the process that trains before its workers."""
    (tmp_path / "ckpt").mkdir()
    (tmp_path / "ckpt" / "latest_checkpointed_iteration.txt").write_text("2")
    config = verl(*more, dumped=dumped)
    for step in validated:
        SkipManager.store("rollout_val").save(step, [step])
    total, said = config.trainer.total_training_steps, set()
    for look in (launch, functools.partial(before_workers, total=total)):
        if not problems:
            look(config)
            continue
        with pytest.raises(ConfigError) as error:
            look(config)
        said.add(str(error.value))
    assert len(said) == bool(problems), "both say the same"
    assert [text for text in problems if text not in "".join(said)] == []
    is_chosen = config.actor_rollout_ref.rollout.name == NO_ENGINE
    assert is_chosen is not (bool(problems) or more[:3] == ENGINE)
    if FILTERS in more:
        assert SkipManager.skip_instances["rollout"].local_config.match == "run"


def launch(config: DictConfig) -> None:
    raise_all(no_engine.problems(read_skip(config), SkipManager.skip_instances))


def test_epochs_may_end_before_the_last_step(verl: Callable[..., DictConfig]) -> None:
    """verl validates at the step that it takes for its last, and not at that of the epochs."""
    replay = ("trainer.test_freq=3", "skip.validation=replay", "trainer.total_epochs=1")
    config = verl(*replay, dumped=(1, 2))
    launch(config)
    before_workers(config, 4, 2)
    assert config.actor_rollout_ref.rollout.name == NO_ENGINE
    with pytest.raises(ConfigError) as error:
        before_workers(config, 4, 3)
    for role in ("rollout", "rollout_val"):
        assert f"skip.{role}.on_miss=error: steps 3 have no usable dump" in str(error.value)


def test_a_run_that_needs_no_engine_gets_none(verl: Callable[..., DictConfig]) -> None:
    config = verl()
    launch(config)
    before_workers(config, 4)
    rollout = config.actor_rollout_ref.rollout
    assert rollout.name == NO_ENGINE
    assert (rollout.tensor_model_parallel_size, rollout.disaggregation.enabled) == (1, False)
    with pytest.raises(NoEngineError, match="step 7 asks for validation") as error:
        NoWorker().generate_sequences.remote({"global_steps": 7, "validate": True})
    assert error.value.where == "skip.start_engine=false"


V1 = "trainer.use_v1=true"
ROLLOUT, TQ, ASYNC, REF, REWARD = (
    f"skip.{role}.enable=true"
    for role in ("rollout", "rollout_tq", "async_rollout", "ref", "reward")
)
LATER, LATER_V1 = (ROLLOUT, REF, REWARD), (V1, TQ, REF, REWARD)
COLOCATED = "reward.reward_model.enable=true"
OWN_ASYNC_MAIN = FULLY_ASYNC_MAIN.replace("verl.", "mine.")
NO_REWARD = ("skip.reward.enable", "skip.drop_fields=[rm_scores]")
NO_REF = ("skip.ref.enable", "use_kl_in_reward")


@pytest.mark.parametrize(
    ("main", "more", "said"),
    [
        # A recipe's own task runner makes a V0 trainer, and has verl's default of use_v1.
        ("dapo.main_dapo", (V1, ROLLOUT), ()),
        ("dapo.main_dapo", (V1, TQ), ()),
        ("verl.trainer.main_ppo", (V1, ROLLOUT), ("+skip=rollout_tq_cache), or trainer.use_v1=F",)),
        (None, (V1, ROLLOUT), ("or trainer.use_v1=False",)),
        (ONE_STEP_OFF, (V1, ROLLOUT), ()),
        (ONE_STEP_OFF, (V1, TQ), ("-> use skip.rollout (+skip=rollout_cache)",)),
        (FULLY_ASYNC_MAIN, (V1, ASYNC), ()),
        (
            FULLY_ASYNC_MAIN,
            (V1, ROLLOUT),
            ("-> use skip.async_rollout (+skip=async_rollout_cache)",),
        ),
        # Later stages.
        (None, (*LATER, COLOCATED), ()),
        (None, (*LATER_V1, COLOCATED), ()),
        (None, LATER, NO_REWARD),
        (None, (*LATER, "actor_rollout_ref.actor.use_kl_loss=false"), NO_REF),
        (None, (*LATER_V1, COLOCATED, "reward.reward_model.enable_resource_pool=true"), NO_REWARD),
        (None, (*LATER_V1, "skip.attach.reward=mine:score"), ()),
        (OWN_ASYNC_MAIN, (*LATER, "async_training.x=1"), ("skip.reward.enable", "async")),
    ],
)
def test_a_role_that_the_trainer_never_calls_is_refused(
    main: str | None, more: tuple[str, ...], said: tuple[str, ...]
) -> None:
    """The application and the config tell which trainer it is."""
    config = verl_config.verl(*more)
    if said:
        with pytest.raises(ConfigError) as error:
            judge(config, read_skip(config), main)
        assert [text for text in said if text not in str(error.value)] == []
        config.skip = None
    judge(config, read_skip(config), main)


@pytest.mark.parametrize(("use_v1", "kept"), [(True, None), (False, "own.Manager")])
def test_a_manager_of_the_users_own_is_made_under_v0_only(
    verl: Callable[..., DictConfig], use_v1: bool, kept: str | None
) -> None:
    key = "actor_rollout_ref.rollout.agent.agent_loop_manager_class"
    config = verl(f"{key}=own.Manager", f"trainer.use_v1={use_v1}")
    before_workers(config, 4)
    assert OmegaConf.select(config, key) == kept


def test_the_number_of_steps_may_be_known_late(verl: Callable[..., DictConfig]) -> None:
    config = verl("trainer.total_training_steps=null")
    launch(config)
    with pytest.raises(ConfigError, match="steps 5,6 have no usable dump"):
        before_workers(config, 6)
