"""import: verl's dumps, written by verl itself, and dumps that try to do something else."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlskip import SkipManager
from rlskip.errors import ConfigError, MismatchError
from rlskip.keys import DUMP_POSITION, status_tag
from rlskip.queue import MemoryQueue, to_rows
from rlskip.replay import ReplayBuffer
from rlskip.runs.find import the_run
from rlskip.store import StepStore, UnknownTypeError

RUN = "exp_proj/GBS2_N2_in6_out5"


@pytest.fixture
def foreign(tmp_path: Path, verl_files: Path) -> Path:
    """A dump_dir of verl's: two steps of `rollout`, one of `rollout_tq` in two mini-batches."""
    run = tmp_path / "verl" / RUN
    for step, name in ((1, "verl-0.9.1-torch"), (2, "verl-0.9.1-numpy")):
        (run / str(step)).mkdir(parents=True)
        shutil.copy(verl_files / f"{name}.dp", run / str(step) / "gen_batch.dp")
        (run / str(step) / "meta.json").write_text(f'{{"global_steps": {step}}}')
    (run / "7" / "0").mkdir(parents=True)
    shutil.copy(verl_files / "verl-0.9.1-queue.pt", run / "7" / "0" / "tq_batch.pt")
    return tmp_path / "verl"


@pytest.fixture
def import_(rlskip: Any, tmp_path: Path) -> Callable[..., Any]:
    """``import_(source, *options)`` into ``ours``, trusting pickles."""
    return lambda source, *options: rlskip(
        "import", source, "-d", tmp_path / "ours", "--trust-pickle", *options
    )


# -- what verl wrote ---------------------------------------------------------------------------


def test_they_become_dumps_of_the_same_run(
    rlskip: Any, import_: Any, foreign: Path, tmp_path: Path
) -> None:
    said = import_(foreign, "--json")
    assert said.code == 0
    assert [(one["role"], one["step"], one["rows"]) for one in said.json] == [
        ("rollout", 1, 4),
        ("rollout", 2, 4),
        ("rollout_tq", 7, 5),
    ]
    run = tmp_path / "ours" / RUN
    store = StepStore(run)
    assert store.steps() == [1, 2]
    meta = store.read_meta(1)
    assert meta is not None
    assert meta.identity is None
    assert meta.info["imported"].endswith("1/gen_batch.dp")
    shown = rlskip("show", 1, "-d", run).out
    assert "not recorded: it is replayed without a comparison" in shown
    assert "row 0, group a" in shown
    with pytest.raises(UnknownTypeError, match="verl cannot be imported"):
        store.load(1)
    assert [dump.name for dump in the_run(tmp_path / "ours").dumps()] == ["1", "2", "7/0"]
    assert rlskip("verify", "-d", tmp_path / "ours").code == 0


def test_a_dump_that_is_there_stays(import_: Any, foreign: Path, tmp_path: Path) -> None:
    StepStore(tmp_path / "ours" / RUN).save(1, ["ours"])
    said = import_(foreign, "--json")
    assert [one["nbytes"] is None for one in said.json] == [True, False, False]
    again = import_(foreign)
    assert again.out.count("exists already") == 3
    assert StepStore(tmp_path / "ours" / RUN).load(1) == ["ours"]


def test_two_files_of_one_step_are_refused(rlskip: Any, tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        result = {"example_id": 1, "prompt": "Hi", "completion": name, "reward": 1.0}
        (tmp_path / name / "results.jsonl").write_text(json.dumps(result))
    said = rlskip("import", tmp_path, "-d", tmp_path / "in")
    assert (said.code, "so is" in said.err, "--run" in said.err) == (2, True, True)
    assert str(tmp_path / "b" / "results.jsonl") in said.err.replace("\n", "")
    assert rlskip("import", tmp_path / "b", "-d", tmp_path / "in", "--run", RUN).code == 0


def test_dumps_of_ours_beside_them_are_left_out(import_: Any, foreign: Path) -> None:
    StepStore(foreign / "ours_ours" / "GBS1_N1_in1_out1").save(1, ["ours"])
    said = import_(foreign, "--json")
    assert [(one["step"], one["run"]) for one in said.json] == [(1, RUN), (2, RUN), (7, RUN)]


def test_the_groups_of_a_step_are_counted_over_its_parts(
    import_: Any, foreign: Path, tmp_path: Path
) -> None:
    shutil.copytree(foreign / RUN / "7" / "0", foreign / RUN / "7" / "1")
    assert import_(foreign).code == 0
    store = StepStore(tmp_path / "ours" / RUN)
    roots = [group["tags"][""] for part in (0, 1) for group in store.load(7, part=part)["groups"]]
    assert [root[DUMP_POSITION] for root in roots] == [0, 1, 2, 3]


def test_verl_0_8_names_its_steps_otherwise(import_: Any, verl_files: Path, tmp_path: Path) -> None:
    folder = tmp_path / "verl" / RUN / "genstep_000012"
    folder.mkdir(parents=True)
    shutil.copy(verl_files / "verl-0.8.0-torch.dp", folder / "gen_batch.dp")
    (folder / "meta.json").write_text('{"global_steps": 9, "gen_steps": 12}')
    (one,) = import_(tmp_path / "verl", "--json").json
    assert (one["step"], one["run"]) == (9, RUN)
    (folder / "meta.json").write_text('{"global_steps": -1}')
    (one,) = import_(tmp_path / "verl", "--json").json
    assert one["step"] == 12


def test_a_single_file_says_run_and_step_itself(
    import_: Any, verl_files: Path, tmp_path: Path
) -> None:
    file, out = verl_files / "verl-0.9.1-torch.dp", tmp_path / "ours"
    assert "--step" in import_(file).err
    assert "--run" in import_(file, "--step", 3).err
    shapes = (
        f"{name}/GBS1_N1_in1_out1" for name in ("a b", "/abs", "stages", "records", ".a", "7")
    )
    for run in ("../out/side", "a_b/7", *shapes):  # in these no command would find it
        assert import_(file, "--step", 3, "--run", run).code == 2, run
    assert not out.exists()
    assert import_(file, "--step", 3, "--run", RUN).code == 0
    assert StepStore(out / RUN).steps() == [3]


def test_several_dumps_are_not_of_one_step(import_: Any, foreign: Path) -> None:
    said = import_(foreign, "--step", 3)
    assert said.code == 2
    assert "--step: 3 dumps cannot all be of one step" in said.err


def test_it_refuses_pickles_that_nobody_trusts(rlskip: Any, foreign: Path, tmp_path: Path) -> None:
    said = rlskip("import", foreign, "-d", tmp_path / "ours")
    assert said.code == 2
    assert "add --trust-pickle" in said.err
    assert not (tmp_path / "ours").exists()


# -- replaying a queue's batch -----------------------------------------------------------------


class Trainer:
    """Submits prompts that have content, and samples the real buffer."""

    def __init__(self) -> None:
        self.queue = MemoryQueue()
        self.buffer = ReplayBuffer(self.queue, {"replay": {"timeout_s": 20.0}})
        self.submitted: list[str] = []

    @SkipManager.annotate(role="rollout_tq", queue=lambda self, *_, **__: self.queue)
    def submit(self, prompts: dict[str, Any]) -> None:
        self.submitted += prompts["uid"]
        for uid in prompts["uid"]:
            self.queue.put([uid], "train", tags=[status_tag(7, "finished", 2)])


@pytest.fixture
def replaying(import_: Any, foreign: Path, tmp_path: Path) -> Callable[..., Trainer]:
    import_(foreign)

    def start(**more: Any) -> Trainer:
        shape = {"gbs": 2, "n": 2, "prompt_len": 6, "response_len": 5}
        names = {"experiment_name": "exp", "project_name": "proj"}
        skip = {"dump_dir": str(tmp_path / "ours"), **shape, **names, **more}
        SkipManager.init({"skip": {**skip, "rollout_tq": {"enable": True}}})
        SkipManager.set_step(7)
        return Trainer()

    return start


def test_a_queue_batch_is_replayed_group_by_group_in_order(
    replaying: Callable[..., Trainer], caplog: pytest.LogCaptureFixture
) -> None:
    trainer = replaying()
    assert trainer.submit({"uid": ["x_1", "y"], "text": ["what", "else"]}) is None
    assert trainer.submitted == []
    batch, _ = trainer.buffer.sample(7, "train")
    rows = dict(zip(batch.keys, to_rows(trainer.queue.get(batch.keys, "train")), strict=True))
    # Every session and every row of it, which verl's own replay loses.
    assert sorted(rows) == ["x_1_0_0", "x_1_1_0", "y_0_0", "y_0_1", "y_1_0"]
    assert rows["x_1_1_0"]["responses"].tolist() == [100, 101, 102, 103]
    assert rows["y_0_1"]["prompts"].tolist() == [20, 21, 22, 23, 24]
    assert rows["y_0_1"]["uid"] == "y"
    assert "record no prompts; they are not compared" in caplog.text


def test_it_goes_by_place_so_the_number_of_prompts_must_be_the_same(
    replaying: Callable[..., Trainer],
) -> None:
    with pytest.raises(MismatchError, match="holds 2 groups for the batch's 3 prompts"):
        replaying().submit({"uid": ["x", "y", "z"], "text": ["a", "b", "c"]})


def test_nothing_is_imported_through_a_link(import_: Any, foreign: Path, tmp_path: Path) -> None:
    for path in ("ours", "outside"):
        (tmp_path / path).mkdir()
    (tmp_path / "ours" / "exp_proj").symlink_to(tmp_path / "outside")
    said = import_(foreign)
    assert said.code == 2
    assert "is a symbolic link" in said.err
    assert not list((tmp_path / "outside").iterdir())


def test_a_short_group_is_generated_again(
    import_: Any, foreign: Path, tmp_path: Path, replaying: Callable[..., Trainer]
) -> None:
    lacking = tmp_path / "ours" / RUN.replace("N2", "N3")
    lacking.parent.mkdir(exist_ok=True)
    (foreign / RUN).rename(foreign / RUN.replace("N2", "N3"))
    import_(foreign)
    trainer = replaying(n=3, on_mismatch="regenerate")
    trainer.submit({"uid": ["x", "y"], "text": ["a", "b"]})
    assert trainer.submitted == ["x", "y"], "two sessions of three were dumped"


def test_restore_rng_is_refused_for_what_was_imported(replaying: Callable[..., Trainer]) -> None:
    with pytest.raises(ConfigError, match="has no states of the random generators"):
        replaying(restore_rng=True).submit({"uid": ["x", "y"], "text": ["a", "b"]})
