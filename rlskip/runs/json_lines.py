"""Rollouts that other programs write, as a run: JSON lines, and the Parquet of TRL.

What rows have in common has the names that :mod:`rlskip.runs` knows; other fields keep theirs.
"""

from __future__ import annotations

import atexit
import json
import logging
import math
import shutil
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rlskip._human import counted
from rlskip.batch.columns import columns_of
from rlskip.batch.row_fields import RowFields
from rlskip.format.dump_errors import DAMAGE, DumpError
from rlskip.runs.tables import extra
from rlskip.store import StepStore
from rlskip.store.layout import as_step

log = logging.getLogger(__name__)

Row = dict[str, Any]
_ENDS = (".jsonl", ".parquet")


def files_in(path: Path) -> list[Path]:
    """The file of rollouts itself, or those in a directory: those of steps, else all."""
    among = path.iterdir() if path.is_dir() else [path]
    found = sorted(file for file in among if file.suffix in _ENDS and file.is_file())
    steps = [file for file in found if as_step(file.stem) is not None]
    return steps or found


def run_of_files(path: Path) -> Path:
    """The directory of a run, gone at exit, with the rows of a file or of those in a directory.

    Raises DumpError where one cannot be read.
    """
    root = Path(tempfile.mkdtemp(prefix="rlskip-foreign-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    run = root / path.stem / "GBSany_Nany_inany_outany"
    store, parts = StepStore(run), Counter[int]()
    for file in files_in(path):
        for step, rows in sorted(_read(file).items()):
            columns = columns_of(rows)
            known = {"group": "uid", "session": "session" if "session" in columns else None}
            info = {**RowFields.of(columns, known).to_meta(), "job": file.name}
            call = f"part-{parts[step]}" if parts[step] else ""
            store.save(step, columns, info=info, call=call)
            parts[step] += 1
    if not parts:
        raise DumpError("it has no rows", str(path))
    return run


def _read(path: Path) -> dict[int, list[Row]]:
    """The rows of a file by step: that of its name, else the one that each names, else 0.

    Rows with equal prompts are one group of their step. Raises DumpError where a line cannot be
    read, or its fields are those of no known program.
    """
    steps: dict[int, list[Row]] = defaultdict(list)
    groups: dict[int, dict[str, str]] = defaultdict(dict)
    of_file, told, number = as_step(path.stem), set[str](), 1
    try:
        for number, line in numbered(path):
            given = json.loads(line) if isinstance(line, str) else line
            if not isinstance(given, dict):
                raise DumpError(f"it is a {type(given).__name__}, not a mapping")
            for row in _rows_of(given, number, told):
                named = row.pop("step", None)
                step = _step_of(named) if of_file is None else of_file
                asked = json.dumps(row.get("input", row.get("raw_prompt")), sort_keys=True)
                name = groups[step].setdefault(asked, str(len(groups[step])))
                steps[step].append({"uid": name, **row})
    except DumpError as error:
        raise DumpError(f"line {number}: {error.what}", str(path), error.remedy) from error
    except (*DAMAGE, RecursionError) as error:
        what = f"line {number} cannot be read: {type(error).__name__}: {error}"
        raise DumpError(what, str(path)) from error
    return steps


def numbered(path: Path) -> Iterator[tuple[int, Any]]:
    """The lines of a file, or the rows of a table."""
    if path.suffix == ".parquet":
        yield from enumerate(extra("pyarrow.parquet").read_table(path).to_pylist(), 1)
        return
    with path.open(encoding="utf-8-sig") as file:
        yield from ((n, line) for n, line in enumerate(file, 1) if line.strip())


def _rows_of(line: Row, number: int, told: set[str]) -> Iterable[Row]:
    """The rows of a line of the program that wrote it, which its fields tell."""
    if "traces" in line:
        return _of_episode(line, number)
    if {"input", "output"} <= line.keys():
        return [line]
    if "messages" in line:
        return [_of_messages(line)]
    if {"prompt", "completion"} <= line.keys():
        return [_of_trl(line, told)]
    there = ", ".join(map(str, line))
    raise DumpError(
        f"its fields are those of no known program: {there:.200}",
        remedy="known are input and output (verl), traces (verifiers, prime-rl), prompt and "
        "completion (TRL), messages; for others give its rows to rlskip.write",
    )


def _step_of(named: Any) -> int:
    is_whole = type(named) is int or (isinstance(named, float) and named.is_integer())
    if named is None or (is_whole and 0 <= named < 1 << 63):
        return int(named or 0)
    raise DumpError(f"its step {named!r:.80} is not a whole number from 0 on")


def _of_messages(row: Row) -> Row:
    """A conversation: what follows the messages before the assistant's first is sampled."""
    messages = row.pop("messages") or []
    roles = [one.get("role") for one in messages]
    at = roles.index("assistant") if "assistant" in roles else len(messages)
    return {"raw_prompt": messages[:at], "completions": messages[at:], **row}


def _of_trl(row: Row, told: set[str]) -> Row:
    """A completion: a reward for each function, whose sum is the session's.

    The names of several are `told` once a file.
    """
    made = {"raw_prompt": row.pop("prompt"), "completions": row.pop("completion"), **row}
    if not {"reward", "rewards", "score"} & row.keys():
        earned = {n: v for n, v in row.items() if type(v) in (int, float) and math.isfinite(v)}
        for name in ("step", "advantage"):
            earned.pop(name, None)
        made["reward"] = sum(earned.values()) if earned else None
        if len(earned) > 1 and not told:
            told |= {*earned}
            log.warning("rlskip: the reward of each row is the sum of %s", ", ".join(sorted(told)))
    return made


def _of_episode(episode: Row, number: int) -> Iterator[Row]:
    """A row for each branch of each trace: a path through its messages.

    The group is the episode's, else the task's hash or index; the reward is the weighted sum. All
    that a trace or an episode has besides stays together, as ``trace`` and ``episode``.
    """
    group = (episode.get("group") or {}).get("id")
    about = {name: value for name, value in episode.items() if name != "traces"}
    step = ((episode.get("run") or {}).get("work") or {}).get("step")
    for k, trace in enumerate(episode["traces"]):
        task = trace.get("task") or {}
        uid = group or task.get("hash") or (task.get("data") or {}).get("idx", number - 1)
        rewards = [r for r in (trace.get("rewards") or {}).values() if r is not None]
        reward = sum(r["score"] * r.get("weight", 1.0) for r in rewards) if rewards else None
        rest = {name: value for name, value in trace.items() if name not in ("nodes", "calls")}
        for branch, nodes in enumerate(_branches(trace.get("nodes") or [])):
            yield {
                "step": step,
                "uid": str(uid),
                "session": f"{number - 1}.{k}.{branch}",
                **_of_nodes(nodes),
                "reward": reward,
                "trace": rest,
                "episode": about,
            }


def _branches(nodes: Sequence[Row]) -> Iterator[list[Row]]:
    """The path to each message that is not another one's parent."""
    parents = [node.get("parent") for node in nodes]
    rooted = set[int]()
    while new := {i for i, at in enumerate(parents) if at is None or at in rooted} - rooted:
        rooted |= new
    if len(rooted) < len(nodes):
        raise DumpError("a message of a trace is its own parent, or has one that is not there")
    for leaf in sorted(rooted - {*parents}):
        path: list[Row] = []
        at: int | None = leaf
        while at is not None:
            path.append(nodes[at])
            at = parents[at]
        yield path[::-1]


def _of_nodes(nodes: Sequence[Row]) -> Row:
    """A path of messages: up to the first sampled token it is the prompt.

    Log-probs are 0 at tokens that were not sampled, and NaN where they are not known. Raises
    DumpError for another number of masks than tokens, or of log-probs than sampled tokens.
    """
    tokens: list[int] = []
    mask: list[int] = []
    probs: list[float] = []
    for node in nodes:
        own = node.get("token_ids") or []
        flags = [int(bool(flag)) for flag in node.get("mask") or [0] * len(own)]
        known = node.get("logprobs") or [math.nan] * sum(flags)  # of sampled tokens
        if len(flags) != len(own) or len(known) != sum(flags):
            raise DumpError(
                f"a message of a trace has {counted(len(own), 'token')}, a mask of {len(flags)} "
                f"({sum(flags)} sampled) and {counted(len(known), 'log-prob')}"
            )
        given = (math.nan if value is None else value for value in known)
        tokens += own
        mask += flags
        probs += [next(given) if flag else 0.0 for flag in flags]
    first = mask.index(1) if 1 in mask else len(tokens)
    is_known = any(flag and p == p for flag, p in zip(mask, probs, strict=True))
    turn = next((i for i, node in enumerate(nodes) if node.get("sampled")), len(nodes))
    messages = [node["message"] for node in nodes]
    row: Row = {"raw_prompt": messages[:turn], "completions": messages[turn:]}
    if tokens:
        row |= {"prompt_ids": tokens[:first], "completion_ids": tokens[first:]}
        row["completion_mask"] = mask[first:]
        row["logprobs"] = probs[first:] if is_known else None
    return row
