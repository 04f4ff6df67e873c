"""Training on merged rows is training on the turns: the same loss, the same gradients."""

import pytest
import torch
from hypothesis import given, settings
from torch import nn

from rlskip.merge import merge
from tests.merge.batches import batches, merge_config

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
