"""What hosts without Hydra refuse before anything is attached."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlskip import SkipManager
from rlskip.errors import ConfigError
from rlskip.hosts import trl, uninstall
from rlskip.hosts.attach import AttachError
from rlskip.hosts.source import CONFIG_VARIABLE, read_config

ARGS = SimpleNamespace(
    output_dir="out", generation_batch_size=8, num_generations=4, max_completion_length=16,
    steps_per_generation=1, gradient_accumulation_steps=1,
)  # fmt: skip


@pytest.fixture(autouse=True)
def _reset() -> Any:
    yield
    uninstall()


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


def trainer(**more: Any) -> Any:
    return SimpleNamespace(args=ARGS, model=None, state=None, **more)


def test_trl_trainers_that_cannot_be_attached_are_refused(tmp_path: Path) -> None:
    on = {"skip": {"dump_dir": str(tmp_path), "rollout": {"enable": True}}}
    with pytest.raises(AttachError, match="SimpleNamespace has no _generate, _metrics"):
        trl.attach(trainer(), on)
    environments = trainer(_generate=print, _metrics={}, environment_factories={None: object})
    with pytest.raises(ConfigError, match="the trainer has environments"):
        trl.attach(environments, on)
    assert environments._generate is print


def test_trl_with_skip_off_is_left_as_it_is(tmp_path: Path) -> None:
    untouched = trainer(_generate=print)
    trl.attach(untouched, {"skip": {"dump_dir": str(tmp_path)}})
    assert untouched._generate is print
    assert not SkipManager.skip_instances
