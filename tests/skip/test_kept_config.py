"""What is kept of a run's config next to its dumps."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from rlskip import RoleConfig, SkipManager
from rlskip.skip.kept_config import MASKED, flat_config, read_config


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
    @SkipManager.annotate(role="rollout")
    def generate(prompts: list[int]) -> list[int]:
        return prompts

    init(background_write=False)
    for step in (1, 2):
        SkipManager.set_step(step)
        generate([step])
        store = SkipManager.store("rollout")
        name = store.read_meta(step).info["config"]
        assert read_config(store.directory, name)["skip.rollout.enable"] is True
        shutil.rmtree(store.directory)
        read_config.cache_clear()
