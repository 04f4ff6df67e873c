"""Files of other programs as steps of rows: slime's and miles' samples, verl's JSONL, verifiers'.

A step becomes a mapping of columns under the names that :mod:`rlskip.runs` knows.
``docs/interop.md`` lists what becomes of each field. What has no place there keeps its name.
"""

from __future__ import annotations

import json
import math
import re
import zipfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rlskip.batch.row_fields import RowFields
from rlskip.config.skip import VALIDATION_ROLE
from rlskip.interop.bounds import Budget, Expansion, ForeignDumpError
from rlskip.interop.content import Content, Format, Into
from rlskip.interop.pickles import read_archive

Row = dict[str, Any]

_SAVED = ("traces.jsonl", "results.jsonl")
# slime begins with it what stands for the number in the name of a file of an evaluation.
_EVALUATION = re.compile(r"(?:.*[^a-z])?eval_[0-9]+")
_NUMBER = re.compile(r"(?:.*[^0-9])?([0-9]{1,18})")


def _contents(
    steps: Iterable[tuple[int, list[Row]]], budget: Budget, role: str = "rollout"
) -> Iterator[Content]:
    """Steps of rows as mappings of columns, of which each has a value for each row."""
    for number, rows in steps:
        names = dict.fromkeys(name for row in rows for name in row)
        budget.spend(8 * len(names) * len(rows))
        columns = {name: [row.get(name) for row in rows] for name in names}
        known = {"group": "uid", "session": "session" if "session" in names else None}
        meta = RowFields.of(names, known).to_meta()
        yield Content(number, columns, len(rows), meta, role=role)


# -- slime, miles --------------------------------------------------------------------------


def _read_slime(path: Path, into: Into) -> Iterator[Content]:
    """What ``--save-debug-rollout-data`` writes: ``rollout_id`` and a mapping for each sample."""
    found = read_archive(path)
    samples = found.get("samples") if isinstance(found, dict) else None
    if not isinstance(samples, list) or not all(isinstance(one, dict) for one in samples):
        what = "it does not hold samples of slime or miles"
        remedy = "give a file of --save-debug-rollout-data or --save-debug-train-data"
        raise ForeignDumpError(what, str(path), remedy)
    number = found.get("rollout_id")
    number = number if type(number) is int else _number_in(path)
    rows = list(map(_of_sample, samples))
    role = VALIDATION_ROLE if _EVALUATION.fullmatch(path.stem) else "rollout"
    yield from _contents([(_step(into, number, path), rows)], _budget(path), role)


def _of_sample(sample: Row) -> Row:
    own = dict(sample)
    tokens, length = _list(own.pop("tokens", ())), int(own.pop("response_length", 0) or 0)
    at = len(tokens) - length
    group, mask = own.get("group_index"), own.pop("loss_mask", None)
    probs = own.pop("rollout_log_probs", None)
    return {
        "uid": "None" if group is None else str(group),
        "session": own.get("index"),
        "prompt_ids": tokens[:at],
        "completion_ids": tokens[at:],
        "completion_mask": [1] * length if mask is None else _list(mask),
        "logprobs": None if probs is None else _list(probs),
        **own,
    }


def _list(value: Any) -> list[Any]:
    return list(value.tolist() if hasattr(value, "tolist") else value)


# -- verl ----------------------------------------------------------------------------------


def _read_verl(path: Path, into: Into) -> Iterator[Content]:
    """What ``trainer.rollout_data_dir`` collects: a file a step, a line a sample, as text."""
    # Without the step, which the dump has.
    rows = [{k: value for k, value in row.items() if k != "step"} for row in _lines(path)]
    groups: dict[str, str] = {}
    for row in rows:
        row["uid"] = groups.setdefault(str(row.get("input")), str(len(groups)))
    yield from _contents([(_step(into, _number_in(path), path), rows)], _budget(path))


# -- verifiers, prime-rl -------------------------------------------------------------------


def _read_verifiers(path: Path, into: Into) -> Iterator[Content]:
    """Saved episodes (``traces.jsonl``), or the rows of older versions (``results.jsonl``)."""
    steps: dict[int, list[Row]] = defaultdict(list)
    budget = _budget(path)
    for number, line in enumerate(_lines(path)):
        work = (line.get("run") or {}).get("work") or {}
        is_episode = "traces" in line
        rows = _of_episode(line, number, budget) if is_episode else [_of_result(line, number)]
        steps[_step(into, work.get("step", 0), path)] += rows
    yield from _contents(sorted(steps.items()), budget)


def _of_episode(episode: Row, number: int, budget: Budget) -> list[Row]:
    """A row for each branch of each trace: a path through its messages."""
    group = (episode.get("group") or {}).get("id")
    about = {name: value for name, value in episode.items() if name != "traces"}
    rows, expansion = [], Expansion(budget)
    for k, trace in enumerate(episode["traces"]):
        task = trace.get("task") or {}
        uid = group or task.get("hash") or (task.get("data") or {}).get("idx", number)
        rewards = [r for r in (trace.get("rewards") or {}).values() if r is not None]
        reward = sum(r["score"] * r.get("weight", 1.0) for r in rewards) if rewards else None
        rest = {name: value for name, value in trace.items() if name not in ("nodes", "calls")}
        for branch, nodes in enumerate(_branches(trace.get("nodes") or [])):
            for one in (*nodes, rest, about):
                expansion.charge(one)
            rows.append(
                {
                    "uid": str(uid),
                    "session": f"{number}.{k}.{branch}",
                    **_of_nodes(nodes),
                    "reward": reward,
                    "trace": rest,
                    "episode": about,
                }
            )
    return rows


def _branches(nodes: Sequence[Row]) -> Iterator[list[Row]]:
    parents = {node.get("parent") for node in nodes}
    for leaf in range(len(nodes)):
        if leaf not in parents:
            path: list[Row] = []
            at: int | None = leaf
            while at is not None and len(path) <= len(nodes):
                path.append(nodes[at])
                at = nodes[at].get("parent")
            yield path[::-1]


def _of_nodes(nodes: Sequence[Row]) -> Row:
    """A path of messages: up to the first sampled token it is the prompt."""
    tokens: list[int] = []
    mask: list[int] = []
    probs: list[float] = []
    for node in nodes:
        own = node.get("token_ids") or []
        flags = [*map(int, node.get("mask") or ()), *[0] * len(own)][: len(own)]
        given = iter(node.get("logprobs") or ())  # one for each token that was sampled, or none
        tokens += own
        mask += flags
        probs += [next(given, math.nan) if flag else 0.0 for flag in flags]
    first = mask.index(1) if 1 in mask else len(tokens)
    known = any(flag and p == p for flag, p in zip(mask, probs, strict=True))
    turn = next((i for i, node in enumerate(nodes) if node.get("sampled")), len(nodes))
    messages = [node["message"] for node in nodes]
    row: Row = {"raw_prompt": messages[:turn], "completions": messages[turn:]}
    if tokens:
        row |= {"prompt_ids": tokens[:first], "completion_ids": tokens[first:]}
        row["completion_mask"] = mask[first:]
        row["logprobs"] = probs[first:] if known else None
    return row


def _of_result(result: Row, number: int) -> Row:
    own = dict(result)
    prompt, completion = own.pop("prompt", None), own.pop("completion", None)
    uid = own.get("example_id", number)
    return {"uid": str(uid), "raw_prompt": prompt, "completions": completion, **own}


# -- files ---------------------------------------------------------------------------------


def _lines(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                found = json.loads(line)
            except ValueError as error:
                raise ForeignDumpError(f"line {number} is not JSON", str(path)) from error
            if not isinstance(found, dict):
                raise ForeignDumpError(f"line {number} is not an object", str(path))
            yield found


def _budget(path: Path) -> Budget:
    return Budget(path.stat().st_size)


def _number_in(path: Path) -> int | None:
    found = _NUMBER.fullmatch(path.stem)
    return int(found[1]) if found else None


def _step(into: Into, told: Any, path: Path) -> int:
    step = told if into.step is None else into.step
    if type(step) is not int or step < 0:
        what = "neither it nor its name tells the step"
        raise ForeignDumpError(what, str(path), "give it with --step")
    return step


def _is_slime(path: Path, names: Sequence[bytes] = (b"rollout_id", b"samples")) -> bool:
    """Whether it is an archive of torch.save that begins with slime's `names`, unlike verl's."""
    if path.suffix != ".pt" or not zipfile.is_zipfile(path):
        return False
    with path.open("rb") as file:
        beginning = file.read(1024)
    return any(name in beginning for name in names)


FORMATS = (
    Format("verifiers", lambda path: path.name in _SAVED, _read_verifiers),
    Format("verl", lambda path: path.suffix == ".jsonl" and path.stem.isdecimal(), _read_verl),
    Format("slime", partial(_is_slime, names=[b"rollout_data"]), None, is_pickle=True),
    Format("slime", _is_slime, _read_slime, is_pickle=True),
)
