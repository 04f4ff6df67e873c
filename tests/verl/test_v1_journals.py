"""The journals of a V1 run: where they are, what their sessions depend on, who resumes. No verl."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig

from rlskip.config.nodes import read_node
from rlskip.config.other_nodes import DispatchConfig
from rlskip.dispatch import Session
from rlskip.errors import ConfigError
from rlskip.hosts.verl import handshake
from rlskip.hosts.verl import queue as verl_queue
from rlskip.hosts.verl.queue import AttemptKeys, running, sharing, start_journals
from rlskip.hosts.verl.trainer_config import plug_in
from rlskip.keys import prompt_tag, session_tag
from rlskip.queue import MemoryQueue, ReplayBuffer
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
        (ON, "verl: '0.9.2' now"),  # nothing but another release of verl
    ],
)
def test_what_sessions_depend_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str, named: str
) -> None:
    before = start(verl(tmp_path, *ROLLOUT_LEVEL)).writer.identity
    if change == ON:
        monkeypatch.setattr(verl_queue, "verl_release", lambda: "0.9.2")
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


class Transfer:
    """The two names of `transfer_queue` that verl's worker uses, over a queue of this process."""

    def __init__(self, queue: MemoryQueue) -> None:
        self._queue = queue

    def init(self) -> str:
        return "joined"

    async def async_kv_batch_put(
        self, keys: list[str], partition_id: str, fields: Any, tags: Any
    ) -> None:
        self._queue.put(keys, partition_id, fields, tags)


def test_a_late_attempt_neither_replaces_rows_nor_mixes_with_them() -> None:
    queue = MemoryQueue()
    transfer = AttemptKeys(Transfer(queue))
    assert transfer.init() == "joined"
    late = asyncio.Event()

    async def attempt(number: int, rows: int) -> None:
        """What AgentLoopWorkerTQ writes at the end of a session."""
        running.set(Session("u", 0, 1, number, 1, 0, 0, False, 7, "train"))
        if number == 0:
            await late.wait()
        await transfer.async_kv_batch_put(
            keys=[f"u_0_{i}" for i in range(rows)],
            fields=[{"made_by": number} for _ in range(rows)],
            tags=[{"status": "success", "seq_len": 4} for _ in range(rows)],
            partition_id="train",
        )

    async def run() -> None:
        given_up = asyncio.create_task(attempt(0, 1))
        await asyncio.create_task(attempt(1, 2))
        queue.put(["u_sess0"], "train", tags=[session_tag(0, attempt=1)])
        late.set()
        await given_up

    queue.put(["u"], "train", tags=[prompt_tag(1, 1)])
    asyncio.run(run())
    batch, _ = ReplayBuffer(queue, {"replay": {"timeout_s": 2.0}}).sample(1, "train", 1)
    assert batch.keys == ["u_0_1000000", "u_0_1000001"]
    assert [tag["seq_len"] for tag in batch.tags] == [4, 4]
    assert list(queue.get(batch.keys, "train")["made_by"]) == [1, 1]
