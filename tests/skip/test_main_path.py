"""How much of rlskip one decorated call goes through in the steady state of a run."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType
from typing import Any

import pytest

import rlskip
from rlskip import SkipManager

HOME = str(Path(rlskip.__file__).parent)
NAMES = ("files", "functions", "classes")
GOALS = {"miss": (20, 140, 14), "hit": (15, 100, 10)}
REACHED = {"miss": (32, 178, 25), "hit": (27, 134, 19)}


def passed(call: Callable[[], object]) -> tuple[int, int, int]:
    """Our files, distinct code objects, and classes with one of them, that a call goes through."""
    seen: set[CodeType] = set()

    def note(frame: Any, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(HOME):
            seen.add(frame.f_code)

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    names = {(c.co_filename, getattr(c, "co_qualname", "")) for c in seen}  # of Python 3.11
    owners = {(file, name.split(".<locals>")[0].rpartition(".")[0]) for file, name in names}
    return len({code.co_filename for code in seen}), len(seen), len({o for o in owners if o[1]})


def test_a_call_passes_few_files_functions_and_classes(init: Callable[..., Path]) -> None:
    @SkipManager.annotate(role="rollout")
    def generate(prompts: dict[str, Any], temperature: float = 1.0) -> dict[str, Any]:
        return {"responses": [2 * text for text in prompts["text"]], "uid": ["a", "b"]}

    for kind in ("miss", "hit"):
        init(background_write=False)
        for step in range(1, 5):
            SkipManager.set_step(step)
            prompts = {"text": [f"a question of step {step}", "another"]}
            counts = passed(lambda prompts=prompts: generate(prompts, temperature=0.5))
        for name, count, bound, goal in zip(NAMES, counts, REACHED[kind], GOALS[kind], strict=True):
            print(f"a {kind}: {count} {name}, at most {bound}, goal {goal}")
            assert count <= bound, f"a {kind} passes {count} {name}: more than {bound}"


@pytest.mark.parametrize("skip", [{}, {"steps": [9]}])
def test_a_call_that_is_not_skipped_passes_almost_nothing(
    init: Callable[..., Path], skip: dict[str, Any]
) -> None:
    generate = SkipManager.annotate(role="rollout")(lambda prompts: prompts)
    init("rollout" if skip else "reward", at=1, **skip)
    generate("a")
    files, functions, _ = passed(lambda: generate("a"))
    print(f"not skipped: {files} files, {functions} functions")
    assert functions <= (2 if skip else 1)
