"""What is refused before the first step, and whether a loop may leave its engine out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rlskip import SkipManager
from rlskip.config.facts import HostFacts
from rlskip.config.settings import read_skip
from rlskip.errors import ConfigError, MismatchError, MissError
from tests.skip.trainers import Stage


def start(
    dumps: Path, total: Any = 4, role: str = "rollout", filters: bool = False, **skip: Any
) -> None:
    config = {"skip": {"dump_dir": str(dumps), **skip, role: {"enable": True}}}
    trainer = {"total_training_steps": total}
    dynamic = {"filter_groups": {"enable": filters}}
    SkipManager.init({**config, "trainer": trainer, "algorithm": dynamic})


@pytest.fixture
def dumps(init: Callable[..., Path]) -> Path:
    """Steps 1 and 3 were dumped."""
    folder = init()
    for step in (1, 3):
        Stage().at(step)
    return folder


def test_all_holes_are_named_before_the_first_step(dumps: Path, monkeypatch: Any) -> None:
    what = r"^skip\.rollout\.on_miss=error: steps 2,4 have no usable dump in"
    with pytest.raises(ConfigError, match=what) as error:
        start(dumps, on_miss="error")
    assert "'skip.steps=\"1,3\"'" in error.value.remedy
    (dumps / next(f for f in dumps.rglob("1/gen_batch.dp"))).unlink()
    with pytest.raises(ConfigError, match="steps 1,2,4 have"):
        start(dumps, on_miss="error")
    monkeypatch.setenv("WORLD_SIZE", "2")  # shards of several processes are not looked for
    start(dumps, on_miss="error")


@pytest.mark.parametrize(
    ("folder", "more", "steps"),
    [
        # With dynamic sampling the dumps tell the last step: how many an epoch has is not known.
        ("dumps", {"filters": True, "match": "step"}, "2"),
        ("none", {"filters": True, "match": "step"}, "1"),
        # Without any dump nothing serves another step.
        ("none", {"match": "run"}, "1-4"),
        ("none", {"action": "repeat"}, "1-4"),
    ],
)
def test_what_is_a_hole(dumps: Path, folder: str, more: dict[str, Any], steps: str) -> None:
    with pytest.raises(ConfigError, match=f"steps {steps} have no usable dump"):
        start(dumps.with_name(folder), on_miss="error", **more)


def test_dynamic_sampling_looks_in_the_whole_run_unless_told_otherwise(dumps: Path) -> None:
    """As where another reward function moves prompts to other steps."""
    start(dumps, filters=True)
    stage = Stage()
    prompts = {"ids": torch.arange(3) + 1}  # those of step 1
    assert stage.at(3, prompts) == 1
    assert stage.calls == 0
    start(dumps, filters=True, match="step")
    with pytest.raises(MismatchError):
        stage.at(3, prompts)


def test_a_run_that_another_shape_hides_is_named(dumps: Path) -> None:
    with pytest.raises(ConfigError) as error:
        start(dumps, on_miss="error", n=8)
    assert "has dumps of 2 steps, which are not found: n is 8 now, any there" in error.value.what
    assert error.value.remedy.startswith("set back what differs, or ")


@pytest.mark.parametrize("match", ["step", "run", "prompt"])
def test_dumps_of_other_sampling_serve_no_step(init: Callable[..., Path], match: str) -> None:
    def at(temperature: float, **skip: Any) -> bool:
        rollout = {"rollout": {"temperature": temperature}}
        host = {"actor_rollout_ref": rollout, "trainer": {"total_training_steps": 1}}
        init(host=host, **{"match": match, **skip})
        return SkipManager.will_replay("rollout", [1])

    at(1.0, match="step", at=1)
    SkipManager.annotate(role="rollout")(lambda prompts: prompts)([1])
    assert [at(1.0), at(0.5), at(0.5, action="repeat")] == [True, False, match != "prompt"]
    with pytest.raises(ConfigError, match=r"temperature: 0\.5 now, 1\.0 in the dump") as error:
        at(0.5, on_miss="error")
    assert "set back what differs" in error.value.remedy


def test_a_dump_of_another_format_is_refused_by_name(dumps: Path) -> None:
    for path in dumps.rglob("3/meta.json"):
        path.write_text(json.dumps({**json.loads(path.read_text()), "version": 99}))
    what = "dumps of steps 3 .* another format .a dump of format 99;"
    with pytest.raises(ConfigError, match=what):
        start(dumps, on_miss="error")


@pytest.mark.parametrize(
    "more",
    [
        {"on_miss": "generate"},
        {"steps": [1, 3]},
        {"total": 1},
        {"total": None},
        {"action": "repeat"},
        {"match": "run"},
        {"role": "async_rollout"},
    ],
)
def test_what_is_no_hole(dumps: Path, more: dict[str, Any]) -> None:
    start(dumps, **{"on_miss": "error", **more})


def test_a_loop_may_ask(dumps: Path) -> None:
    rows: list[Any] = [({}, [1, 3], True), ({}, range(1, 4), False), ({"n": 8}, [1], False)]
    rows += [({"steps": [1]}, [1, 3], False), ({"action": "repeat"}, range(1, 9), True)]
    for skip, steps, will in rows:
        start(dumps, **skip)
        assert SkipManager.will_replay("rollout", steps) == will
    assert not SkipManager.will_replay("rollout_tq", [1])
    start(dumps.with_name("a") / "b")
    assert not dumps.with_name("a").exists(), "what can be made is not made"


def test_what_the_host_knows_of_a_call_is_compared_before_it(tmp_path: Path) -> None:
    annotate = SkipManager.annotate("rollout", identity={"temperature": 1.0})
    for temperature in (1.0, 0.5):
        known = HostFacts(called_with={"rollout": {"temperature": temperature}})
        config = {"skip": {"dump_dir": str(tmp_path), "rollout": {"enable": True}}}
        SkipManager.init(read_skip(config, known))
        SkipManager.set_step(1)
        annotate(lambda prompts: prompts)([1])
        assert SkipManager.will_replay("rollout", [1]) is (temperature == 1.0)


@pytest.mark.parametrize("number", [0, 1, 2])
@pytest.mark.parametrize("how", ["gone", "cut", "quarantined"])
def test_every_call_of_a_step_is_looked_at(
    init: Callable[..., Path], rlskip: Any, number: int, how: str
) -> None:
    dumps, stage = init(at=1), Stage()
    [stage.generate({"ids": prompts}) for prompts in ([1], [2], [3])]
    start(dumps, 1, on_miss="error")
    assert SkipManager.will_replay("rollout", [1])
    store = SkipManager.store("rollout")
    name = store.place(1, store.in_order(1)[number]).name
    if how == "quarantined":
        store.quarantine(1, "for a test", store.in_order(1)[number])
    else:
        for file in (store.directory / name).glob("*"):
            file.unlink() if how == "gone" else file.write_bytes(file.read_bytes()[:-9])
    if how == "gone":
        (store.directory / name).rmdir()
    start(dumps, 1)
    if (number, how) == (2, "gone"):  # no name tells that there was a last call
        assert SkipManager.will_replay("rollout", [1])
        start(dumps, 1, on_miss="error")
        stage.at(1, {"ids": [1]})
        with pytest.raises(MissError):
            stage.generate({"ids": [3]})
        return
    assert not SkipManager.will_replay("rollout", [1])
    with pytest.raises(ConfigError) as error:
        start(dumps, 1, on_miss="error")
    assert error.value.what.startswith("the dumps of steps 1 in ")
    lacking = f"{name}, which is" if number == 2 else f"call {number}, whose dump is missing or"
    assert f" lack {lacking} damaged" in error.value.what
    init(at=1)  # in another order
    [stage.generate({"ids": prompts}) for prompts in ([3], [2], [1])]
    rlskip("prune", dumps, "--quarantined", "--yes")
    [start(dumps, 1, on_miss="error", match=match) for match in ("step", "run", "prompt")]


def test_without_an_engine_no_role_generates(dumps: Path) -> None:
    assert SkipManager.start_engine
    what = r"^skip\.rollout\.steps: .*steps 2-4 are not listed and would generate"
    with pytest.raises(ConfigError, match=what):
        start(dumps, steps=[1], start_engine=False)
    start(dumps, 1, steps=[1], start_engine=False, on_miss="generate")
    assert not SkipManager.start_engine
    assert SkipManager.skip_instances["rollout"].local_config.on_miss == "error"
    SkipManager.reset()
    assert SkipManager.start_engine


def unwritable(kind: str, folder: Path) -> Path:
    if kind == "/proc":
        return Path("/proc/nope")
    if kind == "too long":
        return folder.joinpath(*["x" * 200] * 19)
    if kind == "a looping link":
        (folder / "loop").symlink_to(folder / "loop")
        return folder / "loop"
    (folder / "file").write_text("")
    return folder / "file" / "dumps"


KINDS = ("/proc", "below a file", "a looping link", "too long")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("role", ["rollout", "async_rollout", "rollout_tq"])
def test_an_unwritable_dump_dir_ends_the_start(kind: str, role: str, tmp_path: Path) -> None:
    dumps = unwritable(kind, tmp_path)
    start(dumps, None, role, on_miss="error")  # which never generates
    assert role in SkipManager.skip_instances
    SkipManager._start({"skip": {"dump_dir": str(dumps), role: {"enable": True}}}, checks=False)
    assert role in SkipManager.skip_instances, "a process that does not train does not check"
    with pytest.raises(ConfigError, match=rf"skip\.dump_dir: .*role {role} may generate"):
        start(dumps, role=role)
    # Nothing runs unskipped afterwards either.
    generate = SkipManager.annotate(role=role)(lambda prompts: prompts)
    with pytest.raises(Exception, match=r"SkipManager\.init failed"):
        generate([1])
