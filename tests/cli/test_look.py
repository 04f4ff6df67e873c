"""ls, show, verify and diff: what they find, and that looking changes nothing."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from rlskip.cli.dumps import compact
from rlskip.store import StepStore


def listing(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def damage(run_dir: Path, step: int) -> None:
    file = run_dir / str(step) / "gen_batch.dp"
    data = bytearray(file.read_bytes())
    data[40] ^= 1
    file.write_bytes(data)


def test_ls_counts_runs_and_the_hits_of_other_jobs(rlskip: Any, dumps: Path) -> None:
    first, second = rlskip("ls", dumps, "--json").json
    assert first["run"] == "grpo-lr2_tiny/GBS4_N2_in6_out8"
    assert first["steps"] == [1, 2, 3]
    assert (first["hits"], second["hits"], second["misses"]) == (0, 3, 3)
    assert second["seconds_saved"] == pytest.approx(3 * 12.25 + 6)
    assert second["size"] == sum(p.stat().st_size for p in dumps.glob("grpo_tiny/*/*/*"))


def test_ls_of_a_run_lists_its_steps(rlskip: Any, run_dir: Path) -> None:
    (run,) = rlskip("ls", run_dir, "--json").json
    assert [one["step"] for one in run["dumps"]] == [1, 2, 3]
    assert [one["hits"] for one in run["dumps"]] == [1, 1, 1]
    assert run["dumps"][1]["seconds"] == 14.5
    said = rlskip("ls", run_dir)
    assert "20260921-141300-11aa22bb" in said.out
    assert said.code == 0


def test_records_say_which_run_they_are_of(
    rlskip: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rlskip import SkipManager

    @SkipManager.annotate(role="rollout")
    def generate(prompts: list[int]) -> list[int]:
        return [10 * prompt for prompt in prompts]

    monkeypatch.setenv("RLSKIP_JOB", "job")
    for name in ("one", "two", "one"):
        config = {"dump_dir": str(tmp_path / "d"), "experiment_name": name}
        SkipManager.init({"skip": {**config, "rollout": {"enable": True}}})
        SkipManager.set_step(1)
        generate([1, 2])
    SkipManager.reset()
    hits = {
        run["run"].split("_")[0]: run["hits"] for run in rlskip("ls", tmp_path / "d", "--json").json
    }
    assert hits == {"one": 1, "two": 0}


def test_show_gives_figures_and_rows(rlskip: Any, run_dir: Path) -> None:
    (shown,) = rlskip("show", 2, "-d", run_dir, "--rows", 2, "--json").json
    rollouts = StepStore(run_dir).load(2)
    fields = {field["name"]: field for field in shown["fields"]}
    assert fields["responses"]["shape"] == "8x8"
    assert fields["responses"]["max"] == int(rollouts["responses"].max())
    assert fields["rm_scores"]["mean"] == pytest.approx(float(rollouts["rm_scores"].mean()))
    assert fields["uid"]["note"] == "4 distinct"
    row = shown["sample"][1]
    length = int(rollouts["response_mask"][1].sum())
    assert row["prompt"] == rollouts["prompts"][1].tolist()
    assert row["response"] == rollouts["responses"][1, :length].tolist(), "without the padding"
    assert len(row["log_probs"]) == length
    assert row["reward"] == float(rollouts["rm_scores"][1].sum())
    assert len(shown["sample"]) == 2
    assert "row 1, uid s2p0, reward 1" in rlskip("show", run_dir / "2").out


@pytest.mark.parametrize(
    "rollouts",
    [
        [10, 20, 30],
        [{"text": "a"}, {"text": "b", "more": 1}],
        {"prompt_token_ids": [[1, 2], [3]], "response_ids": [[4], [5, 6]], "rewards": [0.5, 1.0]},
        {"note": "no rows at all"},
        TensorDict({"x": torch.zeros(0, 3)}, [0]),
        TensorDict({"x": torch.tensor([float("nan"), float("inf")])}, [2]),
        "just text",
    ],
    ids=lambda value: type(value).__name__,
)
def test_show_takes_rollouts_of_any_shape(rlskip: Any, tmp_path: Path, rollouts: Any) -> None:
    StepStore(tmp_path / "e_p" / "s").save(1, rollouts)
    said = rlskip("show", 1, "-d", tmp_path)
    assert (said.code, said.err) == (0, "")
    assert rlskip("show", 1, "-d", tmp_path, "--json").json[0]["dump"] == "1"
    assert rlskip("diff", 1, 1, "-d", tmp_path).code == 0
    assert rlskip("export", 1, "-d", tmp_path, "--to", "jsonl").code == 0


def test_text_from_a_dump_cannot_touch_the_terminal(rlskip: Any, tmp_path: Path) -> None:
    StepStore(tmp_path / "e_p" / "s").save(1, [{"text": "\x1b[2J[red]boo[/red]\x07"}])
    out = rlskip("show", 1, "-d", tmp_path).out
    assert "\\x1b[2J[red]boo[/red]\\x07" in out
    assert "\x1b" not in out


def test_decoding_needs_a_tokenizer_that_is_there(rlskip: Any, run_dir: Path) -> None:
    said = rlskip("show", 1, "-d", run_dir, "--tokenizer", run_dir / "nowhere")
    assert said.code == 2
    assert "transformers" in said.err or "no such directory" in said.err


def test_verify_tells_the_bad_ones_and_touches_none(rlskip: Any, run_dir: Path) -> None:
    assert rlskip("verify", "-d", run_dir).code == 0
    damage(run_dir, 2)
    (run_dir / "3" / "meta.json").unlink()
    before = listing(run_dir)
    said = rlskip("verify", "-d", run_dir)
    assert said.code == 1
    assert "1 of 3 dumps are sound" in said.out
    verdicts = {v["dump"]: v["problem"] for v in rlskip("verify", "-d", run_dir, "--json").json}
    assert verdicts["1"] is None
    assert "altered" in verdicts["2"]
    assert "missing" in verdicts["3"]
    assert rlskip("verify", 1, "-d", run_dir).code == 0
    assert rlskip("verify", run_dir / "2").code == 1
    assert listing(run_dir) == before


def test_looking_at_damage_sets_nothing_aside(rlskip: Any, run_dir: Path) -> None:
    damage(run_dir, 2)
    before = listing(run_dir)
    said = rlskip("show", 2, "-d", run_dir)
    assert said.code == 2
    assert "altered" in said.err
    assert rlskip("ls", run_dir).code == 0
    assert rlskip("diff", 1, 2, "-d", run_dir).code == 2
    assert listing(run_dir) == before


def test_shards_and_mini_batches_are_dumps_of_their_step(rlskip: Any, tmp_path: Path) -> None:
    run = tmp_path / "e_p" / "s"
    for rank in (0, 1):
        StepStore(run, rank=rank, world_size=2).save(1, [{"rank": rank}])
    for inner in (0, 1):
        StepStore(run).save(2, [{"inner": inner}], inner=inner)
    (listed,) = rlskip("ls", run, "--json").json
    names = [one["dump"] for one in listed["dumps"]]
    assert names == ["1 (rank 0 of 2)", "1 (rank 1 of 2)", "2/0", "2/1"]
    assert rlskip("verify", "-d", run).code == 0
    assert [one["dump"] for one in rlskip("show", "2/1", "-d", run, "--json").json] == ["2/1"]
    (run / "1" / "gen_batch.r1-of-2.dp").unlink()
    assert rlskip("verify", "-d", run).code == 1


def test_diff_says_from_which_token_on(rlskip: Any, dumps: Path) -> None:
    said = rlskip("diff", dumps / "grpo_tiny", dumps / "grpo-lr2_tiny", "--json")
    assert said.code == 1
    (found,) = said.json["differences"]
    assert (found["step"], found["a"], found["b"], found["token"]) == (2, 7, 7, 3)
    assert (found["log_prob"], found["reward"]) == (None, None)
    same = rlskip("diff", 1, 1, "-d", dumps / "grpo_tiny")
    assert same.code == 0
    assert "no difference" in same.out


def test_diff_finds_rows_by_their_prompts_and_judges_each_part(rlskip: Any, tmp_path: Path) -> None:
    def rows(**change: Any) -> list[dict[str, Any]]:
        made = [
            {
                "prompt_ids": [prompt, 1],
                "completion_ids": [5, 6, 7],
                "logprobs": [-0.1, -0.2, -0.3],
                "reward": 1.0,
            }
            for prompt in (1, 2, 3)
        ]
        made[1].update(change)
        return made

    store = StepStore(tmp_path / "e_p" / "s")
    store.save(1, rows())
    store.save(2, rows()[::-1])
    store.save(3, rows(logprobs=[-0.1, -0.25, -0.3], reward=0.5))
    store.save(4, rows(prompt_ids=[9, 9]))
    store.save(5, rows(completion_ids=[5, 6]))

    def found(a: int, b: int, *more: object) -> list[dict[str, Any]]:
        return rlskip("diff", a, b, "-d", tmp_path, "--json", *more).json["differences"]

    assert found(1, 2) == []
    (one,) = found(1, 3)
    assert (one["log_prob"], one["reward"], one["token"]) == (1, [1.0, 0.5], None)
    assert one["by"] == pytest.approx(0.05)
    assert found(1, 3, "--tolerance", 0.6) == []
    assert [(one["a"], one["b"]) for one in found(1, 4)] == [(1, None), (None, 1)]
    assert [one["token"] for one in found(1, 5)] == [2]


def test_diff_of_runs_names_steps_that_one_lacks(rlskip: Any, dumps: Path) -> None:
    import shutil

    shutil.rmtree(dumps / "grpo-lr2_tiny/GBS4_N2_in6_out8/3")
    said = rlskip("diff", dumps / "grpo_tiny", dumps / "grpo-lr2_tiny")
    assert said.code == 1
    assert "only in A: steps 3" in said.out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["ls", "/nowhere"], "no such directory"),
        (["show", "9", "-d", "{run}"], "no dump of this step; there are 1-3"),
        (["show", "1", "-d", "{dumps}"], "2 runs have dumps here; name one with --dir"),
        (["show", "{dumps}/nothing"], "no such file"),
        (["prune", "{dumps}"], "nothing says what is old"),
        (["prune", "{dumps}", "--older-than", "soon"], "'soon' is no age"),
        (["prune", "{dumps}", "--max-size", "big"], "'big' is no size"),
        (["export", "{run}", "--to", "parquet"], "none of verl, jsonl"),
        (["export", "{run}", "--to", "verl"], "--out"),
        (["import", "{dumps}"], "no dump of verl here"),
        (["nonsense"], "No such command"),
        (["show"], "Missing argument"),
        (["show", "1", "--rows", "many"], "--rows"),
        (["ls", "--no-such-option"], "No such option"),
    ],
)
def test_bad_input_is_one_line_and_code_2(
    rlskip: Any, dumps: Path, run_dir: Path, arguments: list[str], words: str
) -> None:
    said = rlskip(*(a.format(run=run_dir, dumps=dumps) for a in arguments))
    assert said.code == 2
    assert said.out == ""
    (line,) = said.err.splitlines()
    assert line.startswith("rlskip: ")
    assert words in line


def test_a_directory_that_cannot_be_read_is_bad_input(rlskip: Any, run_dir: Path) -> None:
    (run_dir / "2" / "meta.json").write_text("{")
    assert rlskip("show", 2, "-d", run_dir).code == 2
    (run_dir / "4").symlink_to(run_dir / "1")
    assert 4 not in rlskip("ls", run_dir, "--json").json[0]["dumps"]


@pytest.mark.parametrize(
    ("steps", "text"),
    [([], ""), ([1], "1"), ([1, 2], "1,2"), ([1, 2, 3], "1-3"), ([1, 2, 3, 7], "1-3,7"),
     ([10, 20, 30, 31], "10-30:10,31"), ([0, 5, 6, 7, 8], "0,5-8")],
)  # fmt: skip
def test_steps_are_written_as_the_grammar_reads_them(steps: list[int], text: str) -> None:
    from rlskip.config.steps import Steps

    assert compact(steps) == text
    if steps:
        parsed = Steps.parse(text)
        assert [step for step in range(100) if step in parsed] == steps


def test_the_installed_command_ends_quietly_when_its_reader_does(dumps: Path) -> None:
    import subprocess
    import sys

    command = f"{sys.executable} -m rlskip.cli.main ls --steps {dumps} --json | head -1"
    env = {**os.environ, "PYTHONUNBUFFERED": "1"}
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=env)
    assert (done.stdout.strip(), done.stderr) == ("[", "")


_OFFSETS = torch.tensor([0, 2, 5])
_UNUSUAL = {
    "bfloat16": torch.arange(5).bfloat16(),
    "float8": torch.arange(5.0).to(torch.float8_e4m3fn),
    "other float8": torch.arange(5.0).to(torch.float8_e5m2),
    "complex": torch.arange(5).to(torch.complex64),
    "unsigned": torch.arange(5).to(torch.uint16),
    "two numbers each": torch.arange(10.0).reshape(5, 2),
}


@pytest.mark.parametrize("layout", ["plain", "jagged", "strided"])
@pytest.mark.parametrize("kind", list(_UNUSUAL))
def test_every_tensor_is_shown(rlskip: Any, tmp_path: Path, kind: str, layout: str) -> None:
    flat = _UNUSUAL[kind]
    if layout == "jagged":
        column = torch.nested.nested_tensor_from_jagged(flat, _OFFSETS)
    elif layout == "strided" and kind in ("bfloat16", "complex", "two numbers each"):
        column = torch.nested.nested_tensor([flat[:2], flat[2:]], layout=torch.strided)
    else:
        column = flat
    run = tmp_path / "exp_proj" / "GBS1_N1_in1_out1"
    StepStore(run).save(1, {"x": column, "response_ids": column})
    (field, _) = rlskip("show", 1, "-d", run, "--json").json[0]["fields"]
    if kind != "complex":
        assert (field["min"], field["max"]) == (0, 9 if kind == "two numbers each" else 4)
    assert field["shape"] == ("2x2..3" if column.is_nested else "x".join(map(str, flat.shape)))
    assert rlskip("show", 1, "-d", run).code == 0
    assert rlskip("report", run, "--html", tmp_path / "page.html").code == 0
    assert rlskip("export", run / "1", "--to", "jsonl").code == 0


def test_responses_that_are_text_are_shown_as_any_field(rlskip: Any, tmp_path: Path) -> None:
    run = tmp_path / "exp_proj" / "GBS1_N1_in1_out1"
    StepStore(run).save(1, {"responses": np.array(["Yes.", "No."]), "score": [1.0, 0.0]})
    assert "Yes." in rlskip("show", 1, "-d", run).out
