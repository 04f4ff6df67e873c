"""Packed forward passes of genuine models of transformers, and TRL's trainers on packs.

Real processes of the interpreter that $RLSKIP_TRL names (`.ci/env trl` makes it).
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.trl, pytest.mark.timeout(900)]

APP = Path(__file__).with_name("packing_app.py")


MODELS = ["Llama", "Qwen2", "Qwen3", "Qwen3Moe", "GPT2", "Falcon", "StableLm", "JetMoe"]
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("Mistral", {}, "sliding window"),
    ("Gemma3Text", {}, "sliding_attention"),
    ("GptOss", {"layer_types": ["full_attention"] * 2}, "sinks"),
    ("GPTNeo", {}, "layers of the type local"),
    ("Doge", {}, "dynamic mask"),
    ("Bloom", {}, "position_ids"),
    ("Mamba", {}, "linear_attention"),
    ("Rwkv", {}, "recurrent state"),
    ("Phi3", {}, "longrope"),
    ("Qwen3Moe", {"output_router_logits": True}, "auxiliary loss"),
    ("Llama", {"attention_dropout": 0.1, "training": True}, "dropout"),
    ("GPT2", {"training": True}, "dropout"),
    ("Llama", {"attention_dropout": 0.1}, ""),
    ("Mistral", {"sliding_window": None}, ""),
]
WRONG = {"positions": "row 1, token 6", "mask": "row 1, token 6", "detached": "gradient of"}
CASES: list[list[Any]] = [
    *(["exact", model, attention] for model in MODELS for attention in ("sdpa", "eager")),
    ["adapted", False],
    ["adapted", True],
    ["checkpointing", "Qwen2"],
    ["flex", "Llama"],
    ["spread", "Qwen2"],
    *(["refused", model, change] for model, change, _ in REFUSED),
    ["refused_mask"],
    *(["wrong", how] for how in WRONG),
    ["trls", "Llama"],
    ["trained", "GRPO"],
    ["trained", "RLOO"],
    ["trained_with_dropout", "GRPO"],
    ["recorded_on_packs", "record", "pack", "pack"],
    ["recorded_on_packs", "pack", "record"],
]


@pytest.fixture(scope="module")
def result(python_of: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """``result(function, *arguments)``, from one process for all cases."""
    folder = tmp_path_factory.mktemp("packing")
    (folder / "cases.json").write_text(json.dumps(CASES))
    done = subprocess.run(
        [python_of("trl"), str(APP), "cases.json", "results.json"], cwd=folder, capture_output=True,
        text=True, timeout=900,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    results = json.loads((folder / "results.json").read_text())
    return lambda *case: results[CASES.index(list(case))]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("model", MODELS)
def test_log_probs_loss_and_gradients_are_those_of_the_rows(
    result: Callable[..., Any], model: str, attention: str
) -> None:
    assert result("exact", model, attention) == "exact"


def test_adapters_are_packed_unless_they_add_tokens(result: Callable[..., Any]) -> None:
    assert result("adapted", False) == "exact"
    assert "virtual tokens" in result("adapted", True)


def test_layers_that_are_computed_again_see_the_same_pack(result: Callable[..., Any]) -> None:
    assert result("checkpointing", "Qwen2") == "exact"


def test_flex_attention_computes_the_same(result: Callable[..., Any]) -> None:
    assert result("flex", "Llama") < 1e-5


def test_gradients_in_float32_are_within_the_spread_of_two_batchings(
    result: Callable[..., Any],
) -> None:
    packed, batched = result("spread", "Qwen2")
    assert packed < 4 * batched


@pytest.mark.parametrize(("model", "change", "reason"), REFUSED)
def test_what_cannot_be_exact_is_refused_by_name(
    result: Callable[..., Any], model: str, change: dict[str, Any], reason: str
) -> None:
    said = result("refused", model, change)
    assert reason in said
    assert bool(said) == bool(reason)


def test_a_mask_that_layers_make_is_not_lost(result: Callable[..., Any]) -> None:
    assert "a mask that its layers make" in result("refused_mask")


@pytest.mark.parametrize("how", WRONG)
def test_the_oracle_names_what_a_wrong_packing_changes(
    result: Callable[..., Any], how: str
) -> None:
    assert WRONG[how] in result("wrong", how)


def test_the_oracle_passes_trls_own_plan(result: Callable[..., Any]) -> None:
    assert result("trls", "Llama") == "exact"


@pytest.mark.parametrize("trainer", ["GRPO", "RLOO"])
def test_trl_trains_the_same_on_packs(result: Callable[..., Any], trainer: str) -> None:
    plain, batched, packed = result("trained", trainer)
    for name in ("loss", "grad_norm", "kl"):
        spread = max(abs(a[name] - b[name]) for a, b in zip(plain, batched, strict=True))
        off = max(abs(a[name] - b[name]) for a, b in zip(plain, packed, strict=True))
        # Two batchings may agree to the bit by chance: allow some units in the last place, too.
        rounding = 1e-6 * max(1.0, *(abs(a[name]) for a in plain))
        assert off <= max(4 * spread, rounding), name


def test_processes_wait_for_none_with_more_packs(python_of: Any, tmp_path: Path) -> None:
    flags = "--multi_gpu --num_processes=2 --num_machines=1 --main_process_port=0"
    flags += " --mixed_precision=no --dynamo_backend=no"
    (tmp_path / "cases.json").write_text('[["trained_by_ranks"]]')
    launch = [python_of("trl"), "-m", "accelerate.commands.launch", *flags.split()]
    done = subprocess.run(
        [*launch, str(APP), "cases.json", "results.json"], cwd=tmp_path, capture_output=True,
        text=True, timeout=300, env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    [[rows, packs]] = json.loads((tmp_path / "results.json").read_text())
    assert packs == pytest.approx(rows, rel=1e-4)


def test_trl_with_dropout_is_refused(result: Callable[..., Any]) -> None:
    assert "dropout" in result("trained_with_dropout", "GRPO")


def test_log_probs_from_packs_are_recorded_in_either_order(result: Callable[..., Any]) -> None:
    recorded, packs = result("recorded_on_packs", "record", "pack", "pack")
    assert recorded > 0
    assert packs > 0
    assert result("recorded_on_packs", "pack", "record") == [recorded, packs]
