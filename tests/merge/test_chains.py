import logging

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from rlskip.config.other_nodes import MergeConfig
from rlskip.merge import MergeError, merge
from rlskip.merge.chains import link
from rlskip.merge.layouts import list_rows
from tests.merge.batches import batches, merge_config, turns


def fewest_chains(rows, trajectory):
    """Rows less the most of them that can each continue an earlier one: augmenting paths."""
    continued_by = {}

    def continues_one(j, tried):
        for i in range(trajectory.start, j):
            if i not in tried and rows.continues(j, i):
                tried.add(i)
                if i not in continued_by or continues_one(continued_by[i], tried):
                    continued_by[i] = j
                    return True
        return False

    return len(trajectory) - sum(continues_one(j, set()) for j in trajectory)


@st.composite
def nested_contexts(draw):
    """Turns whose contexts are often prefixes of one another, from an alphabet of two tokens."""
    pairs = []
    for _ in range(draw(st.integers(2, 7))):
        known = [prompt + response for prompt, response in pairs] or [[]]
        base = draw(st.sampled_from(known))
        context = base[: draw(st.integers(0, len(base)))] + draw(
            st.lists(st.integers(0, 1), max_size=2)
        )
        cut = draw(st.integers(0, len(context)))
        pairs.append((context[:cut], context[cut:]))
    return turns(*pairs)


@given(nested_contexts())
@example(turns(([1, 2, 3], [4]), ([1], [2]), ([1, 2, 3, 4], [5]), ([1, 2], [9])))
@settings(max_examples=100)
def test_chains_are_the_fewest(out):
    rows = list_rows(out)
    linked = link(rows, MergeConfig(strategy="chain"))
    for trajectory, chains in zip(rows.trajectories, linked, strict=True):
        assert len(chains) == fewest_chains(rows, trajectory)


@given(batches)
def test_every_sampled_token_is_trained_exactly_once(out):
    names = iter(range(1, 10_000))  # each sampled token gets a name, stored as its log-prob
    out["rollout_logprobs"] = [[next(names) for _ in row] for row in out["response_ids"]]

    def trained(out):
        """Each token that is, and the context in which it was sampled."""
        fields = ("prompt_token_ids", "response_ids", "loss_masks", "rollout_logprobs")
        return [
            (name, prompt + response[: k + 1])
            for prompt, response, mask, row in zip(*map(out.get, fields), strict=True)
            for k, name in enumerate(row)
            if mask[k]
        ]

    for strategy in ("adjacent", "chain"):
        merged, _, _ = merge(out, merge_config(strategy=strategy))
        assert sorted(trained(merged)) == sorted(trained(out))
        list_rows(merged)  # the last turns are still the last rows


@given(batches, st.integers(1, 12))
def test_no_row_grows_past_the_limit(out, limit):
    rows = list_rows(out)
    for strategy in ("adjacent", "chain"):
        for chains in link(rows, MergeConfig(strategy=strategy, max_seq_len=limit)):
            assert all(rows.length(j) <= limit for chain in chains for j in chain[1:])


def test_what_becomes_of_rows_past_the_limit(caplog):
    """Split at the turn's boundary, refused by row and key, or merged with a warning."""
    three_turns = turns(([1], [2]), ([1, 2, 3], [4]), ([1, 2, 3, 4, 5], [6]))
    merged, _, report = merge(three_turns, merge_config(max_seq_len=5))
    assert merged["prompt_token_ids"] == [[1], [1, 2, 3, 4, 5]]
    assert merged["response_ids"] == [[2, 3, 4], [6]]
    assert [b.cause for b in report.breaks] == ["overlong"]
    assert len(merge(three_turns, merge_config(max_seq_len=6))[0]["response_ids"]) == 1

    with pytest.raises(MergeError) as error:
        merge(three_turns, merge_config(max_seq_len=5, on_overlong="error"))
    assert error.value.where == "response_ids[2]"
    assert "merge.max_seq_len" in error.value.what

    caplog.clear()
    with caplog.at_level(logging.WARNING, "rlskip.merge"):
        merged, _, _ = merge(three_turns, merge_config(max_seq_len=3, on_overlong="warn"))
    assert merged["response_ids"] == [[2, 3, 4, 5, 6]]
    (message,) = caplog.messages
    assert message.startswith("rlskip: 2 turns would be merged into rows of more than 3 tokens")
    assert message.endswith("row 1, with 4 (merge.on_overlong=warn)")


# -- training on merged rows is training on the turns: the same loss, the same gradients ----------

VOCABULARY = 10


class Model(nn.Module):
    """What it predicts depends on all tokens before; float64, so that only a difference shows."""

    def __init__(self, width=8):
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.block = nn.GRU(width, width)
        self.head = nn.Linear(width, VOCABULARY)
        self.double()

    def forward(self, ids):
        return self.head(self.block(self.tokens(ids))[0])


def loss_and_gradients(out):
    """An importance-weighted policy gradient, averaged over the trained tokens.

    The advantage is the trajectory's, here a function of its id.
    """
    model = Model()
    total, trained = torch.zeros((), dtype=torch.float64), 0
    for i, (prompt, response) in enumerate(
        zip(out["prompt_token_ids"], out["response_ids"], strict=True)
    ):
        # A first token, so that an empty prompt predicts too.
        ids = torch.tensor([0, *prompt, *response])
        log_probs = model(ids)[:-1].log_softmax(-1).gather(1, ids[1:, None])[len(prompt) :, 0]
        old = torch.tensor(out["rollout_logprobs"][i], dtype=torch.float64)
        mask = torch.tensor(out["loss_masks"][i], dtype=torch.float64)
        advantage = out["trajectory_ids"][i] - 0.5
        total = total - ((log_probs - old).exp() * advantage * mask).sum()
        trained += int(mask.sum())
    loss = total / max(trained, 1)
    loss.backward()
    return loss, [parameter.grad for parameter in model.parameters()]


@given(batches)
@settings(max_examples=4)
@pytest.mark.parametrize("strategy", ["adjacent", "chain"])
def test_merged_rows_give_the_loss_and_gradients_of_the_turns(strategy, out):
    out["trajectory_ids"] = torch.tensor([False, *out["is_last_step"]]).cumsum(0)[:-1].tolist()
    out["rollout_logprobs"] = [[-2.0 - token / 8 for token in row] for row in out["response_ids"]]
    merged, _, _ = merge(out, merge_config(strategy=strategy))
    loss, gradients = loss_and_gradients(out)
    merged_loss, merged_gradients = loss_and_gradients(merged)
    torch.testing.assert_close(merged_loss, loss, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(merged_gradients, gradients, rtol=1e-8, atol=1e-12)
