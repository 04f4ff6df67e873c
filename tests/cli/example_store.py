"""The dumps that docs/cli.md and the command's tests look at: small, and always the same.

python example_store.py DIRECTORY
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch
from tensordict import NonTensorStack, TensorDict

from rlskip.jobs.records import FOLDER
from rlskip.store import Identity, StepStore, fingerprint, run_directory
from rlskip.store.layout import Place

PROMPTS, SESSIONS, PROMPT_LEN, RESPONSE_LEN = 4, 2, 6, 8
WRITTEN = 1_790_000_000  # 2026-09-21; a minute more each step


def rollouts(step: int, seed: int = 0, other_from: int | None = None) -> TensorDict:
    """A step's rollouts; with `other_from`, the last row says something else from there on."""
    rng = np.random.default_rng([seed, step])
    rows = PROMPTS * SESSIONS
    prompts = np.repeat(rng.integers(5, 90, (PROMPTS, PROMPT_LEN)), SESSIONS, axis=0)
    responses = rng.integers(5, 90, (rows, RESPONSE_LEN))
    lengths = rng.integers(3, RESPONSE_LEN + 1, rows)
    log_probs = -rng.random((rows, RESPONSE_LEN), dtype=np.float32)
    if other_from is not None:
        responses[-1, other_from:] += 1
    real = np.arange(RESPONSE_LEN) < lengths[:, None]
    last = np.arange(RESPONSE_LEN) == lengths[:, None] - 1
    reward = rng.integers(0, 2, rows)[:, None] * last
    columns: dict[str, Any] = {
        "prompts": torch.from_numpy(prompts),
        "responses": torch.from_numpy(np.where(real, responses, 0)),
        "attention_mask": torch.from_numpy(np.hstack([np.ones_like(prompts), real])),
        "response_mask": torch.from_numpy(real.astype(np.int64)),
        "rollout_log_probs": torch.from_numpy(np.where(real, log_probs, 0).astype(np.float32)),
        "rm_scores": torch.from_numpy(reward.astype(np.float32)),
        "uid": NonTensorStack(*(f"s{step}p{i // SESSIONS}" for i in range(rows))),
    }
    return TensorDict(columns, batch_size=[rows])


def save(store: StepStore, step: int, value: TensorDict, job: str) -> None:
    made = {"prompts": fingerprint(value["prompts"]), "n": SESSIONS, "prompt_len": PROMPT_LEN}
    made |= {"response_len": RESPONSE_LEN, "sampling.temperature": 1.0}
    identity = Identity.of(made, {"model": "tiny"})
    meta = store.save(step, value, identity=identity, info={"seconds": 12.5 + step, "job": job})
    place = Place(store.directory, step)
    when = f"2026-09-21T14:{13 + step:02d}:20+00:00"
    (place.directory / place.meta).write_bytes(attrs.evolve(meta, created=when).to_bytes())
    for name in (place.dump, place.meta):
        os.utime(place.directory / name, (WRITTEN + 60 * step,) * 2)


def make(root: Path) -> None:
    first = run_directory(root, "grpo", "tiny", PROMPTS, SESSIONS, PROMPT_LEN, RESPONSE_LEN)
    second = run_directory(root, "grpo-lr2", "tiny", PROMPTS, SESSIONS, PROMPT_LEN, RESPONSE_LEN)
    for step in (1, 2, 3):
        save(StepStore(first), step, rollouts(step), "20260921-141300-11aa22bb")
        other = 3 if step == 2 else None
        save(StepStore(second), step, rollouts(step, other_from=other), "20260921-150000-33cc44dd")
    run = str(first.relative_to(root))
    for job, event in (("11aa22bb", "miss"), ("55ee66ff", "hit")):
        events: list[dict[str, Any]] = [{"role": "rollout", "event": "consulted", "run": run}]
        for step in (1, 2, 3):
            told = {"source": step, "seconds_saved": 12.25 + step} if event == "hit" else {}
            events.append({"role": "rollout", "event": event, "step": step, **told})
        file = root / FOLDER / f"20260921-141300-{job}" / "host-1-abc.jsonl"
        file.parent.mkdir(parents=True)
        file.write_text("".join(json.dumps(one) + "\n" for one in events))


if __name__ == "__main__":
    make(Path(sys.argv[1]))
