"""What a replay compares: role, stage, prompts, and the keys of the config that shape rollouts."""

from __future__ import annotations

import copy
import json
import logging
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from rlskip import RoleConfig, SkipManager
from rlskip.config.facts import LegacyFlagWarning, application_facts
from rlskip.errors import ConfigError, MismatchError, MissError
from rlskip.jobs.records import tally
from rlskip.skip.kept_config import MASKED, flat_config, read_config
from rlskip.store import StepStore, UnsupportedTypeError
from tests.clock import MockClock
from tests.skip.trainers import role_of, visit

VERL: dict[str, Any] = {
    "actor_rollout_ref": {
        "rollout": {
            "name": "vllm",
            "temperature": 1.0,
            "top_p": 1.0,
            "seed": 1,
            "n": 8,
            "gpu_memory_utilization": 0.5,
            "request_timeout_s": 5,
            "logprobs_mode": "raw",
            "stop": None,
            "agent": {"default_agent_loop": "single_turn_agent", "num_workers": 8},
            "multi_turn": {"enable": False, "format": "hermes", "_target_": "a.B"},
        },
        "model": {"path": "some/model", "custom_chat_template": None},
        "actor": {"optim": {"lr": 1e-6}},
    },
    "data": {
        "seed": 1, "train_files": "a", "apply_chat_template_kwargs": {}, "image_patch_size": 14,
    },
    "trainer": {"experiment_name": "e", "project_name": "p"},
    "distillation": {
        "enabled": True, "teacher_key": "task", "teacher_models": {"one": {"model_path": "large"}},
        "distillation_loss": {"topk": 32},
    },
}  # fmt: skip


@SkipManager.annotate(role="rollout")
def generate(prompts: list[int]) -> str:
    return "generated"


@SkipManager.annotate(role="rollout")
def baseline(prompts: list[int]) -> str:
    return "baseline"


class Run:
    """Starts runs over one dump_dir, each with some keys of the host's config changed."""

    def __init__(self, folder: Path, base: dict[str, Any] = VERL) -> None:
        self.folder, self.base = folder, base

    def __call__(self, changes: dict[str, Any] | None = None, /, **skip: Any) -> Any:
        config = OmegaConf.create(copy.deepcopy(self.base))
        for key, value in (changes or {}).items():
            OmegaConf.update(config, key, value, force_add=True)
        config.skip = {"dump_dir": str(self.folder), "rollout": {"enable": True}, **skip}
        SkipManager.init(config)
        SkipManager.set_step(1)
        return generate([1])


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


ROLLOUT = "actor_rollout_ref.rollout"
TEACHERS = "distillation.teacher_models"
SHAPING = [
    (f"{ROLLOUT}.temperature", 0.5, "sampling.temperature: 0.5 now, 1.0 in the dump"),
    (f"{ROLLOUT}.min_p", 0.1, "sampling.min_p: 0.1 now, absent in the dump"),
    (f"{ROLLOUT}.stop", ["###"], "sampling.stop: ['###'] now, absent"),
    (f"{ROLLOUT}.stop_token_ids", [7], "sampling.stop_token_ids"),
    (f"{ROLLOUT}.agent.default_agent_loop", "tool_agent", "'tool_agent' now, 'single_turn_"),
    (f"{ROLLOUT}.agent.agent_loop_config_path", "x.yaml", "agent_loop_config_path"),
    (f"{ROLLOUT}.multi_turn.enable", True, "sampling.multi_turn.enable: True now, False in"),
    (f"{ROLLOUT}.multi_turn.new_key", 1, "multi_turn.new_key"),
    ("data.apply_chat_template_kwargs", {"think": True}, "data.apply_chat_template_kwargs"),
    ("data.tool_config_path", "t.yaml", "data.tool_config_path"),
    ("actor_rollout_ref.model.custom_chat_template", "x", "custom_chat_template"),
    (f"{TEACHERS}.one.model_path", "other", "teacher_models.one.model_path: 'other' now, 'la"),
    (f"{TEACHERS}.two", {"key": "math", "model_path": "m"}, "teacher_models.two.key: 'math'"),
    ("distillation.distillation_loss.topk", 64, "distillation_loss.topk: 64 now, 32 in the"),
]
NEUTRAL = {
    f"{ROLLOUT}.seed": 2,
    f"{ROLLOUT}.gpu_memory_utilization": 0.9,
    f"{ROLLOUT}.tensor_model_parallel_size": 4,
    f"{ROLLOUT}.request_timeout_s": 50,
    f"{ROLLOUT}.agent.num_workers": 2,
    f"{ROLLOUT}.val_kwargs.temperature": 0.7,
    f"{ROLLOUT}.multi_turn._target_": "c.D",
    "data.seed": 2,
    "data.train_files": "b",
    "data.dataloader_num_workers": 2,
}


def test_keys_that_shape_rollouts_are_compared_and_others_are_no_warning(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    run()
    for key, value, told in SHAPING:
        with pytest.raises(MismatchError) as caught:
            run({key: value})
        assert told in str(caught.value)
    run()
    caplog.clear()
    assert run(NEUTRAL) == "generated"
    assert "changed since" not in caplog.text
    assert "differs" not in caplog.text
    # Another engine or model only warns.
    run({f"{ROLLOUT}.name": "sglang", "actor_rollout_ref.model.path": "another/model"})
    assert "versions.engine: 'sglang' now, 'vllm' in the dump" in caplog.text
    assert "model: 'another/model' now, 'some/model' in the dump" in caplog.text
    assert "changed since" not in caplog.text
    tools = run.folder / "tools.yaml"
    for text in ("before", "after"):
        tools.write_text(text)
        run({"data.tool_config_path": str(tools)}, experiment_name="tools")
    assert "differs: content of data.tool_config_path: '" in caplog.text


def test_what_changed_elsewhere_is_listed_up_to_ten(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    run()
    caplog.set_level(logging.INFO)
    run({"actor_rollout_ref.actor.optim.lr": 2e-6, **{f"mine.k{i:02}": i for i in range(12)}})
    (line,) = [record for record in caplog.records if "changed since" in record.message]
    assert line.levelname == "INFO"
    assert "actor.optim.lr (1e-06 then, 2e-06 now)" in line.message
    assert line.message.count(" then, ") == 10
    assert line.message.endswith(" and 3 more"), "nothing is to be compared"


OF_ROLLOUTS = (
    "sampling.temperature", "sampling.n", "policy.model_path", "model", "agent.system_prompt",
    "data.prompt_template", "max_len", "group", "gen.max_prompt_length", "grpo.group_size",
    "actor.lora_adapter_path", "gen.logprobs_mode",
)  # fmt: skip
OF_OTHERS = (
    "optim.lr", "reward.model.path", "reward.temperature", "wandb.group", "critic.model",
    "judge.template", "model_parallel_size", "trainer.max_len_per_gpu",
)  # fmt: skip


def test_keys_of_any_application_that_seem_to_shape_rollouts_are_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(tmp_path, {})
    run(dict.fromkeys((*OF_ROLLOUTS, *OF_OTHERS), "old"))
    caplog.set_level(logging.INFO)
    run(dict.fromkeys((*OF_ROLLOUTS, *OF_OTHERS), "new"))
    lines = [record for record in caplog.records if "changed since" in record.message]
    warning, info = sorted(lines, key=lambda line: -line.levelno)
    for line, level, keys in (warning, "WARNING", OF_ROLLOUTS), (info, "INFO", OF_OTHERS):
        assert line.levelname == level
        for key in keys:
            assert f"{key} ('old' then, 'new' now)" in line.message
    assert "skip.identity" not in info.message
    # The advice works as it is, with the dumps that are there.
    identity = re.findall(r"skip\.identity=\[(.*)\] compares", warning.message)[0].split(",")
    assert {*identity} == {*OF_ROLLOUTS}
    assert run(dict.fromkeys(OF_ROLLOUTS, "old"), identity=identity) == "generated"
    with pytest.raises(MismatchError, match=r"config\.sampling\.n: 'new' now, 'old' in the dump"):
        run({**dict.fromkeys(OF_ROLLOUTS, "old"), "sampling.n": "new"}, identity=identity)


# -- keys that the user names --------------------------------------------------------------

OWN = {"sampling": {"temperature": 1.0, "stop": ["a"]}, "seed": 1}


def test_a_key_or_a_node_that_the_user_names_is_compared(tmp_path: Path) -> None:
    run, own = Run(tmp_path, OWN), {"enable": True, "identity": ["sampling.temperature"]}
    run(identity=["sampling.temperature"])
    changes = {"seed": 2, "sampling.stop": ["b"]}
    assert run(changes, identity=["sampling.temperature"]) == "generated"
    for skip in ({"identity": ["sampling.temperature"]}, {"rollout": own}):
        with pytest.raises(MismatchError, match=r"config\.sampling\.temperature: 0.5 now, 1.0 in"):
            run({"sampling.temperature": 0.5}, **skip)
    run(identity=["sampling"], dump_dir=str(tmp_path / "node"))
    with pytest.raises(MismatchError, match=r"stop"):
        run(changes, identity=["sampling"], dump_dir=str(tmp_path / "node"))


@pytest.mark.parametrize("policy", ["generate", "error"])
@pytest.mark.parametrize("match", ["step", "run", "prompt"])
def test_a_key_that_is_named_later_has_the_value_that_the_dump_recorded(
    tmp_path: Path, match: str, policy: str
) -> None:
    """Whether it is the call that compares, or the look before the first step."""
    mixed = {"group": {"size": 4, "names": ["a"], "rate": 1}, "api_key": "secret-of-mine"}
    run, more = Run(tmp_path, mixed), {"match": match, "on_miss": policy}
    run(rollout={"enable": True, "match": match})
    for identity in (["group"], ["group.size", "group.names"], ["group.rate"]):
        assert run(identity=identity, **more) == "generated"
        assert SkipManager.will_replay("rollout", [1])
    assert run({"group.rate": 1.0}, identity=["group.rate"], **more) == "generated"
    with pytest.raises((MismatchError, ConfigError, MissError)) as caught:
        run({"group.size": 8}, identity=["group.size"], **more)
    assert match != "step" or "config.group.size: 8 now, 4 in the dump" in str(caught.value)
    # What is masked, or was not there, is not known.
    for identity in (["api_key"], ["new"]):
        with pytest.raises((MismatchError, ConfigError, MissError)):
            run({"new": 1}, identity=identity, **{**more, "on_miss": "error"})


def test_a_key_that_is_not_there_is_refused(tmp_path: Path) -> None:
    for key, remedy in {
        "sampling.temprature": "did you mean sampling.temperature?",
        "temperature": "did you mean sampling.temperature?",
        "sampling.temperatur": "did you mean sampling.temperature?",
        "seed.x": "did you mean seed?",
        "nowhere": "name a full key of the config",
    }.items():
        what = rf"skip\.identity: the config has no key {key}"
        with pytest.raises(ConfigError, match=what) as caught:
            Run(tmp_path, OWN)(identity=[key])
        assert caught.value.remedy == remedy


def test_the_config_is_read_before_rlskip_changes_it(tmp_path: Path) -> None:
    legacy = {"actor_rollout_ref": {"rollout": {"skip": {"enable": True}}}}
    key = f"{ROLLOUT}.skip.enable"
    with pytest.warns(LegacyFlagWarning, match="both true"):
        Run(tmp_path, legacy)(identity=[key])
    skip = role_of()
    assert skip.dumps.store.read_meta(1).identity.compared[f"config.{key}"] is True


def test_one_functions_dump_is_not_anothers_unless_both_are_one_stage(run: Run) -> None:
    run()
    visit(1)
    with pytest.raises(MismatchError, match="stage: 'baseline' now, 'generate' in the dump"):
        baseline([1])
    visit(1)
    renamed = SkipManager.annotate(role="rollout", stage="generate")(lambda prompts: "renamed")
    assert renamed([1]) == "generated"


def test_what_cannot_be_compared_obeys_on_mismatch(
    init: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    made: list[int] = []

    @SkipManager.annotate(role="rollout")
    def stage(prompts: Any) -> int:
        made.append(1)
        return len(made)

    init(on_mismatch="error", at=1)
    odd = {"ids": [1], "tools": [object()]}
    with pytest.raises(UnsupportedTypeError) as caught:
        stage(odd)
    assert str(caught.value).startswith("prompts['tools']: cannot keep a builtins.object")
    assert "annotate(prompts=...)" in caught.value.remedy
    assert made == []
    init(on_mismatch="regenerate", at=1)
    assert stage(odd) == 1
    visit(1)
    assert stage(odd) == 2
    assert "calls cannot be compared with dumps: prompts['tools']" in caplog.text


def test_the_config_is_kept_once_per_content(run: Run, tmp_path: Path) -> None:
    run()
    SkipManager.set_step(2)
    generate([2])
    (kept,) = tmp_path.rglob(".config/*")
    assert json.loads(kept.read_text())[f"{ROLLOUT}.agent.num_workers"] == 8
    run({f"{ROLLOUT}.seed": 5})
    SkipManager.set_step(3)
    generate([3])
    assert len(list(tmp_path.rglob(".config/*"))) == 2


def test_a_config_that_cannot_be_kept_or_read_costs_nothing(
    run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run()
    (folder,) = tmp_path.rglob(".config")
    for file in folder.iterdir():
        file.write_text("[1")
    assert run({f"{ROLLOUT}.logprobs_mode": "x"}) == "generated"
    folder.rename(folder.with_name("moved"))
    folder.write_text("a file")
    assert run({f"{ROLLOUT}.logprobs_mode": "x"}) == "generated"
    SkipManager.set_step(2)
    generate([2])
    assert "the config cannot be kept with the dumps" in caplog.text


def test_validation_and_a_run_without_distillation_ask_no_teacher() -> None:
    config = copy.deepcopy(VERL)
    assert f"{TEACHERS}.one.model_path" not in application_facts(config).val_shaping
    config["distillation"]["enabled"] = False
    assert f"{TEACHERS}.one.model_path" not in application_facts(config).shaping


def test_saved_seconds_are_what_the_stage_took(
    init: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, clock: MockClock
) -> None:
    @SkipManager.annotate(role="rollout")
    def slow(prompts: list[int]) -> int:
        clock.sleep(3)
        return 1

    def late(act: Callable[..., Any], seconds: float) -> Callable[..., Any]:
        return lambda *args, **kwargs: (clock.sleep(seconds), act(*args, **kwargs))[1]

    monkeypatch.setattr(StepStore, "read_meta", late(StepStore.read_meta, 5))
    monkeypatch.setattr(StepStore, "load", late(StepStore.load, 1))
    dumps = init(wait_s=0)
    for _ in range(2):
        visit(1)
        slow([1])
    assert SkipManager.store("rollout").read_meta(1).info["seconds"] == 3
    assert tally({"rollout": str(dumps)}, "job")["rollout"].seconds_saved == 2


def test_secrets_are_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLSKIP_TEST_SECRET", "from-the-environment")
    config = OmegaConf.create(
        {
            "wandb_api_key": "abcdef",
            "hub": {"hf_token": "hf_ghijkl", "key": "mnopqr", "Password": "stuvwx", "retries": 3},
            "env": "${oc.env:RLSKIP_TEST_SECRET}",
            "again": "${env}",
            "url": "prefix-${hub.hf_token}",
            "database": "postgres://user:hunter2@host/db",
            "servers": [{"api_key": "list-secret"}],
            "empty_token": None,
            "use_auth_token": False,
            "do_sample": False,
            "answer_key": "answer",
            "auth": "token",
            "system": "Give the answer in a token",
            "eos_token": "<|im_end|>",
            "stop": ["<|im_end|>"],
            "max_tokens": 5,
            "prompt_key": "prompt",
            "tokenizer": "path",
            "missing": "???",
            "unresolved": "${nowhere}",
        }
    )
    flat = flat_config(config)
    shown = json.dumps(flat)
    for secret in ("abcdef", "ghijkl", "mnopqr", "stuvwx", "from-the-env", "hunter2", "list-sec"):
        assert secret not in shown, secret
    assert flat["again"] == MASKED
    assert (flat["max_tokens"], flat["prompt_key"], flat["tokenizer"]) == (5, "prompt", "path")
    assert flat["hub.retries"] == 3
    # What no secret is, and a short text that is one, hide no other key.
    assert (flat["do_sample"], flat["system"], flat["eos_token"]) == (
        False, "Give the answer in a token", "<|im_end|>",
    )  # fmt: skip
    assert flat["stop"] == ["<|im_end|>"]
    assert flat["empty_token"] is None
    assert "missing" not in flat
    assert "unresolved" not in flat


@pytest.mark.parametrize(
    "config", [None, {}, RoleConfig(), {"a": object(), 1: {"b": {1, 2}}, "c": Path("/models/a")}]
)
def test_any_config_can_be_kept(config: Any) -> None:
    assert json.loads(json.dumps(flat_config(config))) == flat_config(config)
    assert flat_config(config) == flat_config(copy.deepcopy(config))


def test_it_is_kept_again_where_the_run_was_deleted(init: Callable[..., Path]) -> None:
    init(background_write=False)
    for step in (1, 2):
        SkipManager.set_step(step)
        generate([step])
        store = SkipManager.store("rollout")
        name = store.read_meta(step).info["config"]
        assert read_config(store.directory, name)["skip.rollout.enable"] is True
        shutil.rmtree(store.directory)
        read_config.cache_clear()
