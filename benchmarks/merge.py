"""Prefix-aware merging next to SkyRL's, and what it saves in the update.

packed_ratio  tokens merged per second, in a packed batch of int32 ids, output included
list_ratio    the same for SkyRL's own dict of Python lists, whose ids are objects that lie in
              memory in the order in which they are read
list_ratio_scattered  the same for ids that lie in random order: both wait for memory, once an id
update_N      one update (forward, backward) of a small transformer on sessions of N turns: on
              merged rows and, as the peer, on one row per turn

The peer is the genuine ``merge_stepwise_output`` of SkyRL 0.3.0, read from its wheel (SkyRL needs
Python 3.12 and its whole stack to be imported): ``--wheel FILE``, or it is downloaded once with
pip. It gets the same batch, whose ids are distinct objects as if parsed from JSON. The results are
compared field by field before anything is timed.
"""

from __future__ import annotations

import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import torch
from tensordict import TensorDict
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from benchmarks._report import Goal, Row, arguments, best_of, report, versions
from rlskip.config.other_nodes import MergeConfig
from rlskip.merge import merge, merge_stepwise_output

SKYRL = "0.3.0"
CACHE = Path.home() / ".cache" / "rlskip" / "benchmarks"
VOCABULARY = 151_936
TYPES = {
    "prompt_token_ids": np.int32,
    "response_ids": np.int32,
    "loss_masks": np.int8,
    "rewards": np.float32,
    "rollout_logprobs": np.float32,
}


def rollouts(
    sessions: int, turns: int, prompt: int, observation: int, response: int, ids: int = VOCABULARY
) -> dict[str, Any]:
    """Return turns of sessions that all continue, as a GeneratorOutput, from a fixed seed."""
    rng = np.random.default_rng(0)
    out: dict[str, Any] = {name: [] for name in (*TYPES, "trajectory_ids", "is_last_step")}
    for session in range(sessions):
        context = rng.integers(0, ids, prompt + turns * (response + observation))
        for turn in range(turns):
            at = prompt + turn * (response + observation)
            # tolist() makes a new int object for every token of every turn.
            out["prompt_token_ids"].append(context[:at].tolist())
            out["response_ids"].append(context[at : at + response].tolist())
            out["loss_masks"].append([1] * response)
            out["rewards"].append([0.0] * response)
            out["rollout_logprobs"].append((-rng.exponential(0.5, response)).tolist())
            out["trajectory_ids"].append(session)
            out["is_last_step"].append(turn == turns - 1)
    return out


def scattered(out: dict[str, Any]) -> dict[str, Any]:
    """Return the same rollouts with the objects of the prompts' ids in random order in memory."""
    flat = np.concatenate([np.array(row) for row in out["prompt_token_ids"]])
    order = np.random.default_rng(0).permutation(len(flat))
    ids = np.empty(len(flat), object)
    ids[order] = flat[order].tolist()
    ends = np.cumsum([len(row) for row in out["prompt_token_ids"]])[:-1]
    return {**out, "prompt_token_ids": [list(row) for row in np.split(ids, ends)]}


def packed(out: dict[str, Any]) -> TensorDict:
    """Return the same rollouts as a packed batch."""
    fields: dict[str, Any] = {}
    for name, dtype in TYPES.items():
        values = torch.from_numpy(np.concatenate([np.array(row, dtype) for row in out[name]]))
        offsets = torch.tensor([0, *map(len, out[name])]).cumsum(0)
        fields[name] = torch.nested.nested_tensor_from_jagged(values, offsets)
    for name in ("trajectory_ids", "is_last_step"):
        fields[name] = torch.tensor(out[name])
    return TensorDict(fields, batch_size=[len(out["response_ids"])])


def tokens(out: dict[str, Any]) -> int:
    return sum(len(row) for name in ("prompt_token_ids", "response_ids") for row in out[name])


def skyrl_merge(wheel: Path | None) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Load SkyRL's function from its wheel, with stubs for what it imports from SkyRL.

    The stubs do nothing, so its check of the result costs the peer no time.
    """
    if wheel is None:
        name = f"skyrl-{SKYRL}-py3-none-any.whl"
        wheel = CACHE / name
        if not wheel.exists():
            pip = [sys.executable, "-m", "pip", "download", f"skyrl=={SKYRL}", "--no-deps"]
            pip += ["--python-version", "3.12", "--only-binary=:all:", "--dest", str(CACHE)]
            subprocess.run(pip, check=True, stdout=subprocess.DEVNULL)
    path = "skyrl/train/generators/utils.py"
    source = zipfile.ZipFile(wheel).read(path).decode()
    for module in (
        "loguru",
        "skyrl",
        "skyrl.backends",
        "skyrl.backends.skyrl_train",
        "skyrl.backends.skyrl_train.inference_servers",
        "skyrl.backends.skyrl_train.inference_servers.base",
        "skyrl.train",
        "skyrl.train.config",
        "skyrl.train.generators",
        "skyrl.train.generators.base",
        "skyrl.train.utils",
        "skyrl.train.utils.trainer_utils",
        "skyrl_gym",
        "skyrl_gym.metrics",
    ):
        sys.modules[module] = MagicMock()
    namespace: dict[str, Any] = {}
    exec(compile(source, path, "exec"), namespace)
    function: Callable[[dict[str, Any]], dict[str, Any]] = namespace["merge_stepwise_output"]
    return function


def merging(peer: Callable[[dict[str, Any]], dict[str, Any]], rounds: int) -> list[Row]:
    """Measure the throughput of both batches: 16 sessions of 50 turns, 20.8 million tokens."""
    out = rollouts(sessions=16, turns=50, prompt=1000, observation=500, response=500)
    batch, on = packed(out), MergeConfig(stepwise_output=True)
    expected, lists, arrays = peer(out), merge_stepwise_output(out), merge(batch, on)[0]
    for name in (*TYPES, "trajectory_ids", "is_last_step", "rollout_metrics"):
        assert lists[name] == expected[name], name
    for name in TYPES:
        flat = np.concatenate([np.array(row, TYPES[name]) for row in expected[name]])
        assert np.array_equal(arrays[name].values(), flat), name

    peer_s, list_s, packed_s = best_of(
        rounds, lambda: peer(out), lambda: merge_stepwise_output(out), lambda: merge(batch, on)
    )
    million = tokens(out) / 1e6
    apart = scattered(rollouts(sessions=4, turns=50, prompt=1000, observation=500, response=500))
    apart_peer_s, apart_s = best_of(2, lambda: peer(apart), lambda: merge_stepwise_output(apart))
    few = tokens(apart) / 1e6
    return [
        Row("packed_ratio", million / packed_s, "Mtok/s", million / peer_s, Goal(">=", 10)),
        Row("list_ratio", million / list_s, "Mtok/s", million / peer_s, Goal(">=", 1.2)),
        Row("list_ratio_scattered", few / apart_s, "Mtok/s", few / apart_peer_s, Goal(">=", 1)),
    ]


class Transformer(nn.Module):
    """A causal transformer of two layers."""

    def __init__(self, ids: int, longest: int, width: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.ids, self.places = nn.Embedding(ids, width), nn.Embedding(longest, width)
        self.mixers = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(2))
        self.feeds = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(2)
        )
        self.head = nn.Linear(width, ids)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the logits, (tokens, ids), of one row."""
        x: torch.Tensor = self.ids(ids) + self.places(torch.arange(len(ids)))
        for mixer, feed in zip(self.mixers, self.feeds, strict=True):
            # To queries, keys and values of (heads, tokens, width of a head).
            q, k, v = mixer(x).view(len(x), 3, self.heads, -1).permute(1, 2, 0, 3)
            mixed = scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + mixed.transpose(0, 1).reshape(x.shape)
            x = x + feed(x)
        logits: torch.Tensor = self.head(x)
        return logits


def update(model: Transformer, out: dict[str, Any]) -> float:
    """Compute loss and gradients of a policy-gradient step row by row; returns the loss."""
    trained = sum(sum(mask) for mask in out["loss_masks"])
    model.zero_grad()
    loss = 0.0
    for i, prompt in enumerate(out["prompt_token_ids"]):
        row = torch.tensor(prompt + out["response_ids"][i])
        log_probs = model(row[:-1])[len(prompt) - 1 :].log_softmax(-1)
        log_probs = log_probs.gather(1, row[len(prompt) :, None])[:, 0]
        ratio = (log_probs - torch.tensor(out["rollout_logprobs"][i])).exp()
        part = (ratio * torch.tensor(out["loss_masks"][i])).sum() / trained
        part.backward()
        loss += part.item()
    return loss


def update_by(turns: int, rounds: int) -> Row:
    """Measure an update on 2 sessions per number of turns, with 16 new tokens per turn."""
    out = rollouts(sessions=2, turns=turns, prompt=32, observation=8, response=8, ids=512)
    merged = merge_stepwise_output(out)
    torch.manual_seed(0)
    model = Transformer(512, longest=32 + 16 * turns)
    loss, merged_loss = update(model, out), update(model, merged)
    assert abs(merged_loss / loss - 1) < 1e-4, (merged_loss, loss)
    step_wise_s, merged_s = best_of(
        4 * rounds, lambda: update(model, out), lambda: update(model, merged)
    )
    return Row(f"update_{turns}", merged_s, "s", step_wise_s)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--wheel", type=Path, metavar="FILE", help=f"skyrl {SKYRL}, from PyPI")
    parser.add_argument("--rounds", type=int, default=5, help="best of so many (default 5)")
    parser.add_argument("--turns", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32], metavar="N")
    args = parser.parse_args()

    # One thread, so that a busy machine disturbs as little as possible.
    torch.set_num_threads(1)
    by_turns = [update_by(turns, args.rounds) for turns in args.turns]
    rows = merging(skyrl_merge(args.wheel), args.rounds) + by_turns
    report(rows, versions("tensordict") | {"skyrl": SKYRL}, args.json)


if __name__ == "__main__":
    main()
