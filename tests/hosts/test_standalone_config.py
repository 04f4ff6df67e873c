"""Hosts without Hydra: what they refuse before they attach, and TRL's stage on a part of a trainer.

test_trl.py has the trainer itself.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rlskip import DispatchConfig, SkipManager
from rlskip.errors import ConfigError, MismatchError
from rlskip.hosts import skyrl, trl
from rlskip.hosts.standalone_config import CONFIG_VARIABLE, read_config


def test_a_config_is_given_or_named_or_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(CONFIG_VARIABLE, raising=False)
    given = {"skip": {"enable": True}}
    assert read_config(None) is None
    assert read_config(given) is given
    file = tmp_path / "skip.yaml"
    file.write_text("skip: {enable: true}\n")
    assert read_config(file) == read_config(str(file)) == given
    monkeypatch.setenv(CONFIG_VARIABLE, str(file))
    assert read_config(None) == given


@pytest.mark.parametrize("text", [None, "- a\n", "a: [\n", "just words\n"])
def test_a_file_that_is_no_config_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None
) -> None:
    file = tmp_path / "skip.yaml"
    if text is not None:
        file.write_text(text)
    monkeypatch.setenv(CONFIG_VARIABLE, str(file))
    with pytest.raises(ConfigError, match=f"RLSKIP_CONFIG={file}"):
        read_config(None)


# -- TRL, on as much of a trainer as is looked at -------------------------------------------------


def image(red: int = 200) -> Any:
    return pytest.importorskip("PIL.Image").fromarray(
        np.full((4, 6, 3), (red, 10, 20), dtype=np.uint8)
    )


def pixels(value: Any) -> Any:
    return np.asarray(value).tolist()


# What shapes nothing without vLLM, or without tools, or is empty.
IDLE = {"vllm_max_model_length": 9, "max_tool_calling_iterations": 3, "generation_kwargs": {}}


class GRPOTrainer(SimpleNamespace):
    """As much of TRL's as is looked at."""


def make_trainer(made: Any = None, logprobs: Any = None, given: Any = (), **more: Any) -> Any:
    """One with `more` attributes, of which each generation adds to `made`."""

    def generate(prompts: list[Any]) -> tuple[Any, ...]:
        made.append(1)
        images = [[message["content"][0]["image"]] for (message,) in prompts]
        completions = [[{"role": "assistant", "content": "red"}] for _ in prompts]
        ids = [[1, 2] for _ in prompts]
        return ids, ids, None, completions, logprobs, {"pixels": torch.ones(2, 3)}, images, []

    args = SimpleNamespace(
        output_dir="out", generation_batch_size=2, num_generations=2, max_completion_length=8,
        gradient_accumulation_steps=1, steps_per_generation=1, temperature=1.0, **dict(given),
    )  # fmt: skip
    state = SimpleNamespace(global_step=0, num_input_tokens_seen=0)
    own = {"_generate": generate, "log": dict, "_metrics": {"train": {}}, "args": args}
    return GRPOTrainer(**{**own, "state": state, "model": SimpleNamespace(training=True), **more})


@pytest.mark.parametrize(
    ("config", "warns"),
    [
        ({"skip": {"dump_dir": "/d"}}, True),
        ({"skip": {"dump_dir": "/d", "enable": False, "rollout": {"enable": True}}}, True),
        # Without a word of skip, in silence.
        (None, False),
        ({"merge": {}}, False),
        ({"skip": None}, False),
    ],
)
def test_trl_with_skip_off_is_left_as_it_is(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, config: Any, warns: bool
) -> None:
    monkeypatch.delenv(CONFIG_VARIABLE, raising=False)
    untouched = make_trainer(_generate=print)
    trl.attach(untouched, config)
    assert untouched._generate is print
    assert not SkipManager.skip_instances
    warning = "NOTHING that TRL's trainer generates is skipped or cached"
    assert [warning in message for message in caplog.messages] == [True] * warns


@pytest.mark.parametrize(
    ("node", "values", "hosts"),
    [
        ("merge", {"stepwise_output": True}, ["TRL's trainer"]),
        ("dispatch", {"sampling": {"top_k": 2}}, ["TRL's trainer", "SkyRL's trainer"]),
        ("replay", {"on_incomplete": "raise"}, ["TRL's trainer", "SkyRL's trainer"]),
        # Off, what a dataclass lists, and keys of the application's own.
        ("merge", {"stepwise_output": False}, []),
        ("dispatch", DispatchConfig(), []),
        ("replay", {"speed": 2}, []),
        ("replay", 5, []),
    ],
)
def test_a_node_that_a_host_does_nothing_with_is_named(
    caplog: pytest.LogCaptureFixture, node: str, values: Any, hosts: list[str]
) -> None:
    config = {"skip": {"enable": False}, node: values}
    trl.attach(make_trainer(_generate=print), config)
    skyrl.with_rlskip(object, config)
    said = [message for message in caplog.messages if "does nothing with" in message]
    does_nothing = f"does nothing with the node `{node}`: leave it out"
    assert said == [f"rlskip: {host} {does_nothing}" for host in hosts]


@pytest.mark.parametrize("more", [{}, {"rollout": {"enable": True, "dump_dir": "other"}}])
@pytest.mark.parametrize("installed", [False, True])
def test_a_role_that_trl_never_asks_is_refused(
    tmp_path: Path, more: dict[str, Any], installed: bool
) -> None:
    config = {"skip": {"dump_dir": str(tmp_path), "async_rollout": {"enable": True}, **more}}
    refused = make_trainer(_generate=print)
    if installed:
        SkipManager.init(config)
    with pytest.raises(ConfigError, match=r"skip\.async_rollout\.enable: TRL's trainer never") as e:
        trl.attach(refused, None if installed else config)
    assert e.value.remedy == "use skip.rollout.enable=true instead"
    assert refused._generate is print


@pytest.mark.parametrize("given", [None, False])
def test_trl_attached_twice_is_as_if_attached_once(tmp_path: Path, given: bool | None) -> None:
    more = {} if given is None else {"restore_rng": given}
    on = {"skip": {"dump_dir": str(tmp_path), "rollout": {"enable": True}, **more}}
    twice, other = (make_trainer(_generate=len) for _ in range(2))
    for attached in (twice, twice, other):
        trl.attach(attached, on)
        assert attached._generate.generate is len
        role = SkipManager.skip_instances["rollout"].local_config
        assert role.restore_rng is (given is None)
    with pytest.raises(ConfigError, match=r"another config was installed since"):
        twice._generate(["p"])


def trl_step(trainer: Any, tmp_path: Path, red: int = 200, **skip: Any) -> Any:
    on = {"dump_dir": str(tmp_path), "rollout": {"enable": True}, **skip}
    trl.attach(trainer, {"skip": on})
    content = [{"type": "image", "image": image(red)}, {"type": "text", "text": "what is it"}]
    return trainer._generate([[{"role": "user", "content": content}]])


def test_trls_images_replay(tmp_path: Path) -> None:
    made: list[int] = []
    first, second = (trl_step(make_trainer(made, given=args), tmp_path) for args in ((), IDLE))
    assert made == [1]
    assert [run.name for run in tmp_path.glob("out_trl/*")] == ["GBS1_N2_inany_out8"]
    assert [type(part) for part in second] == [type(part) for part in first]
    *same, _, pictures, _ = first
    assert second[:5] == tuple(same[:5])
    assert torch.equal(second[5]["pixels"], torch.ones(2, 3))
    assert pixels(second[6][0][0]) == pixels(pictures[0][0])
    with pytest.raises(MismatchError, match="prompts: "):
        trl_step(make_trainer(made), tmp_path, red=201)
    assert made == [1]


@pytest.mark.parametrize(
    ("more", "what"),
    [
        ({"tools": [len, print]}, "identity.tools: ['len', 'print'] now"),
        ({"use_vllm": True}, "identity.use_vllm: True now, False in the dump"),
        ({"use_vllm": True, "given": IDLE}, "identity.vllm_max_model_length: 9 now"),
        ({"rollout_func": sorted}, "identity.rollout_func: 'sorted' now"),
        ({"processing_class": SimpleNamespace(chat_template="a")}, "identity.chat_template"),
    ],
)
def test_what_shapes_trls_rollouts_is_compared(
    tmp_path: Path, more: dict[str, Any], what: str
) -> None:
    made: list[int] = []
    trl_step(make_trainer(made), tmp_path)
    with pytest.raises(MismatchError) as error:
        trl_step(make_trainer(made, **more), tmp_path)
    assert what in error.value.what
    assert "skip.experiment_name starts from nothing" in error.value.remedy
    assert made == [1]


def test_the_check_before_the_first_step_says_what_differs(tmp_path: Path) -> None:
    made: list[int] = []
    trl_step(make_trainer(made), tmp_path)
    warmer = make_trainer(made)
    warmer.args.temperature, warmer.state.max_steps = 2.0, 1
    with pytest.raises(ConfigError) as error:
        trl_step(warmer, tmp_path, on_miss="error")
    assert "were made for other rollouts: identity.temperature: 2.0 now, 1.0 in" in error.value.what
    assert error.value.remedy.startswith("set back what differs")


@pytest.mark.parametrize(
    ("logprobs", "enough"), [([[0.5, 0.5]], True), (None, False), ([None], False)]
)
def test_log_probs_that_a_correction_needs(tmp_path: Path, logprobs: Any, enough: bool) -> None:
    made: list[int] = []
    trl_step(make_trainer(made, logprobs, use_vllm=True), tmp_path)
    ours = make_trainer(made, [[0.5, 0.5]], use_vllm=True, vllm_importance_sampling_correction=True)
    if enough:
        trl_step(ours, tmp_path)
    else:
        with pytest.raises(MismatchError, match="lacks what this run needs: logprobs"):
            trl_step(ours, tmp_path)
    assert made == [1]
