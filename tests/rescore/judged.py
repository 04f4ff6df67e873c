"""A run of texts, and judges that note each session that they are really asked about."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlskip.store import StepStore

RUN = "judged_tiny/GBS4_N4_in8_out8"
GROUPS, SESSIONS = 4, 4

# In $ASKED, a line for each session; $PAUSE holds each call that long. "bad" is never judged, and
# the score of "odd" is none.
JUDGES = """
import asyncio, os, sys, time

PAUSE = float(os.environ.get("PAUSE", 0))

def note(*texts):
    with open(os.environ["ASKED"], "a") as file:
        file.write("".join(f"{text}\\n" for text in texts))

def score(text, truth):
    if text == "bad":
        raise RuntimeError("the judge is at lunch")
    if text == "exit":
        sys.exit(1)
    return None if text == "odd" else len(text) / 8 + (text == truth)

def one(data_source, solution_str, ground_truth, extra_info=None, **others):
    note(solution_str)
    time.sleep(PAUSE)
    return score(solution_str, ground_truth)

async def one_async(solution_str, ground_truth):
    note(solution_str)
    await asyncio.sleep(PAUSE)
    return {"score": score(solution_str, ground_truth), "why": "because"}

def many(solution_strs, ground_truths, **others):
    note(*solution_strs)
    time.sleep(PAUSE)
    return [score(*pair) for pair in zip(solution_strs, ground_truths)]

async def trl(prompts, completions, gts, **columns):
    note(*completions)
    await asyncio.sleep(PAUSE)
    return [score(*pair) for pair in zip(completions, gts)]

def lists(prompts, completions, **columns):
    return [float(len(completion)) for completion in completions]

def needs(completions, nowhere):
    return [0.0 for _ in completions]

number = 3
"""


def answer(step: int, i: int) -> str:
    """Each session's text, which no other session has."""
    return f"{step:02}{i:04}abcd"[: 6 + i % 5]


def save(root: Path, steps: int, groups: int = GROUPS, **more: list[Any]) -> Path:
    rows = groups * SESSIONS
    for step in range(1, steps + 1):
        texts = more.get("texts") or [answer(step, i) for i in range(rows)]
        columns = {
            "uid": [f"g{i // SESSIONS}" for i in range(rows)],
            "input": [f"question {step} {i // SESSIONS}" for i in range(rows)],
            "output": texts,
            "gts": [text if i % SESSIONS == 1 else "?" for i, text in enumerate(texts)],
            "score": more.get("scores") or [float(i % SESSIONS == 1) for i in range(rows)],
        }
        StepStore(root / RUN).save(step, columns)
    return root
