"""Batches of step-wise rows, and the merge rule in its simplest form."""

from functools import partial

import numpy as np
import torch
from hypothesis import strategies as st
from tensordict import NonTensorStack, TensorDict

from rlskip.config.other_nodes import MergeConfig
from rlskip.merge import TrajectoryID

# Few different tokens, so that contexts agree by chance as well as by construction.
TOKENS = st.lists(st.integers(0, 3), max_size=4)
DTYPES = {
    "prompt_token_ids": np.int32,
    "response_ids": np.int32,
    "loss_masks": np.int8,
    "rewards": np.float64,
    "rollout_logprobs": np.float64,
}


class SkyrlID:
    """Compares, prints and does not hash, like the id class of SkyRL."""

    __hash__ = None

    def __init__(self, name):
        self.name = name

    def __eq__(self, other):
        return isinstance(other, SkyrlID) and self.name == other.name

    def to_string(self):
        return self.name


@st.composite
def trajectory_turns(draw):
    """Prompts and responses of one trajectory: mostly continued, with every kind of break."""
    prompts, responses = [draw(TOKENS)], [draw(TOKENS)]
    for _ in range(draw(st.integers(0, 6))):
        before = prompts[-1] + responses[-1]
        other = draw(st.integers(0, len(prompts) - 1))
        cut = draw(st.integers(0, len(before)))
        prompt = draw(
            st.sampled_from(
                [
                    before,
                    before,
                    before,
                    prompts[other] + responses[other],  # a sub-agent, a fork
                    prompts[other],  # a retry
                    [*before[:cut], 9, *before[cut + 1 :]],  # drift
                    before[:cut] + before[cut + 2 :],  # stripped
                    [],
                ]
            )
        )
        prompts.append(prompt + draw(TOKENS))
        responses.append(draw(TOKENS))
    return prompts, responses


@st.composite
def step_wise_batches(draw):
    """A GeneratorOutput that the greedy rule accepts."""
    out = {
        "prompt_token_ids": [],
        "response_ids": [],
        "trajectory_ids": [],
        "is_last_step": [],
        "rollout_metrics": draw(st.sampled_from([None, {"env/score": 1.0}])),
        "rollout_expert_indices": None,
    }
    make_id = draw(st.sampled_from([str, int, SkyrlID, lambda i: TrajectoryID(f"p_{i}", i)]))
    for i in range(draw(st.integers(1, 3))):
        prompts, responses = draw(trajectory_turns())
        out["prompt_token_ids"] += prompts
        out["response_ids"] += responses
        out["trajectory_ids"] += [make_id(str(i) if make_id is SkyrlID else i) for _ in prompts]
        out["is_last_step"] += [False] * (len(prompts) - 1) + [True]
    rows = len(out["response_ids"])

    # Faster than a draw for each value, and nothing worth shrinking.
    random = draw(st.randoms(use_true_random=True))

    def per_token(value):
        return [[value() for _ in response] for response in out["response_ids"]]

    out["loss_masks"] = per_token(lambda: random.randrange(2))
    scalar = draw(st.booleans())
    out["rewards"] = [random.random() for _ in range(rows)] if scalar else per_token(random.random)
    out["rollout_logprobs"] = per_token(random.random) if draw(st.booleans()) else None
    out["stop_reasons"] = [f"stop {i}" for i in range(rows)] if draw(st.booleans()) else None
    return out


def greedy(out):
    """SkyRL#1532: a turn joins the previous row if that row is a prefix of the turn's prompt."""
    per_token = {"loss_masks": 0, "rewards": 0.0, "rollout_logprobs": 0.0}
    if not isinstance(out["rewards"][0], list):
        del per_token["rewards"]
    if out["rollout_logprobs"] is None:
        del per_token["rollout_logprobs"]
    merged = []
    for i, prompt in enumerate(out["prompt_token_ids"]):
        turn = {name: list(out[name][i]) for name in ("response_ids", *per_token)}
        turn["prompt_token_ids"] = prompt
        for name in ("rewards", "stop_reasons", "trajectory_ids", "is_last_step"):
            if name not in per_token and out[name] is not None:
                turn[name] = out[name][i]
        row = merged[-1] if i > 0 and not out["is_last_step"][i - 1] else None
        whole = row and row["prompt_token_ids"] + row["response_ids"]
        if row is None or prompt[: len(whole)] != whole:
            merged.append(turn)
            continue
        observation = prompt[len(whole) :]
        turn["prompt_token_ids"] = row["prompt_token_ids"]
        turn["response_ids"] = row["response_ids"] + observation + turn["response_ids"]
        for name, fill in per_token.items():
            turn[name] = row[name] + [fill] * len(observation) + turn[name]
        merged[-1] = turn
    fields = merged[0].keys()
    return {name: [row[name] for row in merged] for name in fields}


def pack(out, **dtypes):
    """The packed form of a GeneratorOutput; keyword arguments change a field's dtype."""
    fields = {}
    for name, value in out.items():
        if value is None or isinstance(value, dict):
            continue
        if isinstance(value[0], list):
            flat = np.array([x for row in value for x in row], dtype=DTYPES[name])
            values = torch.from_numpy(flat).to(dtypes.get(name))
            offsets = torch.tensor([0, *map(len, value)]).cumsum(0)
            fields[name] = torch.nested.nested_tensor_from_jagged(values, offsets)
        elif isinstance(value[0], (bool, int, float)):
            fields[name] = torch.from_numpy(np.array(value))
        else:
            fields[name] = NonTensorStack(*value)
    return TensorDict(fields, batch_size=[len(out["response_ids"])])


def unpack(batch):
    """The lists of a packed batch."""
    return {
        name: [row.tolist() for row in value.unbind()]
        if isinstance(value, torch.Tensor) and value.is_nested
        else list(value.tolist())
        for name, value in batch.items()
    }


def turns(*pairs):
    """One trajectory from its (prompt, response) pairs, everything sampled, no rewards."""
    prompts, responses = ([pair[end] for pair in pairs] for end in (0, 1))
    return {
        "prompt_token_ids": prompts,
        "response_ids": responses,
        "rewards": [0.0] * len(pairs),
        "loss_masks": [[1] * len(response) for response in responses],
        "stop_reasons": None,
        "rollout_logprobs": None,
        "trajectory_ids": ["t"] * len(pairs),
        "is_last_step": [False] * (len(pairs) - 1) + [True],
    }


batches = step_wise_batches()
merge_config = partial(MergeConfig, stepwise_output=True)
