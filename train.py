"""GRPO from scratch on a CPU: a small transformer learns to find a hidden number.

The prompt ``3 14:`` says that a number from 3 to 14 is hidden. The policy guesses, the game
answers ``+`` (higher), ``-`` (lower), ``=`` (right) or ``?`` (that was no number), and so on
until the guess is right or the last one is used up::

    3 14: 9- 5+ 7=

Each prompt is played by n sessions; a session's advantage is what it earned above its group.

    python train.py                       # learns, in about a minute
    python train.py +skip=rollout_cache   # the second time, nothing is generated
    python train.py +dispatch=rollout_level   # the same rollouts, session by session on workers
    python train.py +merge=prefix         # a session's turns are trained as one row
    python train.py +record=stages        # for `rlskip compare`: where do two runs first differ?
"""

from __future__ import annotations

import json
import logging
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import hydra
import numpy as np
import torch
from omegaconf import DictConfig
from tensordict import NonTensorStack, TensorDict
from torch import Tensor, nn

from rlskip import SkipManager, record
from rlskip.dispatch import RolloutDispatcher, Session
from rlskip.merge import merge

log = logging.getLogger(__name__)

# -- the game ------------------------------------------------------------------------------
NUMBERS = 16  # 0 to 15; as with a large tokenizer, each is one token, and its own id
TOKENS = [*(f" {number}" for number in range(NUMBERS)), ":", "+", "-", "=", "?", ""]
COLON, HIGHER, LOWER, RIGHT, NO_NUMBER, PAD = range(NUMBERS, len(TOKENS))
TURN = 2  # tokens: a guess and its answer


def draw_prompts(cfg: DictConfig, step: int) -> TensorDict:
    """The step's prompts: ``input_ids`` [B, 3], ``hidden`` and ``index`` [B].

    The game is small (728 games), so draws recur: no game is held out, and success is on all.
    """
    batch = cfg.data.train_batch_size
    rng = np.random.default_rng([cfg.seed, step])
    size = rng.integers(cfg.game.min_range, cfg.game.max_range, batch, endpoint=True)
    low = rng.integers(0, NUMBERS - size, endpoint=True)
    columns = {
        "uid": NonTensorStack(*(f"{step}-{i}" for i in range(batch))),
        "index": torch.arange(batch),
        "input_ids": torch.from_numpy(np.stack([low, low + size - 1, np.full(batch, COLON)], 1)),
        "hidden": torch.from_numpy(rng.integers(low, low + size)),
    }
    return TensorDict(columns, batch_size=[batch])


def answer(guess: Tensor, hidden: Tensor) -> Tensor:
    reply = torch.where(guess < hidden, HIGHER, torch.where(guess > hidden, LOWER, RIGHT))
    return torch.where(guess < NUMBERS, reply, NO_NUMBER)


def earned(prompts: Tensor, guesses: Tensor, replies: Tensor, credit: float) -> Tensor:
    """The reward of each session: for the hidden number, and in part for what is ruled out.

    `prompts` is [sessions, 3], `guesses` and `replies` are [sessions, turns]. What is ruled out is
    a share of the range's bits: 0 knows nothing new, 1 knows the number.
    """
    won, low, high = (replies == RIGHT).any(1), prompts[:, 0], prompts[:, 1]
    above = torch.where(replies == HIGHER, guesses + 1, 0).amax(1).maximum(low)
    below = torch.where(replies == LOWER, guesses - 1, NUMBERS).amin(1).minimum(high)
    left = torch.where(won, 1, below - above + 1)
    return torch.lerp(won.float(), 1 - left.log() / (high - low + 1).log(), credit)


# -- the policy ----------------------------------------------------------------------------
class Policy(nn.Module):
    """A decoder-only transformer, pre-norm, its output layer tied to its token embedding."""

    def __init__(self, width: int, layers: int, heads: int, context: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(len(TOKENS), width), nn.Embedding(context, width)
        block = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0, activation="gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(
            block, layers, nn.LayerNorm(width), enable_nested_tensor=False
        )
        nn.init.normal_(self.token.weight, std=0.1)
        nn.init.normal_(self.position.weight, std=0.1)
        # A pretrained model knows the order of the numbers; ours starts with a number line.
        waves = torch.outer(torch.arange(NUMBERS) / NUMBERS, torch.pi * torch.arange(1, 9))
        self.token.weight.data[:NUMBERS, :16] = 0.25 * torch.cat([waves.sin(), waves.cos()], 1)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [B, T, vocabulary] of what follows each of `tokens` [B, T]."""
        length = tokens.shape[1]
        x = self.token(tokens) + self.position.weight[:length]
        causal = nn.Transformer.generate_square_subsequent_mask(length)
        return self.blocks(x, causal, is_causal=True) @ self.token.weight.T


# -- the rollouts --------------------------------------------------------------------------
# A matmul treats a row alike whatever rows are beside it, as long as its tiles are full. So a
# session's tokens and log-probs are the same, to the last bit, sampled alone or in any company.
LANES = 16


@torch.no_grad()
def play(
    policy: Policy, prompts: TensorDict, sessions: Tensor, cfg: DictConfig, step: int
) -> TensorDict:
    """Sample one session of each of `prompts` [B], whose numbers are `sessions` [B].

    Returns a row for each turn, session by session; its prompt is all that was said before it.
    """
    names = list(zip(prompts["index"].tolist(), sessions.tolist(), strict=True))
    turns = cfg.data.max_response_length // TURN
    # Inverse transform sampling: each session has its own numbers, however it is batched.
    draws = [np.random.default_rng([cfg.seed, step, *name]).random(turns) for name in names]
    lanes = torch.arange(len(names) + -len(names) % LANES) % len(names)  # the first ones fill up
    luck = torch.tensor(np.stack(draws, 1)).float()[:, lanes, None]  # [turns, lanes, 1]
    tokens, hidden = prompts["input_ids"][lanes], prompts["hidden"][lanes, None]
    log_probs = []
    for turn in range(turns):
        scores = policy(tokens)[:, -1].log_softmax(-1)
        found = torch.searchsorted(scores.exp().cumsum(-1), luck[turn], right=True)
        guess = found.clamp(max=len(TOKENS) - 1)
        tokens = torch.cat([tokens, guess, answer(guess, hidden)], 1)
        log_probs.append(scores.gather(1, guess))

    # A session that has won was sampled on with the others: its rows end where it won.
    tokens, log_prob = tokens[: len(names)], torch.cat(log_probs, 1)
    guesses, replies = tokens[:, -turns * TURN :].unflatten(1, (turns, TURN)).unbind(-1)
    exists = (won := replies == RIGHT).cumsum(1) - won.int() == 0
    reward = earned(prompts["input_ids"], guesses, replies, cfg.game.partial_credit)
    at, turn = exists.nonzero().unbind(1)
    last, end = turn == exists.sum(1)[at] - 1, tokens.shape[1] - (turns - turn) * TURN
    one, said_before = torch.ones_like(end), torch.arange(tokens.shape[1]) < end[:, None]
    rows = {
        "prompt_token_ids": jagged(tokens[at][said_before], end),
        "response_ids": jagged(guesses[at, turn], one),
        "loss_masks": jagged(one, one),
        "rollout_logprobs": jagged(log_prob[at, turn], one),
        "rewards": torch.where(last, reward[at], 0.0),
        "success": last & won.any(1)[at],
        "is_last_step": last,
        "hidden": prompts["hidden"][at],
        "prompt": prompts["index"][at],
        "session": sessions[at],
        "trajectory_ids": prompts["index"][at] * cfg.actor_rollout_ref.rollout.n + sessions[at],
    }
    return TensorDict(rows, batch_size=[len(end)])


def jagged(values: Tensor, lengths: Tensor) -> Tensor:
    offsets = nn.functional.pad(lengths.cumsum(0), (1, 0))
    return torch.nested.nested_tensor_from_jagged(values, offsets)


class Player:
    """A worker of the dispatcher: plays one session with the weights that it loaded last."""

    def __init__(self, cfg: DictConfig) -> None:
        self.cfg, self.policy = cfg, Policy(**cfg.actor_rollout_ref.model)

    def load(self, weights: dict[str, Tensor]) -> None:
        self.policy.load_state_dict(weights)

    def __call__(self, prompt: dict[str, Tensor], sampling: dict, session: Session) -> list[dict]:
        alone = TensorDict({k: prompt[k][None] for k in ("index", "input_ids", "hidden")}, [1])
        rows = play(self.policy, alone, torch.tensor([session.session_id]), self.cfg, session.step)
        columns = [column.unbind() for column in rows.values()]
        return [dict(zip(rows.keys(), row, strict=True)) for row in zip(*columns, strict=True)]


@SkipManager.annotate(role="rollout", rows={"prompt_group": "index"})
def generate_rollouts(
    prompts: TensorDict,
    policy: Policy,
    cfg: DictConfig,
    step: int,
    dispatcher: RolloutDispatcher | None,
) -> TensorDict:
    """All the rows of a step, group by group."""
    if dispatcher is not None:
        dispatcher.broadcast("load", policy.state_dict())
        rows, _ = dispatcher.collect(prompts, step=step)
        return rows.exclude("uid", "session_id")  # the game's own columns name them
    n = cfg.actor_rollout_ref.rollout.n
    each, sessions = torch.arange(len(prompts)).repeat_interleave(n), torch.arange(n)
    return play(policy, prompts.exclude("uid")[each], sessions.repeat(len(prompts)), cfg, step)


# -- the update ----------------------------------------------------------------------------
def dense(rows: TensorDict, width: int) -> TensorDict:
    """Prompts and responses as one tensor [B, width] a field, padded on the right."""
    ids = rows["prompt_token_ids"], rows["response_ids"]
    start, length = (field.offsets().diff()[:, None] for field in ids)
    at = torch.arange(width)
    heard, said = at < start, (at >= start) & (at < start + length)
    tokens = torch.full(said.shape, PAD)
    tokens[heard], tokens[said] = (field.values() for field in ids)
    mask, log_probs = torch.zeros_like(said), torch.zeros(said.shape)
    mask[said] = rows["loss_masks"].values().bool()
    log_probs[said] = rows["rollout_logprobs"].values()
    fields = {"input_ids": tokens, "response_mask": mask, "rollout_log_probs": log_probs}
    return rows.select("rewards", "prompt", "session").update(fields)


def advantages(rows: TensorDict, prompts: int, n: int) -> Tensor:
    """What each row's session earned above its group, in the group's standard deviations."""
    session = rows["prompt"], rows["session"]
    earned = torch.zeros(prompts, n).index_put_(session, rows["rewards"], accumulate=True)
    above = earned - earned.mean(1, keepdim=True)
    return (above / (earned.std(1, keepdim=True) + 1e-6))[session]


def update(
    policy: Policy, optimizer: torch.optim.Adam, rows: TensorDict, cfg: DictConfig, step: int
) -> float:
    """Clipped policy loss over the step's rows; returns its mean over the mini-batches."""
    actor, n = cfg.actor_rollout_ref.actor, cfg.actor_rollout_ref.rollout.n
    rows = dense(rows, cfg.data.max_prompt_length + cfg.data.max_response_length)
    advantage = advantages(rows, cfg.data.train_batch_size, n)
    record("advantages", advantage, rows=rows)
    # A group whose sessions all earned the same has nothing to say.
    rows, advantage = rows[advantage != 0], advantage[advantage != 0]
    order, losses = np.random.default_rng([cfg.seed, step]).permutation(len(rows)), []
    for pick in torch.from_numpy(order).split(actor.ppo_mini_batch_size):
        batch = rows[pick]
        # The logits at a position are about the token after it. Padding is on the right,
        # where causal attention does not look, so no other mask is needed.
        tokens, sampled = batch["input_ids"], batch["response_mask"][:, 1:]
        scores = policy(tokens[:, :-1])[sampled].log_softmax(-1)
        log_prob = scores.gather(1, tokens[:, 1:][sampled][:, None])[:, 0]
        record("log_probs", log_prob, rows=batch)
        gain = advantage[pick][:, None].expand(sampled.shape)[sampled]
        ratio = (log_prob - batch["rollout_log_probs"][:, 1:][sampled]).exp()
        clipped = ratio.clamp(1 - actor.clip_ratio, 1 + actor.clip_ratio)
        loss = -torch.minimum(gain * ratio, gain * clipped).mean()
        record("loss", loss)
        optimizer.zero_grad()
        loss.backward()
        record("grad_norm", nn.utils.clip_grad_norm_(policy.parameters(), actor.grad_clip))
        optimizer.step()
        losses.append(loss.item())
    return float(np.mean(losses)) if losses else float("nan")


# -- the loop ------------------------------------------------------------------------------
@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(cfg: DictConfig) -> None:
    torch.set_num_threads(cfg.threads)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(cfg.seed)
    policy = Policy(**cfg.actor_rollout_ref.model)
    optimizer = torch.optim.Adam(policy.parameters(), lr=cfg.actor_rollout_ref.actor.optim.lr)
    steps = range(1, cfg.trainer.total_training_steps + 1)
    # Workers are this trainer's inference engine: a run of replays alone needs none.
    dispatcher = None
    if "dispatch" in cfg and not SkipManager.will_replay("rollout", steps):
        store = SkipManager.store("rollout")
        dispatcher = RolloutDispatcher.from_config(cfg, partial(Player, cfg), store=store)
    output = Path(hydra.core.hydra_config.HydraConfig.get().runtime.output_dir)
    sessions = cfg.data.train_batch_size * cfg.actor_rollout_ref.rollout.n
    with dispatcher or nullcontext(), (output / "metrics.jsonl").open("w") as metrics:
        for step in steps:
            SkipManager.set_step(step)
            prompts = draw_prompts(cfg, step)
            start = time.perf_counter()
            rows = generate_rollouts(prompts, policy, cfg, step, dispatcher)
            rolled_out = time.perf_counter()
            to_train, _, report = merge(rows, cfg)  # the rows as they are without +merge=prefix
            figures = {
                "step": step,
                "success": rows["success"].sum().item() / sessions,
                "reward": rows["rewards"].sum().item() / sessions,
                "turns": len(rows) / sessions,
                "loss": update(policy, optimizer, to_train, cfg, step),
                **report,
                "time/rollout_s": rolled_out - start,
                "time/update_s": time.perf_counter() - rolled_out,
            }
            print(json.dumps(figures), file=metrics, flush=True)
            last = int(rows["is_last_step"].int().argmax())
            said = [*rows["prompt_token_ids"][last], *rows["response_ids"][last]]
            shown = figures["success"], figures["loss"], "".join(TOKENS[token] for token in said)
            log.info("step %3d  won %.3f  loss %+.4f  e.g.%s", step, *shown)


if __name__ == "__main__":
    main()
