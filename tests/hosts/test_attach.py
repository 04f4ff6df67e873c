"""`skip.attach`: stages in a library that does not know rlskip, in real processes."""

from __future__ import annotations

import importlib
import importlib.machinery
import re
import sys
import textwrap
import types
from typing import Any

import pytest

from rlskip import SkipManager
from rlskip._wrap import AttachError
from rlskip.config.settings import read_skip
from rlskip.errors import ConfigError, MismatchError, NotInstalledError
from rlskip.jobs.records import job_id, tally
from rlskip.skip.call import StepNotSetError

ON = ("+skip=rollout_cache", "skip.dump_dir=dumps")


# -- a Hydra application ----------------------------------------------------------------------

# A training library that does not know rlskip. Each real generation appends a line.
LIBRARY = """
import asyncio
import os


class State:
    global_step = 0


def note(line):
    with open(os.environ["GENERATED"], "a") as file:
        file.write(f"{line}\\n")


class Trainer:
    def __init__(self):
        self.state = State()

    def generate(self, model, batch, eval=False):
        note(f"method {self.state.global_step}" + (" eval" if eval else ""))
        return [10 * i for i in batch["ids"]]

    async def agenerate(self, batch):
        note(f"async {batch['meta']['step']}")
        await asyncio.sleep(0)
        return [10 * i for i in batch["ids"]]

    def fit(self, steps=2):
        for step in range(1, steps + 1):
            self.state.global_step = step
            ids = [step, step + 1]
            assert self.generate("model", {"ids": ids}) == [10 * i for i in ids]
            assert self.generate("model", {"ids": [0]}, eval=True) == [0]

    def fit_async(self, steps=2):
        async def loop():
            batches = [{"ids": [s], "meta": {"step": s}} for s in range(1, steps + 1)]
            return await asyncio.gather(*map(self.agenerate, batches))

        assert asyncio.run(loop()) == [[10 * s] for s in range(1, steps + 1)]
"""

# What a user adds: a function that returns the step.
GLUE = """
def step_of(self, model, batch, eval=False):
    return None if eval else self.state.global_step
"""

TASK = "from trainlib import Trainer\ngetattr(Trainer(), cfg.fit)()"


@pytest.fixture
def app(make_app: Any) -> Any:
    app = make_app(config="fit: fit\na: 1\n", task=TASK)
    (app.folder / "trainlib.py").write_text(LIBRARY)
    (app.folder / "glue.py").write_text(GLUE)
    return app


def generated(app: Any) -> list[str]:
    """What was generated since the last call."""
    file = app.folder / "generated"
    lines = file.read_text().splitlines() if file.exists() else []
    file.unlink(missing_ok=True)
    return lines


def test_a_foreign_method_is_skipped_from_the_command_line(app: Any) -> None:
    entry = "{target:'trainlib:Trainer.generate',step:'glue:step_of',prompts:batch}"
    how = f"skip.attach.rollout={entry}"
    app.run(*ON, how)
    assert generated(app) == ["method 1", "method 1 eval", "method 2", "method 2 eval"]
    run = app.run(*ON, how)
    assert generated(app) == ["method 1 eval", "method 2 eval"]
    assert "role rollout: 2 hits, 0 misses" in run.out


@pytest.mark.slow
def test_without_a_step_the_error_names_the_key_to_type(app: Any) -> None:
    how = 'skip.attach.rollout="trainlib:Trainer.agenerate"'
    run = app.run(*ON, "fit=fit_async", how, fails=True)
    assert "skip.attach.rollout.step: skip.rollout is enabled, but no step is set" in run.said
    assert "SkipManager.set_step" not in run.said, "nobody can call it in that library"
    (typed,) = set(re.findall(r"name its source: '(.*)', step is PATH", run.said))
    assert typed.endswith(':Trainer.agenerate",step:"..."}')
    typed = typed.replace("...", "batch.meta.step")
    run = app.run("-m", *ON, "fit=fit_async", typed, "a=1,2")
    assert "2 hits, 0 misses" in run.said


# -- without Hydra, in this process -----------------------------------------------------------

LOOP = """
    calls = []

    class Loop:
        @classmethod
        def generate(cls, prompts, step):
            calls.append(step)
            return {"doubled": [2 * p for p in prompts]}

    class Special(Loop):
        @classmethod
        def generate(cls, prompts, step):
            return super().generate(prompts, step)

    def generate(t, batch, n=None, s=None, nothing=None, before=-1):
        calls.append(4)
        return [2 * i for i in batch["ids"]]

    def odd_only(cls, prompts, step):
        return step if step % 2 else None

    loop, most = Loop(), max
"""


@pytest.fixture
def loop(third_party: Any) -> Any:
    """A fresh module with the loop, imported."""
    return importlib.import_module(third_party(LOOP))


def config(tmp_path: Any, attached: Any, **skip: Any) -> dict[str, Any]:
    on = {"dump_dir": str(tmp_path / "dumps"), "rollout": {"enable": True}}
    return {"skip": {**on, "attach": {"rollout": attached}, **skip}}


def test_own_loop_one_call(loop: Any, tmp_path: Any) -> None:
    target = {"target": f"{loop.__name__}:Loop.generate", "step": "step"}
    for calls in ([1, 2], []):
        SkipManager.init(config(tmp_path, target))
        loop.calls.clear()
        for step in (1, 2):
            assert loop.Loop.generate([step], step=step) == {"doubled": [2 * step]}
        assert loop.calls == calls
        SkipManager.reset()
    loop.Loop.generate([1], step=1)
    assert loop.calls == [1], "off means off"


def test_a_stage_within_a_stage_is_part_of_it(loop: Any, tmp_path: Any) -> None:
    outer = SkipManager.annotate(role="rollout")(loop.Special.generate)
    for calls in ([1], []):
        SkipManager.init(config(tmp_path, f"{loop.__name__}:Loop.generate", wait_s=1))
        SkipManager.set_step(1)
        loop.calls.clear()
        assert outer([1], step=1) == {"doubled": [2]}
        assert loop.calls == calls
    # As a miss of its own, the inner call would have waited for the outer one to generate.
    counts = tally({"rollout": str(tmp_path / "dumps")}, job_id())["rollout"]
    assert (counts.misses, counts.hits) == (1, 1)


@pytest.mark.parametrize(
    ("spec", "target"), [(None, "train"), (None, "__main__"), ("pkg.train", "pkg.train")]
)
def test_a_function_of_the_script_itself(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, spec: str | None, target: str
) -> None:
    """Of ``python train.py``, by both of its names, and of ``python -m pkg.train``."""
    script: Any = types.ModuleType("__main__")
    script.__file__ = "/somewhere/train.py"
    script.__spec__ = spec and importlib.machinery.ModuleSpec(spec, None)
    exec(textwrap.dedent(LOOP), vars(script))
    monkeypatch.setitem(sys.modules, "__main__", script)
    monkeypatch.delitem(sys.modules, "train", raising=False)  # another test's
    for _ in range(2):
        SkipManager.init(config(tmp_path, {"target": f"{target}:Loop.generate", "step": "step"}))
        assert script.Loop.generate([1], step=1) == {"doubled": [2]}
    assert script.calls == [1]


def test_prompts_and_identity_at_paths(loop: Any, tmp_path: Any) -> None:
    target = f"{loop.__name__}:generate"
    entry = {"target": target, "step": "n.0", "prompts": "batch.ids", "identity": ["t", "s.x"]}

    def call(ids: list[int], t: float, x: int, volatile: int) -> list[int]:
        SkipManager.init(config(tmp_path, entry))
        loop.calls.clear()
        settings = types.SimpleNamespace(x=x)
        batch = {"ids": ids, "seen": volatile}
        assert loop.generate(t, batch, n=(4,), s=settings) == [2 * i for i in ids]
        return loop.calls

    assert call([1], 0.5, 2, volatile=3) == [4]
    assert call([1], 0.5, 2, volatile=4) == []
    for ids, t, x, what in (
        ([2], 0.5, 2, "prompts: "),
        ([1], 0.7, 2, "identity.t: 0.7 now, 0.5 in the dump"),
        ([1], 0.5, 3, "identity.s.x: 3 now, 2 in the dump"),
    ):
        with pytest.raises(MismatchError, match=what):
            call(ids, t, x, volatile=3)


@pytest.mark.parametrize(
    ("entry", "error", "what"),
    [
        ({"step": "steps:nope"}, ConfigError, "No module named 'steps'"),
        ({"step": "NAME:nope"}, ConfigError, "has no attribute 'nope'"),
        ({"step": "math:pi"}, ConfigError, "step=math:pi: 3.14.* is not a function"),
        ({"prompts": "u"}, ConfigError, "skip.attach.rollout: .*generate has no argument u"),
        (
            {"target": "NAME:loop.generate"},
            AttachError,
            "an object, not a class\n  -> name .*Loop.",
        ),
        ({"target": "NAME:Loop.nope"}, AttachError, "NAME:Loop has no 'nope'"),
        ({"target": "NAME:most"}, ConfigError, "does not say which arguments it takes"),
        ({"step": "t.x"}, AttachError, "step=t.x: t has no 'x'"),
        ({"step": "u"}, AttachError, r"step=u: generate\(\) has no 'u'"),
        ({"step": "batch"}, AttachError, "step=batch: {'ids': .1.} is not a step"),
        ({"step": "nothing"}, AttachError, "step=nothing: None is not a step"),
        ({"step": "before"}, AttachError, "step=before: -1 is not a step"),
        (
            {"step": "t", "prompts": "batch.idx"},
            AttachError,
            "prompts=batch.idx: batch has no 'idx",
        ),
    ],
)
def test_a_path_that_does_not_exist_is_named_and_nothing_generated(
    loop: Any, tmp_path: Any, entry: dict[str, str], error: type[Exception], what: str
) -> None:
    entry = {key: value.replace("NAME", loop.__name__) for key, value in entry.items()}

    def run() -> None:
        SkipManager.init(config(tmp_path, {"target": f"{loop.__name__}:generate", **entry}))
        loop.most({"ids": [1]}) if "most" in str(entry) else loop.generate(1, {"ids": [1]})

    with pytest.raises(error, match=what.replace("NAME", loop.__name__)):
        run()
    assert loop.calls == []


def test_a_function_that_returns_no_step_bypasses_the_call(loop: Any, tmp_path: Any) -> None:
    entry = {"target": f"{loop.__name__}:Loop.generate", "step": f"{loop.__name__}:odd_only"}
    for _ in range(2):
        SkipManager.init(config(tmp_path, entry))
        for step in (1, 2):
            assert loop.Loop.generate([step], step) == {"doubled": [2 * step]}
    assert loop.calls == [1, 2, 2]


def test_init_again_attaches_again(loop: Any, tmp_path: Any, caplog: Any) -> None:
    given = config(tmp_path, f"{loop.__name__}:generate")
    caplog.set_level("INFO")
    for n, off in enumerate(({"enable": False}, {"rollout": {"enable": False}}), 1):
        SkipManager.init({"skip": {**given["skip"], **off}})
        assert loop.generate(1, {"ids": [1]}) == [2]
        assert caplog.text.count("skip.attach.rollout has no effect: that role is off") == n
    for _ in range(2):  # under the callback a trainer may do so by itself
        SkipManager.init(given)
        with pytest.raises(StepNotSetError):
            loop.generate(1, {"ids": [1]})
    given = config(tmp_path, {"target": f"{loop.__name__}:generate", "step": "batch.nope"})
    SkipManager.init(given)  # another source of the step in the next job of the process
    with pytest.raises(AttachError, match="batch has no 'nope'"):
        loop.generate(1, {"ids": [1]})
    with pytest.raises(ConfigError):
        SkipManager.init(config(tmp_path, {**given["skip"]["attach"]["rollout"], "step": "a:b"}))
    with pytest.raises(NotInstalledError):  # as a decorated function does
        loop.generate(1, {"ids": [1]})
    SkipManager.reset()
    assert loop.generate(1, {"ids": [1]}) == [2]


def test_a_hook_of_an_earlier_job_is_gone(third_party: Any, tmp_path: Any, caplog: Any) -> None:
    name = third_party(LOOP)
    SkipManager.init(config(tmp_path, f"{name}:Loop.nope"))
    for step in (1, 2):
        SkipManager.set_step(step)
    assert f"skip.attach names {name}:Loop.nope, which nobody called: is it imported" in caplog.text
    SkipManager.reset()
    importlib.import_module(name)


@pytest.mark.parametrize(
    ("role", "entry", "what"),
    [
        ("rollout", 3, ".target: '3' is not package.module"),
        ("rollout", {}, ".target: '' is not package.module:Class.method or"),
        ("rollout", {"target": "m"}, ".target: 'm' is not package.module:Class.method or"),
        ("rollout", {"target": "m:f", "stp": "x"}, ".stp: unknown key"),
        ("rollout", {"target": "m:f", "step": "a b"}, ".step: 'a b' is not a path"),
        ("rollout", {"target": "m:f", "step": ":x"}, ".step: ':x' is not a path"),
        ("rollout", {"target": "m:f", "identity": ["x-y"]}, ".identity: 'x-y' is not a path"),
        ("rollout", {"target": "m:f", "identity": "x"}, ".identity: Invalid value assigned: str"),
        ("rollout", ["m:f"], ".target: "),
        (
            "async_rollout",
            {"target": "m:f", "step": "x"},
            ".step: this role reads the step from each call",
        ),
        (
            "rollout_tq",
            "m:f",
            ": its stages need a queue, which no path names\n  -> decorate them: SkipManager.annot",
        ),
    ],
)
def test_bad_entries_are_named(role: str, entry: Any, what: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_skip({"skip": {"attach": {role: entry}}})
    assert f"skip.attach.{role}{what}" in str(caught.value)
