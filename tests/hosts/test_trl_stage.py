"""TRL's stage on a part of its trainer: images, and what is compared. test_trl.py has the rest."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlskip.errors import ConfigError, MismatchError
from rlskip.hosts import trl

Image = pytest.importorskip("PIL.Image")


def image(red: int = 200) -> Any:
    return Image.fromarray(np.full((4, 6, 3), (red, 10, 20), dtype=np.uint8))


def pixels(value: Any) -> Any:
    return np.asarray(value).tolist()


# What shapes nothing without vLLM, or without tools, or is empty.
IDLE = {"vllm_max_model_length": 9, "max_tool_calling_iterations": 3, "generation_kwargs": {}}


def make_trainer(made: list[int], logprobs: Any = None, given: Any = (), **more: Any) -> Any:
    """As much of a GRPOTrainer as `attach` and `_generate` use; each generation adds to `made`."""

    def generate(prompts: list[Any]) -> tuple[Any, ...]:
        made.append(1)
        images = [[message["content"][0]["image"]] for (message,) in prompts]
        completions = [[{"role": "assistant", "content": "red"}] for _ in prompts]
        ids = [[1, 2] for _ in prompts]
        return ids, ids, None, completions, logprobs, {"pixels": torch.ones(2, 3)}, images, []

    args = types.SimpleNamespace(
        output_dir="out", generation_batch_size=2, num_generations=2, max_completion_length=8,
        gradient_accumulation_steps=1, steps_per_generation=1, temperature=1.0, **dict(given),
    )  # fmt: skip
    state = types.SimpleNamespace(global_step=0, num_input_tokens_seen=0)
    model = types.SimpleNamespace(training=True)
    made_like = type("GRPOTrainer", (types.SimpleNamespace,), {})
    return made_like(
        _generate=generate,
        log=dict,
        _metrics={"train": {}},
        args=args,
        state=state,
        model=model,
        **more,
    )


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
        ({"processing_class": types.SimpleNamespace(chat_template="a")}, "identity.chat_template"),
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
