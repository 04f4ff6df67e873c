import copy

import pytest

from rlskip.merge import MergeError, concatenate_generator_outputs


@pytest.fixture
def halves(two_turns):
    other = copy.deepcopy(two_turns) | {"trajectory_ids": ["b", "b"], "stop_reasons": ["x", "y"]}
    return [two_turns, other]


def test_rows_and_fields_of_all_batches_are_kept_in_order(halves):
    for i, half in enumerate(halves):
        half["env_metrics"] = [{"i": i}, {"i": i}]
        half["trajectory_time_splits"] = {"llm": [1.0 + i, 2.0 + i]}
    before = copy.deepcopy(halves)
    result = concatenate_generator_outputs(halves, step_wise=True)
    assert result["trajectory_ids"] == ["a", "a", "b", "b"]
    assert result["stop_reasons"] == ["continue", "eos", "x", "y"]
    assert result["response_ids"] == [[20], [40, 41], [20], [40, 41]]
    assert result["env_metrics"] == [{"i": 0}, {"i": 0}, {"i": 1}, {"i": 1}]
    assert result["trajectory_time_splits"] == {"llm": [1.0, 2.0, 2.0, 3.0]}
    assert halves == before


@pytest.mark.parametrize("lacking", [0, 1])
@pytest.mark.parametrize("name", ["stop_reasons", "env_metrics", "trajectory_time_splits"])
def test_an_optional_field_is_none_if_any_batch_lacks_it(halves, name, lacking):
    halves[1 - lacking][name] = {"llm": [1.0, 2.0]} if "splits" in name else [1, 2]
    halves[lacking].pop(name, None)
    assert concatenate_generator_outputs(halves)[name] is None


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"rewards": None}, "rewards"),
        ({"rollout_logprobs": None}, "rollout_logprobs"),  # a mix
        ({"stop_reasons": ["x"]}, "stop_reasons"),
        ({"loss_masks": [[1], [1]]}, "loss_masks[3]"),
        ({"is_last_step": [True, True]}, "is_last_step[2]"),
        ({"trajectory_ids": ["a", "a"]}, "is_last_step[1]"),
        ({"env_metrics": 3}, "env_metrics"),
    ],
)
def test_refusals_name_field_and_row(halves, change, where):
    halves[0].setdefault("env_metrics", [1, 2])
    halves[1] |= change
    with pytest.raises(MergeError) as error:
        concatenate_generator_outputs(halves, step_wise=True)
    assert error.value.where == where


def test_trajectories_need_not_be_complete_unless_step_wise(halves):
    halves[1]["is_last_step"] = [True, True]
    assert concatenate_generator_outputs(halves)["is_last_step"] == [False, True, True, True]


def test_the_formats_metrics_are_computed_and_the_generators_own_combined(halves):
    for i, half in enumerate(halves):
        half["trajectory_generation_times"] = [1.0, 4.0 + i]
        half["rollout_metrics"] = {
            "generate/max_num_tokens": 999,
            "env/avg_score": i,
            "env/mean_score": i,
            "env/min_score": i,
            "env/max_score": i,
            "env/calls": 2,
            "env/note": "not a number",
        }
    metrics = concatenate_generator_outputs(halves, step_wise=True)["rollout_metrics"]
    assert metrics == {
        "generate/min_num_tokens": 1,
        "generate/max_num_tokens": 2,
        "generate/avg_num_tokens": 1.5,
        "generate/std_num_tokens": 0.5,
        "generate/avg_tokens_non_zero_rewards": 1.5,
        "generate/avg_tokens_zero_rewards": 0.0,
        "generate/min_assistant_tokens": 1,
        "generate/max_assistant_tokens": 2,
        "generate/avg_assistant_tokens": 1.5,
        "generate/std_assistant_tokens": 0.5,
        "generate/tokens_per_turn_mean": 1.5,
        "generate/tokens_per_turn_std": 0.5,
        "generate/tokens_per_turn_max": 2,
        # The name of SkyRL 0.3.0.
        "generate/trajectory_completion_time_mean": 4.5,
        "generate/trajectory_completion_time_p90": 4.9,
        "generate/trajectory_completion_time_max": 5.0,
        "env/avg_score": 0.5,
        "env/mean_score": 0.5,
        "env/min_score": 0,
        "env/max_score": 1,
        "env/calls": 4,
    }


@pytest.mark.parametrize("step_wise", [False, True])
def test_times_are_split_over_all_rows_or_the_last_of_each_trajectory(halves, step_wise):
    for half in halves:
        half["trajectory_generation_times"] = [10.0, 20.0]
        half["trajectory_time_splits"] = {"llm": [4.0, 8.0], "env": [5.0, 11.0]}
    metrics = concatenate_generator_outputs(halves, step_wise)["rollout_metrics"]
    times = {
        name.removeprefix("generate/trajectory_time_"): value
        for name, value in metrics.items()
        if name.startswith("generate/trajectory_time_")
    }
    means = (20, 8, 11, 1) if step_wise else (15, 6, 8, 1)
    assert metrics["generate/trajectory_completion_time_mean"] == means[0]
    assert metrics["generate/trajectory_completion_time_max"] == 20
    assert [times[f"{name}_mean"] for name in ("llm", "env", "other")] == [*means[1:]]
    assert [times[f"{name}_max"] for name in ("llm", "env")] == [8, 11]
    assert times["llm_p90"] == 8
    assert len(times) == 9, "each figure once"
    for half in halves:
        del half["trajectory_generation_times"]
    metrics = concatenate_generator_outputs(halves, step_wise)["rollout_metrics"]
    assert metrics["generate/trajectory_time_llm_mean"] == means[1]
    assert "generate/trajectory_time_other_mean" not in metrics


@pytest.mark.parametrize(("first", "zero"), [(0.0, 1), (-1.0, 0)])
def test_lengths_are_averaged_by_reward(two_turns, first, zero):
    two_turns["rewards"] = [[first], [0.0, 5.0]]
    metrics = concatenate_generator_outputs([two_turns])["rollout_metrics"]
    assert metrics["generate/avg_tokens_non_zero_rewards"] == 2
    assert metrics["generate/avg_tokens_zero_rewards"] == zero


def test_a_mask_of_several_turns_counts_each(two_turns):
    two_turns |= {
        "response_ids": [[1] * 7, [2]],
        "loss_masks": [[1, 1, 0, 1, 0, 0, 1], [0]],
        "rewards": [0.0, 0.0],
        "rollout_logprobs": None,
    }
    metrics = concatenate_generator_outputs([two_turns])["rollout_metrics"]
    assert metrics["generate/tokens_per_turn_max"] == 2
    assert metrics["generate/tokens_per_turn_mean"] == pytest.approx(4 / 3)
