"""Packing next to padded rows and to rows without padding: one forward and backward pass.

pack_time_ratio        a GRPO group (prompt 1 024, 16 responses of 64 to 256) against padded rows
pack_unpadded_ratio    the same against the rows laid out one after the other, nothing shared
pack_turns_ratio       16 sessions of 12 turns with tool output between, one row per turn, packed,
                       against the same rows unpadded
pack_merged_ratio      the same against one row per session (``merge=prefix``), unpadded
pack_nothing_ratio     rows that share nothing, packed, against unpadded
plan_mtok_s            million tokens planned per second (ids as tensors)
plan_trl_ratio         the same next to TRL's planner, where TRL is installed
*_peak_mb              the most memory that each takes beyond the model, in a process of its own

The model is a Qwen2 of 4 layers, hidden size 512, 8 heads and a vocabulary of 32 000, in float32 on
two threads; its intermediate size is 5.375 times the hidden size, as in transformers' Qwen2Config.
Planning and masks are included. All losses are compared before anything is timed.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from benchmarks._report import Goal, Row, arguments, best_of, report, versions
from rlskip.merge import pack
from rlskip.merge.packed_forward import packed_forward

VOCABULARY = 32_000
BUDGET = 4_096
Rows = dict[str, list[list[int]]]


def qwen2() -> Any:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY, hidden_size=512, intermediate_size=2752, num_hidden_layers=4,
        num_attention_heads=8, num_key_value_heads=8, max_position_embeddings=8192,
    )  # fmt: skip
    return Qwen2ForCausalLM._from_config(config, attn_implementation="sdpa")


def group() -> Rows:
    """One prompt and its 16 sessions."""
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, VOCABULARY, 1024).tolist()
    responses = [rng.integers(0, VOCABULARY, n).tolist() for n in rng.integers(64, 257, 16)]
    return {
        "input_ids": [prompt + response for response in responses],
        "loss_mask": [[0] * 1024 + [1] * len(response) for response in responses],
    }


def sessions(merged: bool) -> Rows:
    """16 sessions of 12 turns: a prompt of 64, responses of 16, tool output of 16 between them."""
    rng = np.random.default_rng(0)
    rows: Rows = {"input_ids": [], "loss_mask": []}
    for _ in range(16):
        ids, mask = rng.integers(0, VOCABULARY, 64).tolist(), [0] * 64
        for turn in range(12):
            ids = ids + rng.integers(0, VOCABULARY, 16).tolist()
            if not merged or turn == 11:
                rows["input_ids"].append(ids)
                rows["loss_mask"].append((mask if merged else [0] * len(mask)) + [1] * 16)
            ids = ids + rng.integers(0, VOCABULARY, 16).tolist()
            mask = mask + [1] * 16 + [0] * 16
    return rows


def unrelated() -> Rows:
    rng = np.random.default_rng(0)
    ids = [rng.integers(0, VOCABULARY, 512).tolist() for _ in range(8)]
    return {"input_ids": ids, "loss_mask": [[0] * 256 + [1] * 256 for _ in ids]}


def packed(model: Any, rows: Rows, groups: Any = None) -> float:
    """The loss over packed rows, with gradients."""
    total = 0.0
    for each in pack(rows, BUDGET, groups=groups):
        loss = each.log_probs(packed_forward(model, each)).values().sum()
        loss.backward()
        total += loss.item()
    return total


def unpadded(model: Any, rows: Rows) -> float:
    """The loss over the same rows, where no row shares a token with another one."""
    return packed(model, rows, range(len(rows["input_ids"])))


def padded(model: Any, rows: Rows) -> float:
    """The loss over right-padded rows, four at a time; logits of responses only."""
    ids, masks = rows["input_ids"], rows["loss_mask"]
    first = min(mask.index(1) for mask in masks)
    total = 0.0
    for start in range(0, len(ids), 4):
        width = max(map(len, ids[start : start + 4]))
        table, exists, trained = (torch.zeros(4, width, dtype=torch.int64) for _ in range(3))
        for i, (row, mask) in enumerate(
            zip(ids[start : start + 4], masks[start : start + 4], strict=True)
        ):
            table[i, : len(row)] = torch.tensor(row)
            trained[i, : len(row)] = torch.tensor(mask)
            exists[i, : len(row)] = 1
        keep = min(width, width - first + 1)  # nothing predicts a row's first token
        logits = model(table, attention_mask=exists, logits_to_keep=keep, use_cache=False).logits
        labels = table[:, -keep + 1 :]
        losses = F.cross_entropy(logits[:, :-1].transpose(1, 2), labels, reduction="none")
        loss = -(losses * trained[:, -keep + 1 :]).sum()
        loss.backward()
        total += loss.item()
    return total


def peak_mb(run: Callable[[Any, Rows], float], rows: Rows) -> float:
    """How much more memory than the model takes one pass needs, in a new process."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_peak, (run, rows))


def _peak(run: Callable[[Any, Rows], float], rows: Rows) -> float:
    torch.set_num_threads(2)
    model = qwen2()
    run(model, {name: [row[-8:] for row in field[:1]] for name, field in rows.items()})
    # The peak of getrusage would include that of the parent; this one starts again (proc(5)).
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before = _peak_kb()
    run(model, rows)
    return (_peak_kb() - before) / 1024


def _peak_kb() -> int:
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.partition("VmHWM:")[2].split()[0])


def compare(
    name: str, model: Any, ours: tuple[Any, Rows], peer: tuple[Any, Rows], goal: float, rounds: int
) -> list[Row]:
    (run, rows), (peer_run, peer_rows) = ours, peer
    model.zero_grad()
    a, b = run(model, rows), peer_run(model, peer_rows)
    if abs(a - b) > 1e-4 * abs(b):
        raise AssertionError(f"{name}: the loss is {a}, and {b} of the peer")
    times = best_of(rounds, lambda: run(model, rows), lambda: peer_run(model, peer_rows))
    memory = [peak_mb(run, rows), peak_mb(peer_run, peer_rows)]
    return [
        Row(f"{name}_ratio", times[0], "s", times[1], Goal("<=", goal)),
        Row(f"{name}_peak_mb", memory[0], "MB", memory[1]),
    ]


def planning(rounds: int) -> list[Row]:
    """64 groups of 16 rows, planned by :func:`pack` and by TRL's trie."""
    rng = np.random.default_rng(0)
    ids, groups = [], []
    for number in range(64):
        prompt = rng.integers(0, VOCABULARY, 1024)
        for length in rng.integers(64, 257, 16):
            ids.append(
                torch.from_numpy(np.concatenate([prompt, rng.integers(0, VOCABULARY, length)]))
            )
            groups.append(number)
    count = sum(map(len, ids)) / 1e6
    seconds = best_of(rounds, lambda: pack(ids, 16_384, groups=groups))[0]
    peer = None
    if importlib.util.find_spec("trl") is not None:
        peer = count / best_of(1, lambda: trls_planner(ids, groups))[0]
    row = Row("plan_mtok_s", count / seconds, "Mtok/s", goal=Goal(">=", 20))
    return [row] if peer is None else [row, Row("plan_trl_ratio", row.ours, "Mtok/s", peer)]


def trls_planner(ids: list[torch.Tensor], groups: list[int]) -> None:
    """Fold the same rows into tries with TRL, a row of the model for each 12 groups."""
    from trl.experimental.async_grpo.packing import TreeRow

    for first, stop in pairwise(range(0, max(groups) + 13, 12)):
        row = TreeRow()
        for tokens, number in zip(ids, groups, strict=True):
            if first <= number < stop:
                mask = torch.zeros(len(tokens), dtype=torch.int64)
                mask[1024:] = 1
                sample = {
                    "input_ids": tokens, "completion_mask": mask, "group_id": number,
                    "old_log_probs": torch.zeros(len(tokens)), "advantage": 1.0,
                }  # fmt: skip
                row.add(sample)
        row.pack()


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(2)
    model = qwen2()
    turns, merged, alone, grpo = sessions(False), sessions(True), unrelated(), group()
    rounds = options.rounds
    rows = [
        *compare("pack_time", model, (packed, grpo), (padded, grpo), 1 / 4, rounds),
        *compare("pack_unpadded", model, (packed, grpo), (unpadded, grpo), 1 / 3, rounds),
        *compare("pack_turns", model, (packed, turns), (unpadded, turns), 1 / 5, rounds),
        *compare("pack_merged", model, (packed, turns), (unpadded, merged), 1.1, rounds),
        *compare("pack_nothing", model, (packed, alone), (unpadded, alone), 1.05, rounds),
        *planning(rounds),
    ]
    report(rows, versions("transformers", "trl"), options.json)


if __name__ == "__main__":
    main()
