"""The journals of a V1 run: where they are, what their sessions depend on, who resumes. No verl."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig

from rlskip.config.nodes import read_node
from rlskip.config.other_nodes import DispatchConfig
from rlskip.errors import ConfigError
from rlskip.hosts.verl import handshake
from rlskip.hosts.verl import queue as verl_queue
from rlskip.hosts.verl.queue import sharing, start_journals
from rlskip.hosts.verl.trainer_config import plug_in
from rlskip.queue import MemoryQueue
from rlskip.skip import SkipManager
from tests.hosts import verl_config

RUN = "e_p/GBS4_N4_in64_out16"
MODE = "trainer.v1.trainer_mode"
ON = "skip.rollout_tq.enable=true"
ROLLOUT_LEVEL = (ON, "dispatch.rollout_level=true", "dispatch.journal=true")


@pytest.fixture(autouse=True)
def _afterwards() -> Any:
    yield
    verl_queue._journals = None


def verl(folder: Path, *more: str) -> DictConfig:
    """A config as the trainer gets it, with the roles that it switches on."""
    config = verl_config.verl("trainer.use_v1=true", f"skip.dump_dir={folder}", *more)
    SkipManager.init(config)
    return config


def start(config: DictConfig) -> Any:
    plug_in(config, SkipManager.skip_instances)
    return start_journals(config, read_node(DispatchConfig, config), MemoryQueue())


def test_journals_are_beside_the_dumps(tmp_path: Path) -> None:
    assert start(verl(tmp_path, *ROLLOUT_LEVEL))._store.directory == tmp_path / RUN
    assert start(verl(tmp_path, ON)) is None


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("actor_rollout_ref.rollout.temperature=0.5", "sampling.temperature"),
        ("actor_rollout_ref.rollout.calculate_log_probs=true", "calculate_log_probs"),
        ("data.seed=7", "dispatch.seed"),
    ],
)
def test_what_sessions_depend_on(tmp_path: Path, change: str, named: str) -> None:
    before = start(verl(tmp_path, *ROLLOUT_LEVEL)).writer.identity
    after = start(verl(tmp_path, *ROLLOUT_LEVEL, change)).writer.identity
    (differs,) = after.differences(before)[0]
    assert named in differs


def test_a_worker_that_would_write_journals_elsewhere_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a worker calls first, before and after its node lost sight of the directory."""
    monkeypatch.setattr(handshake, "SHOWN_S", 0.1)
    config = verl(tmp_path, *ROLLOUT_LEVEL)
    start(config)
    shares = sharing()
    assert shares is not None
    shares()
    (tmp_path / "records").rename(tmp_path / "on another disk")
    with pytest.raises(ConfigError, match=r"skip\.rollout_tq\.dump_dir .*it is not shared"):
        shares()


def test_another_release_of_verl_differs(tmp_path: Path, monkeypatch: Any) -> None:
    before = start(verl(tmp_path, *ROLLOUT_LEVEL)).writer.identity
    monkeypatch.setattr(verl_queue, "verl_release", lambda: "0.9.2")
    assert start(verl(tmp_path, *ROLLOUT_LEVEL)).writer.identity.differences(before)[0]


@pytest.mark.parametrize(
    ("more", "span"),
    [
        ((f"{MODE}=sync",), 1),
        ((f"{MODE}=colocate_async",), 8),
        (
            (
                f"{MODE}=colocate_async",
                "replay.max_off_policy_strategy=wait",
                "replay.max_off_policy_threshold=3",
            ),
            3,
        ),
        ((f"{MODE}=colocate_async", "trainer.v1.sampler.max_off_policy_threshold=null"), None),
    ],
)
def test_how_stale_a_session_may_be(tmp_path: Path, more: tuple[str, ...], span: Any) -> None:
    assert start(verl(tmp_path, *ROLLOUT_LEVEL, *more))._max_span == span
