"""export: rows of JSON, and files that the real DataProto of verl 0.9.1 reads back."""

from __future__ import annotations

import json
import os
import subprocess
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import NonTensorData, TensorDict

from rlskip.interop.pickles import read_data_proto, read_queue_batch
from rlskip.store import StepStore

RUN = "exp_proj/GBS2_N2_in6_out5"


@pytest.fixture
def imported(rlskip: Any, verl_files: Path, tmp_path: Path) -> Path:
    """A run that was imported from verl: one step of `rollout`, one of `rollout_tq`."""
    for step, name in ((1, "verl-0.9.1-torch.dp"), (7, "verl-0.9.1-queue.pt")):
        arguments = ("--trust-pickle", "--step", step, "--run", RUN)
        assert rlskip("import", verl_files / name, "-d", tmp_path / "ours", *arguments).code == 0
    return tmp_path / "ours"


# -- rows --------------------------------------------------------------------------------------


def test_rows_of_a_whole_run_in_a_file(rlskip: Any, imported: Path, tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    assert rlskip("export", imported / RUN, "--to", "jsonl", "--out", out).code == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["step"] for row in rows] == [1] * 4 + [7] * 5
    assert rows[3]["raw_prompt"] == [{"role": "user", "content": "3 + 2?"}]
    assert rows[4]["key"].endswith("_1_0")
    said = rlskip("export", imported / RUN, "--to", "jsonl", "--out", out)
    assert said.code == 2
    assert "exists already" in said.err


def test_verl_has_one_call_of_a_step(rlskip: Any, tmp_path: Path) -> None:
    store = StepStore(tmp_path / RUN)
    for call in range(3):
        store.save(2, {"prompts": torch.tensor([[call]])}, part=call or None)
    said = rlskip("export", tmp_path / RUN, "--to", "verl", "--out", tmp_path / "all")
    assert "left out, because verl has one call of each step: 2/1, 2/2" in said.out
    files = [path for path in tmp_path.glob("all/**/*") if path.is_file()]
    assert {path.parent for path in files} == {tmp_path / "all" / RUN / "2"}
    one = rlskip("export", "2/1", "-d", tmp_path / RUN, "--to", "verl", "--out", tmp_path / "one",
                 "--json").json  # fmt: skip
    assert one == {"files": [str(tmp_path / "one" / RUN / "2" / "gen_batch.dp")], "left_out": []}
    batch = read_data_proto(tmp_path / "one" / RUN / "2" / "gen_batch.dp").batch
    assert batch["prompts"].tolist() == [[1]]


def test_a_roles_dumps_are_below_the_run_that_has_the_role(rlskip: Any, tmp_path: Path) -> None:
    runs = [RUN, f"{RUN}/values", f"{RUN.replace('exp', 'other')}/values"]
    for run in runs:
        StepStore(tmp_path / "dumps" / run).save(1, {"values": torch.ones(2)})
        where = tmp_path / "dumps" / run
        said = rlskip("export", where, "--to", "verl", "--out", tmp_path / "out", "--json")
        assert said.json["files"] == [str(tmp_path / "out" / run / "1" / "gen_batch.dp")]


def test_rows_name_the_call_of_a_step_of_several(rlskip: Any, tmp_path: Path) -> None:
    store = StepStore(tmp_path / RUN)
    for step, calls in ((1, 1), (2, 2)):
        for call in range(calls):
            store.save(step, {"responses": torch.tensor([[call]])}, part=call or None)
    out = rlskip("export", tmp_path / RUN, "--to", "jsonl").out
    rows = [json.loads(line) for line in out.splitlines()]
    assert [(row["step"], row["call"]) for row in rows] == [(1, None), (2, 0), (2, 1)]


def test_rows_are_json_that_anybody_reads(rlskip: Any, tmp_path: Path) -> None:
    run = tmp_path / "exp_proj" / "GBS1_N1_in1_out1"
    numbers = [float("nan"), float("inf"), -float("inf"), 1.5]
    texts = ["half a \ud83d", "né \u2603", "\udc00\\", "\U0001f600"]
    rows = {"responses": torch.arange(4).reshape(4, 1), "rewards": torch.tensor(numbers)}
    long = {"long": np.array([1.5] * 4, np.longdouble), "two": np.ones(4, np.clongdouble)}
    more = {"more": [[x, {"x": x}] for x in numbers]}
    StepStore(run).save(1, {**rows, "text": texts, **more, **long})
    out = tmp_path / "rows.jsonl"
    assert rlskip("export", run / "1", "--to", "jsonl", "--out", out).code == 0
    printed = rlskip("export", run / "1", "--to", "jsonl").out
    assert out.read_text(encoding="utf-8") == printed
    assert "né \u2603" in printed

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    read = [json.loads(line, parse_constant=refuse) for line in printed.splitlines()]
    assert [row["reward"] for row in read] == [None, None, None, 1.5]
    assert [row["more"][1]["x"] for row in read] == [None, None, None, 1.5]
    assert [row["text"] for row in read] == texts
    assert (read[0]["long"], read[0]["two"]) == (1.5, "(1+0j)")


def test_single_values_of_a_batch_are_in_every_line(rlskip: Any, tmp_path: Path) -> None:
    batch = TensorDict({"responses": torch.ones(2, 1).long()}, [2])
    batch["source"] = NonTensorData("gsm8k", batch_size=[2])
    batch["tools"] = NonTensorData({"names": ["a"]}, batch_size=[2])
    StepStore(tmp_path / "e_p" / "s").save(1, batch)
    out = rlskip("export", 1, "-d", tmp_path, "--to", "jsonl").out
    rows = [json.loads(line) for line in out.splitlines()]
    assert [row["source"] for row in rows] == ["gsm8k", "gsm8k"]
    assert rows[1]["tools"] == {"names": ["a"]}
    assert rlskip("export", 1, "-d", tmp_path, "--to", "verl", "--out", tmp_path / "out").code == 0
    meta_info = read_data_proto(tmp_path / "out" / "e_p" / "s" / "1" / "gen_batch.dp").meta_info
    assert meta_info == {"source": "gsm8k", "tools": {"names": ["a"]}}


# -- verl --------------------------------------------------------------------------------------


def test_what_is_written_is_what_was_imported(
    rlskip: Any, imported: Path, verl_files: Path, tmp_path: Path
) -> None:
    out = tmp_path / "for-verl"
    assert rlskip("export", imported / RUN, "--to", "verl", "--out", out).code == 0
    assert json.loads((out / RUN / "1" / "meta.json").read_text()) == {"global_steps": 1}
    after = read_data_proto(out / RUN / "1" / "gen_batch.dp")
    before = read_data_proto(verl_files / "verl-0.9.1-torch.dp")
    assert all(torch.equal(after.batch[k], before.batch[k]) for k in list(before.batch.keys()))
    assert after.non_tensor_batch["uid"].tolist() == ["a", "a", "b", "b"]
    assert after.meta_info == before.meta_info
    queue = read_queue_batch(out / RUN / "7" / "0" / "tq_batch.pt")
    original = read_queue_batch(verl_files / "verl-0.9.1-queue.pt")
    assert queue["keys"] == original["keys"]
    assert queue["tags"] == original["tags"]
    said = json.loads((out / RUN / "7" / "0" / "meta.json").read_text())
    assert said == {"global_steps": 7, "num_trajectories": 5}
    again = rlskip("export", imported / RUN, "--to", "verl", "--out", out)
    assert again.code == 2
    assert "exists already" in again.err


@pytest.mark.parametrize(
    ("rollouts", "ranks", "why"),
    [({"x": torch.ones(2)}, 2, "verl has no dumps of single ranks"), ([1], 1, "named columns")],
)
def test_what_verl_has_no_form_for_is_refused(
    rlskip: Any, tmp_path: Path, rollouts: Any, ranks: int, why: str
) -> None:
    for rank in range(ranks):
        StepStore(tmp_path / "e_p" / "s", rank=rank, world_size=ranks).save(1, rollouts)
    said = rlskip("export", 1, "-d", tmp_path, "--to", "verl", "--out", tmp_path / "out")
    assert (said.code, why in said.err) == (2, True)


@pytest.fixture
def in_verl(python_of: Callable[[str], str], tmp_path: Path) -> Callable[..., str]:
    """``in_verl(source, *arguments)``: what that program prints last, in verl's environment."""

    def run(source: str, *arguments: object, **env: str) -> str:
        program = tmp_path / "program.py"
        program.write_text(textwrap.dedent(source), encoding="utf-8")
        done = subprocess.run(
            [python_of("verl091"), str(program), *map(str, arguments)],
            capture_output=True, text=True, timeout=240, env={**os.environ, **env},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout.strip().splitlines()[-1]

    return run


@pytest.mark.verl
def test_the_real_data_proto_reads_it_back(
    rlskip: Any, imported: Path, run_dir: Path, tmp_path: Path, in_verl: Callable[..., str],
    verl_files: Path,
) -> None:  # fmt: skip
    out = tmp_path / "for-verl"
    rlskip("export", imported / RUN / "1", "--to", "verl", "--out", out)
    rlskip("export", run_dir / "2", "--to", "verl", "--out", out)
    said = in_verl(
        """
        import sys, torch
        from verl.protocol import DataProto
        a, b, ours = map(DataProto.load_from_disk, sys.argv[1:])
        for one in (a, b, ours):
            assert type(one) is DataProto
            one.check_consistency()
        assert all(torch.equal(a.batch[k], b.batch[k]) for k in list(b.batch.keys()))
        assert a.non_tensor_batch.keys() == b.non_tensor_batch.keys()
        assert list(a.non_tensor_batch["uid"]) == list(b.non_tensor_batch["uid"])
        assert a.meta_info == b.meta_info
        assert len(DataProto.concat([a, b])) == 8 and len(a[:2]) == 2
        print(len(ours), sorted(ours.batch.keys()), ours.non_tensor_batch["uid"][7])
        """,
        out / RUN / "1" / "gen_batch.dp",
        verl_files / "verl-0.9.1-torch.dp",
        out / "grpo_tiny/GBS4_N2_in6_out8/2/gen_batch.dp",
    )
    fields = sorted(StepStore(run_dir).load(2).keys())
    fields.remove("uid")
    assert said == f"8 {fields} s2p3"


@pytest.mark.verl
def test_a_tokenizer_makes_text_of_tokens(
    run_dir: Path, tmp_path: Path, in_verl: Callable[..., str]
) -> None:
    """verl's environment has transformers; ours has not."""
    said = in_verl(
        """
        import base64, gzip, json, sys
        from tokenizers import Tokenizer, models
        from transformers import PreTrainedTokenizerFast
        words = {f"w{i}": i for i in range(100)}
        made = Tokenizer(models.WordLevel(words, unk_token="w0"))
        PreTrainedTokenizerFast(tokenizer_object=made).save_pretrained(sys.argv[2])
        from rlskip.cli.main import main
        main(["show", sys.argv[1], "--tokenizer", sys.argv[2], "--sessions", "1"])
        main(["report", sys.argv[3], "--html", sys.argv[4], "--tokenizer", sys.argv[2], "--json"])
        page = open(sys.argv[4]).read()
        index = page.split('id="index">')[1].split("<")[0]
        prompts = json.loads(gzip.decompress(base64.b64decode(index)))["runs"][0]["prompts"]
        assert main(["show", sys.argv[1], "--tokenizer", sys.argv[3]]) == 2
        print([text for _, text in prompts if "w88 w11" in text][0])
        """,
        run_dir / "2",
        tmp_path / "tokenizer",
        run_dir,
        tmp_path / "page.html",
    )
    assert said == "w88 w11 w29 w39 w24 w56"


@pytest.mark.verl
def test_verl_finds_it_and_its_queue_role_reads_it(
    rlskip: Any, imported: Path, tmp_path: Path, in_verl: Callable[..., str]
) -> None:
    out = tmp_path / "for-verl"
    rlskip("export", imported / RUN, "--to", "verl", "--out", out)
    said = in_verl(
        """
        import sys, torch
        from omegaconf import OmegaConf
        from verl.utils.skip.config import RolloutSkipConfig
        from verl.utils.skip.rollout_skip import RolloutSkip, RolloutTqSkip
        from verl.utils.tensordict_utils import index_select_tensor_dict
        config = OmegaConf.create({
            "trainer": {"experiment_name": "exp", "project_name": "proj",
                        "v1": {"trainer_mode": "sync"}},
            "data": {"train_batch_size": 2, "max_prompt_length": 6, "max_response_length": 5},
            "actor_rollout_ref": {"rollout": {"n": 2}},
        })
        local = RolloutSkipConfig(enable=True, dump_dir=sys.argv[1], steps=[1, 7])
        v0, v1 = RolloutSkip(local, config), RolloutTqSkip(local, config)
        assert v0.meet_precondition(1, None) and not v0.meet_precondition(2, None)
        rollouts = v0.warp_function(1, None)
        assert v1.has_v1_cache(7)
        payload = torch.load(v1._get_v1_inner_dir(7, 0) / "tq_batch.pt", weights_only=False)
        rows = index_select_tensor_dict(payload["tensordict"], [4, 0])
        print(len(rollouts), rows["responses"].unbind()[0].tolist(), len(payload["keys"]))
        """,
        out,
    )
    assert said == "4 [100, 101, 102, 103, 104] 5"


@pytest.mark.verl
@pytest.mark.parametrize("method", ["torch", "numpy"])
def test_what_verl_writes_today_is_replayed_as_its_own_data_proto(
    rlskip: Any, verl_files: Path, tmp_path: Path, in_verl: Callable[..., str], method: str
) -> None:
    folder = tmp_path / "verl" / RUN / "1"
    folder.mkdir(parents=True)
    make = (verl_files / "make.py").read_text()
    in_verl(make + "\n    print('made')\n", folder / "gen_batch.dp", method)
    assert rlskip("import", tmp_path / "verl", "-d", tmp_path / "ours", "--trust-pickle").code == 0
    said = in_verl(
        """
        import sys, torch
        from rlskip import SkipManager
        from verl.protocol import DataProto

        @SkipManager.annotate(role="rollout")
        def generate(prompts):
            raise AssertionError("it was called")

        shape = dict(gbs=2, n=2, prompt_len=6, response_len=5)
        SkipManager.init({"skip": {"dump_dir": sys.argv[1], "experiment_name": "exp",
                          "project_name": "proj", **shape, "rollout": {"enable": True}}})
        SkipManager.set_step(1)
        rollouts = generate(DataProto.from_dict({"x": torch.zeros(2, 1)}))
        original = DataProto.load_from_disk(sys.argv[2])
        assert type(rollouts) is DataProto
        assert all(torch.equal(rollouts.batch[k], original.batch[k]) for k in original.batch.keys())
        assert list(rollouts.non_tensor_batch["uid"]) == list(original.non_tensor_batch["uid"])
        print(len(rollouts), rollouts.meta_info == original.meta_info)
        """,
        tmp_path / "ours",
        folder / "gen_batch.dp",
        VERL_DATAPROTO_SERIALIZATION_METHOD=method,
    )
    assert said == "4 True"
