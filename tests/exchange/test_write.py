"""rlskip.write: sessions of any origin become a step that is read, and replayed by a loop."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict

import rlskip
import rlskip.errors
from rlskip import SkipManager
from rlskip.batch.padding import LengthError
from rlskip.errors import ConfigError, MismatchError, MissError
from rlskip.exchange.rows import BadRowError
from rlskip.exchange.write import StepExistsError
from rlskip.store import StepStore, UnsupportedTypeError, run_directory

ANY = ("any",) * 4


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return run_directory(tmp_path / "dumps", "mine", "math", *ANY)


def row(prompt: str = "a", *said: int, **more: Any) -> dict[str, Any]:
    ids = list(said or (7, 8))
    return {
        "prompt": prompt,
        "prompt_ids": [ord(c) for c in prompt],
        "completion_ids": ids,
        "completion_mask": [1] * len(ids),
        "logprobs": [-0.5] * len(ids),
        "reward": 1.0,
        **more,
    }


def sessions(prompts: str) -> list[dict[str, Any]]:
    """Two a prompt, which come mixed."""
    return [row(p, ord(p), k, reward=float(k)) for k in range(2) for p in prompts]


# -- what is read ------------------------------------------------------------------------------


def test_it_is_read_as_any_step(run: Path) -> None:
    made = rlskip.write(run, iter(sessions("ab")), step=3)
    opened = rlskip.open(run.parents[1]).run
    assert (made, [*opened]) == (opened[3], [made])
    first, second, third, _ = opened.iter_rows()
    assert (first["prompt"], first["response"], first["reward"]) == ([97], [97, 0], 0.0)
    assert (first["mask"], first["log_probs"], first["own_prompt"]) == ([1, 1], [-0.5] * 2, "a")
    assert (second["group"], second["session"], second["response"]) == (first["group"], 1, [97, 1])
    assert third["group"] != first["group"]
    assert [group.mean_reward for group in opened.groups()] == [0.5, 0.5]


def test_what_was_read_is_written_again(run: Path, tmp_path: Path) -> None:
    """With the names that `rlskip.open` gives."""
    rlskip.write(run, sessions("ab"), step=3)
    names = ["uid", "prompt", "response", "mask", "log_probs", "reward"]
    rows = [{k: r[k] for k in names} for r in rlskip.open(run).iter_rows() if r["reward"]]
    again = rlskip.write(run_directory(tmp_path / "more", "mine", "math", *ANY), rows, step=1)
    assert [{name: r[name] for name in names} for r in again.iter_rows()] == rows


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor], ids=["list", "numpy", "torch"])
def test_tokens_of_any_kind_are_kept_as_lists(run: Path, kind: Any) -> None:
    given = row("ab", 5, 6)
    names = ("prompt_ids", "completion_ids", "completion_mask", "logprobs")
    given |= {name: kind(given[name]) for name in names}
    given |= {"reward": kind([0.0, 0.5]), "image": np.arange(3)}
    (read,) = rlskip.write(run, [given], step=1).iter_rows()
    assert (read["prompt"], read["response"], read["reward"]) == ([97, 98], [5, 6], 0.5)
    (dump,) = rlskip.open(run)[1].dumps()
    columns = dump.load()
    assert all(type(columns[name][0]) is list for name in (*names, "reward"))
    assert isinstance(columns["image"][0], np.ndarray)
    assert isinstance(given["logprobs"], type(kind([0.0]))), "the caller's rows stay"


def test_a_row_may_have_no_tokens_no_mask_and_no_reward(run: Path) -> None:
    texts = [{"prompt": "Hi", "completions": "there", "reward": None}]
    (said,) = rlskip.write(run, texts, step=1).sessions()
    assert [one["content"] for one in said.messages or ()] == ["Hi", "there"]
    rows = [row(completion_mask=None, logprobs=None, reward=None), row()]
    first, second = rlskip.write(run, rows, step=2).iter_rows()
    assert (first["log_probs"], first["reward"], second["reward"]) == (None, None, 1.0)


COLUMNS = {
    "prompts": torch.tensor([[0, 5], [6, 7]]),
    "responses": torch.tensor([[1, 2], [3, 0]]),
    "attention_mask": torch.tensor([[0, 1, 1, 1], [1, 1, 1, 0]]),
    "rewards": torch.tensor([[0.0, 1.0], [0.5, 9.0]]),
}


@pytest.mark.parametrize("kind", ["columns", "lists", "TensorDict", "frame", "data set"])
def test_batches_and_tables_are_rows_without_padding(run: Path, kind: str) -> None:
    lists = [{"prompt_ids": [5], "completion_ids": [1, 2], "reward": 1.0, "n": 1},
             {"prompt_ids": [6, 7], "completion_ids": [3], "reward": 0.5, "n": 2}]  # fmt: skip
    given: Any = TensorDict(COLUMNS, 2) if kind == "TensorDict" else COLUMNS
    if kind == "lists":
        given = {name: [row[name] for row in lists] for name in lists[0]} | {"prompt": ["a", "b"]}
    elif kind == "frame":  # the second row lacks the mask
        given = pytest.importorskip("pandas").DataFrame(
            [lists[0] | {"completion_mask": [1, 1]}, lists[1]]
        )
    elif kind == "data set":
        given = pytest.importorskip("datasets").Dataset.from_list(lists)
    rows = list(rlskip.write(run, given, step=1).iter_rows())
    assert [row["prompt"] for row in rows] == [[5], [6, 7]]
    assert [row["response"] for row in rows] == [[1, 2], [3]]
    assert [row["reward"] for row in rows] == [1.0, 0.5]


def test_columns_of_a_tensordict_are_values(run: Path) -> None:
    mask = torch.tensor([[1.0, 0.0], [1.0, 0.0]], dtype=torch.bfloat16)
    more = {"rewards": torch.tensor([3.0, 0.5]), "response_mask": mask}
    within = TensorDict({"level": torch.arange(2)}, [2])
    step = rlskip.write(run, TensorDict({**COLUMNS, **more, "within": within}, 2))
    names = ["reward", "mask", "within"]
    assert [[row[name] for name in names] for row in step.iter_rows(names)] == [
        [3.0, [1, 0], {"level": 0}],
        [0.5, [1], {"level": 1}],
    ]
    rows = [{"prompt_ids": torch.ones(n), "completion_ids": torch.ones(1)} for n in (1, 2)]
    lazy = [TensorDict({k: v.long() for k, v in row.items()}) for row in rows]
    opened = rlskip.write(run, LazyStackedTensorDict(*lazy)).iter_rows(["prompt"])
    assert [row["prompt"] for row in opened] == [[1], [1, 1]]


# -- where it goes -----------------------------------------------------------------------------


def test_names_and_sizes_name_the_run(tmp_path: Path, replay: Any) -> None:
    names = {"experiment_name": "mine", "project_name": "math"}
    made = rlskip.write(tmp_path / "dumps", sessions("ab"), step=1, **names)
    assert made.name == "mine_math/GBSany_Nany_inany_outany/1"
    assert len(replay(["a", "b"])["uid"]) == 4
    sized = rlskip.write(tmp_path / "dumps", sessions("ab"), step=1, **names, gbs=2, n=2)
    assert sized.name == "mine_math/GBS2_N2_inany_outany/1"
    again = rlskip.write(None, sessions("ab"), step=2, like=sized)
    elsewhere = rlskip.write(tmp_path / "more", sessions("ab"), step=1, like=sized.run.directory)
    assert (again.name, elsewhere.name) == (sized.name[:-1] + "2", sized.name)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"experiment_name": "a"}, "give both"),
        ({"experiment_name": "a", "project_name": "b", "like": "x"}, "give one of them"),
        ({"like": "nowhere"}, "no such file or directory"),
        ({"for_command": "echo"}, "not a Hydra application"),
        ({"for_command": ""}, "the command is empty"),
        ({"experiment_name": "a", "project_name": "b", "n": 0}, "a size is 0"),
        ({}, "experiment_name= and project_name="),
        *(({"step": step}, "is not a whole number from 1 on") for step in (0, True, "1")),
    ],
)
def test_a_run_or_a_step_that_is_not_named_is_refused(
    tmp_path: Path, given: Any, message: str
) -> None:
    with pytest.raises(rlskip.errors.RlskipError, match=message):
        rlskip.write(tmp_path / "dumps", [row()], **{"step": 1, **given})
    assert not [*tmp_path.iterdir()]


def test_a_command_names_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "app.py").write_text(
        "import hydra\n@hydra.main(version_base=None)\ndef main(cfg): pass\nmain()\n"
    )
    command = f"{sys.executable} app.py +skip=rollout_cache skip.dump_dir=d skip.n=2"
    command += " skip.experiment_name=mine skip.project_name=math"
    made = rlskip.write(None, sessions("ab"), for_command=command)
    assert (made.run.dump_dir, made.number) == (tmp_path / "d", 1)
    assert made.run.name.startswith("mine_math/GBS")
    with pytest.raises(rlskip.errors.RlskipError, match="skips no rollouts"):
        rlskip.write(None, [row()], for_command=f"{sys.executable} app.py")


def test_without_a_step_the_next_one_is_taken(run: Path, replay: Any) -> None:
    rlskip.write(run, sessions("a"), step=3)
    assert [rlskip.write(run, sessions(p)).number for p in "bc"] == [4, 5]
    assert replay(["c", "b"], match="prompt")["completion_ids"][0] == [99, 0]


def test_what_the_rows_lack_is_named(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [row()]
    rlskip.write(run, rows, step=1)
    assert not caplog.messages
    without = [{k: v for k, v in row().items() if k not in ("logprobs", "reward")}]
    rlskip.write(run, without, step=2)
    assert "has no log-probs of the engine, rewards" in caplog.text


# -- what is replayed --------------------------------------------------------------------------

generated: list[Any] = []


@SkipManager.annotate(role="rollout")
def generate(prompts: Any, temperature: float = 1.0) -> Any:
    generated.append(prompts)
    return {"completion_ids": [[0]] * len(prompts), "uid": list(map(str, prompts))}


@pytest.fixture
def replay(run: Path) -> Any:
    def replay(
        prompts: Any, step: int = 1, *, match: str = "step", stage: Any = generate, **more: Any
    ) -> Any:
        role = {"enable": True, "match": match, "on_miss": "error"}
        names = {"experiment_name": "mine", "project_name": "math"}
        place = {"dump_dir": str(run.parents[1]), **names, **more}
        SkipManager.init({"skip": {**place, "rollout": role}})
        SkipManager.set_step(step)
        return stage(prompts, temperature=0.7)

    return replay


def test_a_loop_replays_it_by_step(run: Path, replay: Any) -> None:
    rlskip.write(run, sessions("ab"), step=1)
    assert replay(["a", "b"])["completion_ids"] == [[97, 0], [97, 1], [98, 0], [98, 1]]
    with pytest.raises(MismatchError, match=r"row 1 is 'c' now, 'b' in the dump"):
        replay(["a", "c"])
    with pytest.raises(MissError):
        replay(["a", "b"], step=2)


def test_a_loop_replays_it_by_prompt(run: Path, replay: Any) -> None:
    rlskip.write(run, sessions("ab"), step=1)
    rlskip.write(run, [*sessions("xc"), row("c", 9)], step=2)
    replayed = replay(["c", "a"], step=5, match="prompt")
    assert replayed["completion_ids"] == [[99, 0], [99, 1], [9], [97, 0], [97, 1]]
    with pytest.raises(MissError, match="1 of 2 prompts are in no dump of the run"):
        replay(["b", "d"], step=6, match="prompt")
    assert not generated


@SkipManager.annotate(role="rollout", identity={"engine": "mine"})
def sampled(prompts: Any, temperature: float = 1.0) -> Any:
    raise AssertionError("it is replayed")


def test_what_made_rollouts_by_hand_is_not_compared_but_named(
    run: Path, replay: Any, caplog: pytest.LogCaptureFixture
) -> None:
    rlskip.write(run, sessions("ab"), step=1)
    assert replay(["a", "b"], stage=sampled)["completion_ids"][0] == [97, 0]
    assert "does not record arguments.temperature, identity.engine" in caplog.text
    with pytest.raises(MissError, match="no unused dump of the step was made for such a"):
        sampled(["b", "a"])


def test_a_prompt_may_be_given_for_each_row(run: Path, replay: Any) -> None:
    """As TRL gives its stage: each prompt as often as it has sessions."""
    rlskip.write(run, rows := sessions("ab"), step=1, prompts=[row["prompt"] for row in rows])
    assert replay(["b", "a", "b"], match="prompt")["completion_ids"] == [[98, 0], [97, 0], [98, 1]]


def test_prompts_may_be_token_ids_or_messages(run: Path, replay: Any) -> None:
    ids = [{"prompt_ids": torch.tensor([i, 1]), "completion_ids": [i]} for i in (4, 5)]
    rlskip.write(run, ids, step=1)
    assert replay([[4, 1], [5, 1]])["completion_ids"] == [[4], [5]]
    chats = [[{"role": "user", "content": text}] for text in "xy"]
    rlskip.write(run, [{"raw_prompt": c, "completions": "z"} for c in chats], step=2)
    assert replay(chats[::-1], 2, match="prompt")["raw_prompt"] == chats[::-1]


def test_the_prompts_of_the_loop_may_be_any_batch(run: Path, replay: Any) -> None:
    batch = {"uid": ["u2", "u1"], "text": ["two", "one"], "level": torch.tensor([2, 1])}
    rows = [{"uid": uid, "completion_ids": [k]} for k, uid in enumerate(["u1", "u2", "u1"])]
    rlskip.write(run, rows, step=1, prompts=batch)
    assert replay(batch)["completion_ids"] == [[1], [0], [2]], "in the order of the prompts"
    other = {name: column[:1] for name, column in batch.items()}
    assert replay(other, match="prompt")["completion_ids"] == [[1]]


def test_a_stage_gets_the_type_that_it_returns(run: Path, replay: Any) -> None:
    def batch(columns: dict[str, list[Any]]) -> TensorDict:
        tensors = {name: torch.tensor(columns[name]) for name in ("completion_ids", "reward")}
        return TensorDict({**tensors, "prompts": torch.tensor(columns["prompt_ids"])}, 4)

    rlskip.write(run, sessions("ab"), step=1, returns=batch)
    assert isinstance(replayed := replay(["a", "b"]), TensorDict)
    assert replayed["completion_ids"].tolist() == [[97, 0], [97, 1], [98, 0], [98, 1]]


def test_what_a_stage_gets_has_all_rows(run: Path) -> None:
    for made in (None, {"completion_ids": [[1]]}):
        with pytest.raises(BadRowError, match=r"it made \d rows? of 4"):
            rlskip.write(run, sessions("ab"), step=1, returns=lambda columns, made=made: made)


def test_later_turns_have_prompts_of_their_own(tmp_path: Path) -> None:
    run = run_directory(tmp_path, "mine", "math", 1, 2, "any", "any")
    rows = [
        {"uid": "u", "session_id": k, "turn": turn, "prompt_ids": [1] * turn,
         "completion_ids": [k], "reward": float(turn)}
        for turn in (2, 1) for k in range(2)
    ]  # fmt: skip
    written = rlskip.write(run, rows, step=1)
    assert [(one.rows, one.reward) for one in written.sessions()] == [([2, 0], 3.0), ([3, 1], 3.0)]
    assert rlskip.open(run)[1].dumps()[0].full_meta().info["rows_per_prompt"] == 4


def test_the_sizes_of_the_directory_are_those_of_the_run(tmp_path: Path, replay: Any) -> None:
    run = run_directory(tmp_path / "dumps", "mine", "math", 2, 2, 6, 8)
    rlskip.write(run, sessions("ab"), step=1)
    shape = {"gbs": 2, "n": 2, "prompt_len": 6, "response_len": 8}
    assert len(replay(["a", "b"], **shape)["uid"]) == 4
    with pytest.raises(BadRowError, match="it has 1 session, and the directory's name says N2"):
        rlskip.write(run, [row("a")], step=2)


# -- what is refused ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "there are no rows"),
        (["a"], "row 0: it is a str, not a mapping"),
        ([row(), {**row(), "extra": 1}], "row 1: it and row 0 do not both have extra"),
        (
            [row(completion_mask=[1])],
            "completion_mask has 1 value in row 0, and its response has 2 tokens",
        ),
        ([row(), row(logprobs=[-1.0] * 4)], "logprobs has 4 values in row 1"),
        ([row(logprobs=["x", "y"])], "row 0: logprobs is not a sequence of numbers"),
        ([row(completion_ids=[0.5, 1.0])], "completion_ids is not a sequence of token ids"),
        ([row(prompt_ids=None)], "prompt_ids is not a sequence of token ids"),
        ([{"prompt": "a", "logprobs": [-1.0]}], "row 0: logprobs needs the tokens of a response"),
        ([{"uid": "u", "completion_ids": [1]}], "a row has no prompt, only uid, completion_ids"),
        ([row("a", uid="u"), row("b", uid="u")], "row 1: its uid, 'u', is that of rows with anot"),
        ([row(uid=None)], "row 0: its uid is None"),
        ([row(), row(reward="1.0")], "row 1: reward is '1.0', not a number"),
        ([row(turn=0), row(turn=1)], "turn numbers the turns of sessions"),
        ([row(uid="u", turn=0), row(uid="u", turn=1)], "turn numbers the turns of sessions"),
        (None, "it is a NoneType, neither rows nor a batch"),
        (
            {"prompts": [[1]] * 2, "responses": [[2]] * 2, "reward": [1.0]},
            "reward: it has 1 value for 2 rows",
        ),
        (
            {"prompts": [[1]] * 2, "responses": [[2, 3]] * 2, "rm_scores": [[0.0, 1.0], [1.0] * 9]},
            "rm_scores has 9 values in row 1, and its response has 2 tokens",
        ),
    ],
)
def test_rows_that_are_no_sessions_are_named(run: Path, rows: list[Any], message: str) -> None:
    with pytest.raises((BadRowError, LengthError)) as told:
        rlskip.write(run, rows, step=1)
    assert message in str(told.value)
    assert not run.exists()


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (["a", "b", "c"], "the rows are 2 groups, for 3 prompts"),
        ({"uid": ["u", "v"], "text": ["a", "b"]}, "the rows and the prompts do not both have v, w"),
        (["b", "a"], "prompt 0 is that of other rows"),
    ],
)
def test_prompts_of_other_rows_are_named(run: Path, prompts: Any, message: str) -> None:
    with pytest.raises(BadRowError, match=message):
        rlskip.write(run, [row("a", uid="u"), row("b", uid="w")], step=1, prompts=prompts)


def test_rows_of_one_uid_have_one_prompt(tmp_path: Path) -> None:
    rows = [{"uid": uid, "completion_ids": [i]} for i, uid in enumerate("xxyy")]
    with pytest.raises(BadRowError, match=r"row 1: its uid, 'x', is that of rows with another"):
        rlskip.write(tmp_path, rows, prompts=[*"abab"], experiment_name="e", project_name="p")
    rlskip.write(tmp_path, rows, prompts=[*"aabb"], experiment_name="e", project_name="p")


def test_a_file_is_no_dump_dir(tmp_path: Path) -> None:
    (tmp_path / "dumps").write_text("")
    with pytest.raises(ConfigError, match="it is a file"):
        rlskip.write(tmp_path / "dumps", [row()], experiment_name="mine", project_name="math")


def test_what_cannot_be_kept_leaves_nothing(run: Path) -> None:
    with pytest.raises(UnsupportedTypeError):
        rlskip.write(run, [row(engine=object())], step=1)
    with pytest.raises(UnsupportedTypeError):
        rlskip.write(run, [row()], step=1, prompts=[object()])
    assert not run.exists()


@pytest.mark.parametrize("call", ["", "part-2"])
def test_a_step_that_exists_stays(run: Path, call: str) -> None:
    StepStore(run).save(1, {"x": [1]}, call=call)
    with pytest.raises(StepExistsError, match="has a dump already, which stays"):
        rlskip.write(run, [row()], step=1)
    assert StepStore(run).load(1, call=call) == {"x": [1]}


def test_of_two_writers_one_is_told(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one published after this one had looked."""
    from rlskip.exchange import write as module

    rlskip.write(run, [row("a", 1)], step=1)
    monkeypatch.setattr(module, "has_dump", lambda directory, step: False)
    with pytest.raises(StepExistsError):
        rlskip.write(run, [row("a", 2)], step=1)
    assert [r["response"] for r in rlskip.open(run).iter_rows()] == [[1]]
