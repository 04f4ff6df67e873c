"""After the start, storage is never a reason for training to end."""

from __future__ import annotations

import os
import resource
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rlskip import SkipManager
from rlskip.jobs import alive
from rlskip.store import StepStore
from tests.faults.operations import STAGES, generate
from tests.skip.prompt_stages import run
from tests.skip.trainers import role_of, steps_on_disk, visit


@pytest.mark.parametrize("role", STAGES)
@pytest.mark.parametrize(
    "place",
    [lambda path: path.write_text("x"), lambda path: path.symlink_to(path), os.mkfifo, str],
    ids=["a file", "a looping link", "a FIFO", "nothing"],
)
@pytest.mark.parametrize("below", ["", "*_*", "*_*/GBS*", "*_*/GBS*/1"])
def test_what_takes_a_directorys_place_costs_a_miss(
    init: Callable[..., Path], role: str, place: Callable[[Path], Any], below: str
) -> None:
    dumps = init(role, n=1, wait_s=0.2, at=1)
    STAGES[role](1)
    (folder,) = dumps.glob(below) if below else [dumps]
    shutil.rmtree(folder)
    place(folder)
    assert STAGES[role](1)["ids"] == [1]


@pytest.mark.parametrize("error", [OSError(5, "bad disk"), MemoryError(), MemoryError("big")])
@pytest.mark.parametrize("where", ["read_meta", "load"])
def test_whatever_the_store_raises_while_reading_is_a_miss(
    init: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
    where: str,
) -> None:
    init(at=1)
    generate([1])

    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(StepStore, where, fail)
    visit(1)
    assert generate([1])["ids"] == [1]
    assert "step 1 counts as a miss" in caplog.text


@pytest.mark.parametrize("background", [True, False])
def test_masks_of_another_length_cost_the_dump_and_never_the_rollouts(
    init: Callable[..., Path], caplog: pytest.LogCaptureFixture, background: bool
) -> None:
    masks = [[1, 0], [1]]
    made = {"response_ids": [[5, 6], [7, 8]], "loss_masks": masks}
    sample = SkipManager.annotate(role="rollout")(lambda prompts: made)
    dump_dir = init(background_write=background)
    assert all(got["loss_masks"] is masks for got in run(sample, [1, 2], [1, 2]))
    SkipManager.flush()
    assert steps_on_disk(dump_dir) == []
    assert caplog.text.count("was NOT dumped, training goes on") == 1
    assert "LengthError" in caplog.text
    assert "loss_masks has 1 value in row 1, and its response has 2 tokens" in caplog.text
    masks[1] = [1, 1]
    run(sample, [1, 2], first=3)
    SkipManager.flush()
    assert steps_on_disk(dump_dir) == ["3"]


@pytest.mark.parametrize("background", [True, False])
def test_without_threads_training_goes_on(
    init: Callable[..., Path], monkeypatch: Any, caplog: Any, background: bool
) -> None:
    dumps = init(background_write=background, wait_s=5)
    rollouts = {str(i): torch.arange(1_000_000) + i for i in range(4)}
    stage = SkipManager.annotate(role="rollout")(lambda prompts: rollouts)

    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(alive, "_HEART", alive._Heart())  # the other beats since an earlier test
    monkeypatch.setattr(threading.Thread, "start", refuse)
    run(stage, [1], [2])
    SkipManager.flush()
    assert steps_on_disk(dumps) == ["1", "2"]
    said = "dumps are written without a separate thread: can't start new thread"
    assert (said in caplog.text) is background
    init(on_miss="error")
    for got in run(stage, [1], [2]):
        assert all(torch.equal(got[name], rollouts[name]) for name in rollouts)


@pytest.mark.parametrize(
    "groups",
    [
        *("x", 5, None, [1], [[1, 2]], [["c", "p", True, "s"]], [[[], 0, True, "s"]]),
        *([["c", 0, True, []]], [[None, 0, True, None]] * 2),
    ],
    ids=repr,
)
@pytest.mark.parametrize("content", [None, {"groups": [], "keys": ["x"], "fields": 5}, {}])
def test_a_forged_part_of_a_queue_is_a_miss(
    init: Callable[..., Path], groups: Any, content: Any
) -> None:
    init("rollout_tq", n=1, on_mismatch="regenerate", at=1)
    STAGES["rollout_tq"](1)
    skip = role_of("rollout_tq")
    meta = skip.dumps.store.read_meta(1)
    shutil.rmtree(skip.dumps.directory)
    skip.dumps.store.save(1, content, identity=None, info={**meta.info, "groups": groups})
    init("rollout_tq", n=1, on_mismatch="regenerate", at=1)
    assert STAGES["rollout_tq"](1)["ids"] == [1]


def test_no_descriptor_is_left(init: Callable[..., Path]) -> None:
    init(at=1)
    generate([1])
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
        while True:
            try:
                held.append(os.open("/dev/null", os.O_RDONLY))
            except OSError:
                break
        assert [got["ids"] for got in run(generate, [1], [2])] == [[1], [2]]
    finally:
        for handle in held:
            os.close(handle)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
