"""TRL's own GRPOTrainer, a tiny model on the CPU: the second run generates nothing, logs the same.

Real processes of the interpreter that $RLSKIP_TRL names (`.ci/env trl` makes it).
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

import pytest

import rlskip

pytestmark = [pytest.mark.trl, pytest.mark.timeout(900)]

Results = dict[str, Any]

# name -> what differs from four steps that each generate once for two accumulated batches
CASES: dict[str, dict[str, Any]] = {
    "once_a_step": {},
    "twice_a_step": {"args": {"steps_per_generation": 1}},
    "once_for_two_steps_twice_over": {
        "args": {"steps_per_generation": 4, "num_iterations": 2, "max_steps": 8}
    },
    "short_last_step": {  # of the epoch, which generates nothing
        "args": {"gradient_accumulation_steps": 3, "steps_per_generation": 2, "max_steps": 6}
    },
    "with_evaluation": {
        "args": {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 8}
    },
    "replayed_evaluation": {
        "args": {
            "eval_strategy": "steps",
            "eval_steps": 2,
            "eval_on_start": True,
            "per_device_eval_batch_size": 8,
        }
    },
    "with_checkpoints": {"args": {"save_strategy": "steps", "save_steps": 2}},
    "rollout_func": {"rollout_func": True, "reward": "first_token"},
}
# The trainer's switches, as if vLLM had sampled; it is not installed.
VLLM = {"use_vllm": True, "vllm_importance_sampling_correction": True}
CALLS = {"twice_a_step": 8, "once_for_two_steps_twice_over": 2, "short_last_step": 8}


@pytest.fixture(scope="module")
def run(trl_jobs: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """``run(jobs, *launcher)``: the results of each rank; ``run.folder`` is where they ran."""
    folder = tmp_path_factory.mktemp("trl")
    made = functools.partial(trl_jobs, "trl_app.py", folder)
    made.folder = folder  # type: ignore[attr-defined]
    return made


def skip(name: str, **more: Any) -> dict[str, Any]:
    more = {"validation": "replay", **more} if name == "replayed_evaluation" else more
    return {"dump_dir": f"dumps/{name}", "rollout": {"enable": True}, **more}


def job(name: str, args: Any = (), **more: Any) -> dict[str, Any]:
    case = CASES[name]
    given = {"output_dir": f"out/{name}", **case.get("args", {}), **dict(args)}
    return {**case, "args": given, **more}


@pytest.fixture(scope="module")
def runs(run: Callable[..., Any]) -> Results:
    """Every case without rlskip and then with it, and again in a second process."""
    [first] = run(
        {f"bare {name}": job(name) for name in CASES}
        | {f"first {name}": job(name, skip=skip(name)) for name in CASES}
    )
    name, checked, evaluates = "once_a_step", "with_checkpoints", "replayed_evaluation"
    newest = {"resume_from_checkpoint": f"out/{checked}/checkpoint-2"}
    more = {"max_steps": 3}  # at the last step transformers evaluates, too
    place = {"experiment_name": name, "project_name": "trl", "gbs": 2, "n": 4, "response_len": 8}
    [second] = run(
        {f"second {name}": job(name, skip=skip(name, on_miss="error")) for name in CASES}
        | {
            "resumed": job(checked, newest, skip=skip(checked)),
            "other reward": job(name, skip=skip(name), reward="length"),
            "other sampling": job(name, {"temperature": 0.5}, skip=skip(name)),
            "installed": job(name, skip=skip(name, **place), installed=True),
            "hole": job(name, {"max_steps": 6}, skip=skip(name, on_miss="error")),
            "hole in evaluation": job(evaluates, more, skip=skip(evaluates, on_miss="error")),
            "corrected": job("rollout_func", skip=skip("corrected"), attributes=VLLM),
            "corrected again": job("rollout_func", skip=skip("corrected"), attributes=VLLM),
        }
    )
    return {**first, **second}


def test_tensorboard_shows_that_a_run_is_replayed(
    run: Any, python_of: Callable[[str], str], scalars: Any
) -> None:
    """Steps 3 and 4 of the second run are not listed: there rlskip does nothing."""
    for name, steps in (("first", "all"), ("second", [1, 2]), ("off", "all")):
        args = {"report_to": ["tensorboard"], "output_dir": f"boards/{name}"}
        on = skip("seen", steps=steps, log_metrics=name != "off")
        # The directory is named by the host's arguments, which differ here.
        on |= {"experiment_name": "seen"}
        run({name: job("once_a_step", skip=on) | {"args": args}})
    first, second, off = (
        scalars(python_of("trl"), run.folder / "boards" / name)
        for name in ("first", "second", "off")
    )
    assert first["train/rlskip/replayed"] == [0.0] * 4
    assert second["train/rlskip/replayed"] == [1.0] * 2
    assert second["train/rlskip/off_policy"] == [0.0] * 2
    # The first load imports what reads dumps, which may take longer than this model generates.
    assert max(second["train/rlskip/seconds_saved"]) > 0
    assert first["train/loss"] == second["train/loss"]
    assert not [tag for tag in off if "rlskip" in tag]


@pytest.mark.parametrize("name", CASES)
def test_the_second_run_generates_nothing_and_logs_the_same(name: str, runs: Results) -> None:
    bare, first, second = (runs[f"{which} {name}"] for which in ("bare", "first", "second"))
    assert bare["error"] is first["error"] is second["error"] is None
    # To the last bit, in the same order, and as without rlskip.
    assert json.dumps(bare["log"]) == json.dumps(first["log"]) == json.dumps(second["log"])
    steps = [line for line in bare["log"] if "loss" in line]
    assert len(steps) == CASES[name].get("args", {}).get("max_steps", 4)
    reward = CASES[name].get("reward", "different_words")
    logged = {"reward", f"rewards/{reward}/mean", "completions/mean_length", "num_tokens"}
    assert logged <= steps[0].keys()
    assert ("my_metric" in steps[0]) == (reward == "different_words")
    assert first["generated"] == bare["generated"]
    assert bare["generated"]["train"] == CALLS.get(name, 4)
    assert bool(bare["generated"]["eval"]) == ("evaluation" in name)
    evaluated = 0 if name == "replayed_evaluation" else bare["generated"]["eval"]
    assert second["generated"] == {"train": 0, "eval": evaluated}
    assert second["rewarded"] == bare["rewarded"], "rewards are computed, not replayed"


def test_dumps_are_numbered_as_the_trainer_logs(run: Any, runs: Results) -> None:
    assert runs["first once_a_step"]["error"] is None
    found = {
        name: [dump.name for dump in rlskip.open(run.folder / "dumps" / name).dumps()]
        for name in ("once_a_step", "once_for_two_steps_twice_over", "twice_a_step")
    }
    assert found == {
        "once_a_step": ["1", "2", "3", "4"],
        "once_for_two_steps_twice_over": ["1", "5"],
        "twice_a_step": [f"{step}/{call}" for step in range(1, 5) for call in (0, 1)],
    }
    [directory] = (run.folder / "dumps" / "once_a_step").glob("*_*/GBS*")
    assert directory.relative_to(run.folder / "dumps" / "once_a_step").parts == (
        "once_a_step_trl",
        "GBS2_N4_inany_out8",
    )


def test_a_run_that_resumes_from_a_checkpoint_replays_the_rest(runs: Results) -> None:
    resumed, bare = runs["resumed"], runs["bare with_checkpoints"]
    assert resumed["error"] is None
    assert resumed["generated"]["train"] == 0
    assert [line for line in resumed["log"] if "loss" in line] == [
        line for line in bare["log"] if "loss" in line
    ]


def test_another_reward_function_really_runs(runs: Results) -> None:
    other = runs["other reward"]
    assert other["error"] is None
    assert other["generated"]["train"] == 0
    assert "rewards/length/mean" in other["log"][0]
    assert other["log"][0]["reward"] != runs["bare once_a_step"]["log"][0]["reward"]


def test_what_hydra_installed_is_attached(runs: Results) -> None:
    assert runs["installed"]["generated"]["train"] == 0
    assert runs["installed"]["log"] == runs["bare once_a_step"]["log"]


def test_other_sampling_is_refused_before_anything_is_generated(runs: Results) -> None:
    assert "identity.temperature: 0.5 now, 1.0 in the dump" in runs["other sampling"]["error"]
    assert runs["other sampling"]["generated"] == {"train": 0, "eval": 0}


def test_dumped_log_probs_correct_the_replay(runs: Results) -> None:
    first, again = runs["corrected"], runs["corrected again"]
    assert first["error"] is again["error"] is None
    assert (first["generated"]["train"], again["generated"]["train"]) == (4, 0)
    assert json.dumps(first["log"]) == json.dumps(again["log"])
    assert "sampling/importance_sampling_ratio/mean" in first["log"][0]


def test_holes_are_named_before_the_first_step(runs: Results) -> None:
    hole = runs["hole"]
    assert "steps 5,6 have no usable dump" in hole["error"]
    assert hole["log"] == []
    assert hole["rewarded"] == 0
    hole = runs["hole in evaluation"]
    assert "skip.rollout_val.on_miss=error: steps 3 have no usable dump" in hole["error"]
    assert not any("grad_norm" in entry for entry in hole["log"])


def test_after_a_reshuffle_each_prompt_has_its_completions(run: Callable[..., Any]) -> None:
    """The 16 prompts of the data set in another order, and four instead of two a step."""
    args = {"output_dir": "out/by_prompt", "max_steps": 8}
    larger = {"gradient_accumulation_steps": 4, "max_steps": 4, "seed": 2}
    replay = skip("by_prompt", match="prompt", on_miss="error")
    [results] = run(
        {
            "first": {"args": args, "skip": skip("by_prompt")},
            "reshuffled": {"args": {**args, "seed": 1}, "skip": replay},
            "larger": {"args": {**args, **larger}, "skip": replay},
            "hotter": {"args": {**args, "seed": 1, "temperature": 2.0}, "skip": replay},
        }
    )
    first = results["first"]
    assert first["generated"]["train"] == 8
    assert len({prompt for prompt, _ in first["seen"]}) == 16
    for name in ("reshuffled", "larger"):
        again = results[name]
        assert (again["error"], again["generated"]["train"]) == (None, 0)
        assert again["seen"] != first["seen"]
        assert sorted(again["seen"]) == sorted(first["seen"])
        tokens = [line["num_tokens"] for line in again["log"] if "loss" in line]
        assert tokens[-1] == first["log"][-2]["num_tokens"]
    assert "temperature: 2.0 now" in results["hotter"]["error"]


def test_two_ranks_under_accelerate(run: Callable[..., Any]) -> None:
    """Configured from the environment, on gloo; one shard a rank.

    accelerate's only launcher of several processes but MPI is called --multi_gpu; the trainer's
    ``use_cpu`` makes it gloo.
    """
    flags = "--multi_gpu --num_processes=2 --num_machines=1 --main_process_port=0"
    defaults = "--mixed_precision=no --dynamo_backend=no"
    launch = ("-m", "accelerate.commands.launch", *flags.split(), *defaults.split())
    args = {"output_dir": "out/two_ranks"}
    config = run.folder / "skip.yaml"
    config.write_text(json.dumps({"skip": skip("two_ranks")}))
    jobs: Results = {"bare": {"args": args}, "skipped": {"args": args, "skip": None}}
    env = {"RLSKIP_CONFIG": str(config)}
    first = run(jobs, *launch, ranks=2, **env)
    second = run({"skipped": jobs["skipped"]}, *launch, ranks=2, **env)
    for rank in range(2):
        bare, one, two = first[rank]["bare"], first[rank]["skipped"], second[rank]["skipped"]
        assert bare["error"] is one["error"] is two["error"] is None
        assert json.dumps(bare["log"]) == json.dumps(one["log"]) == json.dumps(two["log"])
        assert bare["generated"] == one["generated"] == {"train": 4, "eval": 0}
        assert two["generated"] == {"train": 0, "eval": 0}
    shards = (run.folder / "dumps/two_ranks").glob("*/*/1.*/gen_batch.dp")  # type: ignore[attr-defined]
    assert sorted(file.parent.name for file in shards) == ["1.r0-of-2", "1.r1-of-2"]
