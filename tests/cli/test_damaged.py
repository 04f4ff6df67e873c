"""Every command over damaged, foreign or hostile trees: an exit code, never a traceback."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from rlskip.store import StepStore

RUN = "grpo_tiny/GBS4_N2_in6_out8"


def commands(root: Path, out: Path) -> list[tuple[object, ...]]:
    run = root / RUN
    return [
        ("ls", root),
        ("ls", root, "--steps", "--json"),
        ("show", 2, "-d", run),
        ("show", run, "--json"),
        ("verify", "-d", root),
        ("compare", run, root / "grpo-lr2_tiny", "--html", out / "both.html"),
        ("prune", root, "--keep-last", 1, "--older-than", "1d"),
        ("export", run, "--to", "jsonl", "--out", out / "rows.jsonl"),
        ("report", run, "--html", out / "page.html"),
        ("prune", root, "--keep-last", 0, "--quarantined", "--yes"),
    ]


def check(rlskip: Any, root: Path, out: Path, what: str, verbs: Sequence[str] = ()) -> None:
    """Run the commands, or those of some verbs."""
    for command in commands(root, out):
        if verbs and command[0] not in verbs:
            continue
        began = time.process_time()
        answer = rlskip(*command)
        assert answer.code in (0, 1, 2), (what, command, answer.err)
        assert len(answer.err.splitlines()) == (answer.code == 2), (what, command, answer.err)
        assert time.process_time() - began < 20, (what, command)


def instead(name: str, make: Callable[[Path], Any]) -> Callable[[Path], None]:
    """Put something else in the place of a file or directory."""

    def do(run: Path) -> None:
        path = run / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        make(path)

    return do


def records(*lines: object) -> Callable[[Path], None]:
    text = "\n".join(one if isinstance(one, str) else json.dumps(one) for one in lines)
    return instead("../../records/job/host-1-a.jsonl", lambda path: path.write_text(text))


def hit(**more: object) -> dict[str, object]:
    return {"role": "rollout", "event": "hit", "run": RUN, "step": 2, **more}


DAMAGE: dict[str, Callable[[Path], None]] = {
    "no meta": lambda run: (run / "2" / "meta.json").unlink(),
    "a deep meta": instead("2/meta.json", lambda p: p.write_text("[" * 100_000)),
    "a truncated dump": instead("2/gen_batch.dp", lambda p: p.write_bytes(b"rlskip\r\n")),
    "a dump that is a FIFO": instead("2/gen_batch.dp", os.mkfifo),
    "a meta that is a directory": instead("2/meta.json", Path.mkdir),
    "a step that is a link": instead("2", lambda p: p.symlink_to(p.with_name("1"))),
    "a call that is a file": instead("2.part-1", lambda p: p.write_text("x")),
    "quarantine with markup": instead("3.bad-[/red]\x1b[2J", Path.mkdir),
    "a run without permission to read": lambda run: run.chmod(0),
    "a name that is not UTF-8": instead(os.fsdecode(b"\xff\xfe"), Path.mkdir),
    "records that are text": records("x", "[]", "null", '{"role": 5}', "[" * 100_000),
    "records of odd values": records(
        hit(seconds_saved="x"), hit(seconds_saved=None), hit(bytes="x"), hit(bytes=-1),
        hit(step="2"), hit(step=[2]), hit(run=["x"]), hit(role=["x"]), hit(event={}),
        '{"role": "r", "event": "hit", "step": 2, "seconds_saved": NaN, "bytes": 1e999}',
    ),
    "records that are a file": instead("../../records", lambda p: p.write_text("x")),
}  # fmt: skip


@pytest.mark.parametrize("which", list(DAMAGE))
def test_no_command_traces_back(rlskip: Any, dumps: Path, tmp_path: Path, which: str) -> None:
    if which.startswith("records"):
        shutil.rmtree(dumps / "records")
    DAMAGE[which](dumps / RUN)
    try:
        check(rlskip, dumps, tmp_path / "out", which, ("ls", "show", "verify", "export", "prune"))
    finally:
        if (dumps / RUN).is_dir():
            (dumps / RUN).chmod(0o700)


@pytest.mark.parametrize("verb", [["ls"], ["verify", "-d"], ["prune", "--keep-last", "1"]])
def test_what_cannot_be_read_is_not_empty(
    rlskip: Any, dumps: Path, monkeypatch: Any, caplog: Any, verb: list[str]
) -> None:
    def refusing(name: str, folder: Path) -> None:
        real = getattr(os, name)

        def call(path: Any = ".") -> Any:
            if path == folder:
                raise PermissionError(13, "Permission denied", str(path))
            return real(path)

        monkeypatch.setattr(os, name, call)

    refusing("scandir", dumps.resolve() / RUN)
    assert rlskip(*verb, dumps).code == 0
    assert f"{RUN} cannot be listed: Permission denied" in caplog.text
    refusing("listdir", dumps)
    said = rlskip(*verb, dumps)
    assert (said.code, "Permission denied" in said.err) == (2, True)


NAN, INF = float("nan"), float("inf")
ODD: dict[str, Any] = {
    "responses that are not numbers": {"responses": torch.tensor([[NAN, 1.0], [INF, 2.0]])},
    "rewards that are text": {"responses": torch.ones(2, 2).long(), "reward": ["x", None]},
    "masks of another shape": {
        "responses": torch.ones(2, 3).long(), "prompts": torch.ones(2, 2).long(),
        "attention_mask": torch.ones(2), "response_mask": torch.ones(2, 7),
    },
    "a mask that is short": {"response_ids": [[1, 2, 3], [4]], "loss_mask": [[1], [1, 1]]},
    "no rows": {"responses": torch.ones(0, 3).long(), "rewards": torch.ones(0)},
    "sessions of odd names": {
        "session_id": [1, 2], "uid": [None, 3.5], "turn": ["a", 1], "is_last_step": ["x", None],
    },
    "numbers beyond 64 bits": {"x": [10**30, 1], "step": [10**30, -1]},
    "half characters": {"text": ["\ud83d", "\x00\x1b[2J"], "uid": ["\udc00", "[/red]"]},
    "nested values": {"x": [{"a": [NAN, {"b": torch.ones(2)}]}, b"bytes"], "y": {"z": 1}},
    "several completions of a prompt": {
        "prompts": ["a", "b"], "responses": [[[1, 2], [3, 4, 5]]] * 2, "rewards": [[1.0, 0.0]] * 2,
        "response_mask": [[[1, 1], [1, 1, 1]]] * 2, "labels": [[[1], [2, 3]]] * 2,
    },
    "nothing": None,
    "rows of which one has more": [{"text": "a"}, {"text": "b", "more": 1}],
    "names of SkyRL": {
        "prompt_token_ids": [[1, 2], [3]], "response_ids": [[4], [5, 6]], "rewards": [0.5, 1.0],
    },
}  # fmt: skip


def test_rollouts_of_any_content_are_shown(rlskip: Any, dumps: Path, tmp_path: Path) -> None:
    """A step each of one run."""
    steps = dict(enumerate(ODD, 10))
    for step, which in steps.items():
        StepStore(dumps / RUN).save(step, ODD[which])
    check(rlskip, dumps, tmp_path / "out", "odd content", ("compare", "export", "report"))
    for step, which in steps.items():
        said = rlskip("show", step, "-d", dumps / RUN)
        assert (said.code, said.err) == (0, ""), which
