"""Sampling that hides from who compares arguments, in the workers of a launcher of Hydra's."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.skip.hiding import HIDING

pytestmark = pytest.mark.launchers

ROOT = Path(__file__).parents[2]
SKIP = ("+skip=rollout_cache", "skip.dump_dir=dumps", "skip.experiment_name=hidden")

# The worker gets what __main__ has by value. Each place has a step and a stage of its own.
TASK = """
import logging
from rlskip.errors import MismatchError
from tests.skip.hiding import HIDING

class Heard(logging.Handler):
    def emit(self, record):
        if "not compared, so" in record.getMessage():
            heard.append(record.getMessage())

heard, said = [], {}
logging.getLogger("rlskip").addHandler(Heard())
for step, (place, make) in enumerate(HIDING.items(), 1):
    SkipManager.set_step(step)
    value, ran = make(cfg.t), []
    def as_argument(prompts, sampler, ran):
        ran.append(1)
    def as_self(self, prompts):
        ran.append(1)
    as_argument.__qualname__, as_self.__qualname__ = f"stage{step}", f"own{step}"
    trainer = type("Trainer", (), {"stage": SkipManager.annotate("rollout")(as_self)})()
    trainer.sampler = value
    as_argument = SkipManager.annotate("rollout", ignore=["ran"])(as_argument)
    for call in (lambda: as_argument([1], value, ran), lambda: trainer.stage([2])):
        heard.clear()
        try:
            call()
            said.setdefault(place, []).append("generated" if ran else "".join(heard))
        except MismatchError as error:
            said.setdefault(place, []).append(error.what)
        ran.clear()
open(os.environ["GENERATED"], "w").write(json.dumps(said))
"""


def test_what_hides_is_a_mismatch_or_named(make_app: Callable[..., Any]) -> None:
    app = make_app(config="t: 0.5", task="import json\n" + TASK)
    mode = ("-m", "hydra/launcher=joblib")
    said = []
    for value in (0.5, 0.6):
        app.run(*mode, *SKIP, f"t={value}", PYTHONPATH=f"{ROOT}:{os.environ.get('PYTHONPATH', '')}")
        said.append(json.loads((app.folder / "generated").read_text()))
    first, again = said
    assert {*first} == {*again} == {*HIDING}
    for place in HIDING:
        assert first[place] == ["generated", "generated"]
        for line, where in zip(again[place], ("sampler", "self.sampler"), strict=True):
            differs = re.search(r"0\.6\W* now, .*0\.5\W* in the dump", line)
            assert differs or where in line, (place, line)
