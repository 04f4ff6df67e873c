"""What hosts without Hydra refuse before they attach."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlskip import DispatchConfig, SkipManager
from rlskip.errors import ConfigError
from rlskip.hosts import skyrl, trl
from rlskip.hosts.standalone_config import CONFIG_VARIABLE, read_config

ARGS = SimpleNamespace(
    output_dir="out", generation_batch_size=8, num_generations=4, max_completion_length=16,
    steps_per_generation=1, gradient_accumulation_steps=1,
)  # fmt: skip


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


class GRPOTrainer(SimpleNamespace):
    """As much of TRL's as is looked at."""


def trainer(**more: Any) -> Any:
    return GRPOTrainer(args=ARGS, model=None, state=None, **more)


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
    untouched = trainer(_generate=print)
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
    trl.attach(trainer(_generate=print), config)
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
    refused = trainer(_generate=print, _metrics={})
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
    twice, other = (trainer(_generate=len, _metrics={}, log=print) for _ in range(2))
    twice.model = SimpleNamespace(training=True)
    for attached in (twice, twice, other):
        trl.attach(attached, on)
        assert attached._generate.generate is len
        role = SkipManager.skip_instances["rollout"].local_config
        assert role.restore_rng is (given is None)
    with pytest.raises(ConfigError, match=r"another config was installed since"):
        twice._generate(["p"])
