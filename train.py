"""GRPO from scratch on a CPU: a small transformer learns to find a hidden number.

The prompt ``3 14:`` says that a number from 3 to 14 is hidden. The policy guesses, the game
answers ``+`` (higher), ``-`` (lower), ``=`` (right) or ``?`` (that was no number), and so on
until the guess is right or the last one is used up::

    3 14: 9- 5+ 7=

Each prompt is played by n sessions; a session's advantage is what it earned above its group.
How often the best possible player wins is known (binary search), so the learning curve shows
how much is left to learn.

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
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import hydra
import numpy as np
import torch
import torch.nn.functional as F
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig
from tensordict import NonTensorStack, TensorDict
from torch import Tensor, nn
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from rlskip import MergeConfig, SkipManager, record
from rlskip.config.merge import read_merge
from rlskip.dispatch import RolloutDispatcher, Session
from rlskip.merge import MergeReport, merge

log = logging.getLogger(__name__)

# -- the game ------------------------------------------------------------------------------

NUMBERS = 16  # 0 to 15; as with a large tokenizer, each is one token, and its own id
TOKENS = [*(f" {number}" for number in range(NUMBERS)), ":", "+", "-", "=", "?", ""]
COLON, HIGHER, LOWER, RIGHT, NO_NUMBER, PAD = range(NUMBERS, len(TOKENS))
TURN = 2  # tokens: a guess and its answer


def draw_prompts(cfg: DictConfig, step: int) -> TensorDict:
    """The step's prompts: ``input_ids`` [B, 3], ``hidden`` and ``index`` [B].

    The game is small (91 ranges, 728 games), so draws recur: a step's success, sampled before its
    update, is that of the policy on the game itself, not on games held out from it.
    """
    batch = cfg.data.train_batch_size
    rng = np.random.default_rng([cfg.seed, step])
    size = rng.integers(cfg.game.min_range, cfg.game.max_range, batch, endpoint=True)
    low = rng.integers(0, NUMBERS - size, endpoint=True)
    high = low + size - 1
    hidden = rng.integers(low, high, endpoint=True)
    return TensorDict(
        {
            "uid": NonTensorStack(*(f"{step}-{i}" for i in range(batch))),
            "index": torch.arange(batch),
            "input_ids": torch.from_numpy(np.stack([low, high, np.full(batch, COLON)], 1)),
            "hidden": torch.from_numpy(hidden),
        },
        batch_size=[batch],
    )


def answer(guess: Tensor, hidden: Tensor) -> Tensor:
    reply = torch.where(guess < hidden, HIGHER, torch.where(guess > hidden, LOWER, RIGHT))
    return torch.where(guess < NUMBERS, reply, NO_NUMBER)


def ruled_out(prompt: Tensor, guesses: Tensor, replies: Tensor) -> Tensor:
    """Share of the range's bits that the answers give: 0 knows nothing new, 1 knows the number.

    `prompt` is [3], `guesses` and `replies` are [sessions, turns].
    """
    low, high = prompt[0], prompt[1]
    above = torch.where(replies == HIGHER, guesses + 1, 0).amax(1).maximum(low)
    below = torch.where(replies == LOWER, guesses - 1, NUMBERS).amin(1).minimum(high)
    left = torch.where((replies == RIGHT).any(1), 1, below - above + 1)
    return 1 - left.log() / (high - low + 1).log()


def earned(prompt: Tensor, guesses: Tensor, replies: Tensor, partial_credit: float) -> Tensor:
    """The reward of each session: for the hidden number, and in part for what is ruled out."""
    won = (replies == RIGHT).any(1)
    return torch.lerp(won.float(), ruled_out(prompt, guesses, replies), partial_credit)


def reward(prompts, completions, hidden, partial_credit: float = 0.3) -> list[float]:
    """The rewards again, from tokens as they are dumped: ``rlskip rescore``."""
    found = []
    for prompt, said, number in zip(prompts, completions, hidden, strict=True):
        guesses = torch.tensor(said[::TURN])[None]
        replies = answer(guesses, torch.tensor(number))
        found.append(earned(torch.tensor(prompt), guesses, replies, partial_credit).item())
    return found


def best_success(cfg: DictConfig) -> float:
    """How often binary search wins: k guesses find any of 2**k - 1 numbers, and no more."""
    found = 2 ** (cfg.data.max_response_length // TURN) - 1
    sizes = range(cfg.game.min_range, cfg.game.max_range + 1)
    return sum(min(1.0, found / size) for size in sizes) / len(sizes)


# -- the policy ----------------------------------------------------------------------------

Cache = list[tuple[Tensor, Tensor]]  # keys and values [B, heads, past, width / heads], per block


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(
        self, x: Tensor, mask: Tensor, past: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        if past is not None:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        seen = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x)), (k, v)


class Policy(nn.Module):
    """A decoder-only transformer, pre-norm, its output layer tied to its token embedding."""

    def __init__(self, width: int, layers: int, heads: int, context: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(len(TOKENS), width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.register_buffer("causal", torch.ones(context, context, dtype=torch.bool).tril())
        nn.init.normal_(self.token.weight, std=0.1)
        nn.init.normal_(self.position.weight, std=0.1)
        # A pretrained model knows the order of the numbers; ours starts with a number line.
        waves = torch.outer(torch.arange(NUMBERS) / NUMBERS, torch.pi * torch.arange(1, 9))
        self.token.weight.data[:NUMBERS, :16] = 0.25 * torch.cat([waves.sin(), waves.cos()], 1)

    def forward(self, tokens: Tensor, cache: Cache | None = None) -> tuple[Tensor, Cache]:
        """Logits [B, T, vocabulary] of what follows each of `tokens` [B, T], and the new cache."""
        start = cache[0][0].shape[2] if cache else 0
        end = start + tokens.shape[1]
        x = self.token(tokens) + self.position.weight[start:end]
        grown: Cache = []
        for i, block in enumerate(self.blocks):
            x, kv = block(x, self.causal[start:end, :end], cache[i] if cache else None)
            grown.append(kv)
        return self.norm(x) @ self.token.weight.T, grown


def make_policy(cfg: DictConfig) -> Policy:
    context = cfg.data.max_prompt_length + cfg.data.max_response_length
    return Policy(**cfg.actor_rollout_ref.model, context=context)


# -- the rollouts --------------------------------------------------------------------------

# A matmul treats a row alike whatever rows are beside it, as long as its tiles are full. So a
# session's tokens and log-probs are the same, to the last bit, sampled alone or in any company.
LANES = 16


@torch.no_grad()
def play(
    policy: Policy, prompt: TensorDict, sessions: Sequence[int], cfg: DictConfig, step: int
) -> TensorDict:
    """Sample some `sessions` of one prompt: one row per turn, session by session.

    Row t of a session holds everything said before its turn t (that turn's prompt), then the
    guess (its response), padded on the right: so it is a prefix of row t + 1.
    """
    turns = cfg.data.max_response_length // TURN
    index, lanes = int(prompt["index"]), len(sessions) + -len(sessions) % LANES
    luck = torch.zeros(lanes, turns, 1)
    for lane, session in enumerate(sessions):
        rng = np.random.default_rng([cfg.seed, step, index, session])
        luck[lane, :, 0] = torch.from_numpy(rng.random(turns, dtype=np.float32))

    new, cache = prompt["input_ids"].expand(lanes, -1), None
    tokens, log_probs = new, torch.zeros(new.shape)
    over = torch.arange(lanes) >= len(sessions)
    played = torch.zeros(lanes, dtype=torch.int64)
    for turn in range(turns):
        logits, cache = policy(new, cache)
        scores = logits[:, -1].log_softmax(-1)
        # Inverse transform sampling: each session has its own numbers, however it is batched.
        guess = torch.searchsorted(scores.exp().cumsum(-1), luck[:, turn].contiguous(), right=True)
        guess = guess.clamp(max=len(TOKENS) - 1)
        reply = answer(guess, prompt["hidden"])
        new = torch.cat([guess, reply], 1)
        tokens = torch.cat([tokens, new], 1)
        log_probs = torch.cat([log_probs, scores.gather(1, guess), torch.zeros(lanes, 1)], 1)
        played += ~over
        over |= reply[:, 0] == RIGHT
        if over.all():
            break

    real = slice(len(sessions))
    length, width = tokens.shape[1], cfg.data.max_prompt_length + cfg.data.max_response_length
    tokens = F.pad(tokens[real], (0, width - length), value=PAD)
    log_probs = F.pad(log_probs[real], (0, width - length))
    said = tokens[:, -turns * TURN :].unflatten(1, (turns, TURN))
    won = (said[..., 1] == RIGHT).any(1)
    credit = cfg.game.partial_credit
    reward = earned(prompt["input_ids"], said[..., 0], said[..., 1], credit)

    # [sessions, turns, ...], of which the turns that were played are the rows
    turn = torch.arange(turns).expand(len(sessions), -1)
    exists, last = turn < played[real, None], turn == played[real, None] - 1
    at = (width - turns * TURN + TURN * turn)[..., None]  # where the turn's guess stands
    guessed, said_by_then = torch.arange(width) == at, torch.arange(width) <= at
    rows = {
        "input_ids": torch.where(said_by_then, tokens[:, None], PAD),
        "response_mask": guessed,
        "rollout_log_probs": torch.where(guessed, log_probs[:, None], 0.0),
        "rewards": torch.where(last, reward[:, None], 0.0),
        "success": last & won[:, None],
        "prompt": torch.full_like(turn, index),
        "hidden": prompt["hidden"].expand_as(turn),
        "session": torch.tensor(sessions)[:, None].expand(-1, turns),
        "turn": turn,
        "is_last_step": last,
    }
    return TensorDict({k: v[exists] for k, v in rows.items()}, batch_size=[int(exists.sum())])


class Player:
    """A worker of the dispatcher: plays one session with the weights that it loaded last."""

    def __init__(self, cfg: DictConfig) -> None:
        self.cfg, self.policy = cfg, make_policy(cfg)

    def load(self, weights: dict[str, Tensor]) -> None:
        self.policy.load_state_dict(weights)

    def __call__(self, prompt: TensorDict, sampling: dict, session: Session) -> list[dict]:
        rows = play(self.policy, prompt, [session.session_id], self.cfg, session.step)
        return [dict(row.items()) for row in rows]


def dispatch_rollouts(
    dispatcher: RolloutDispatcher, prompts: TensorDict, policy: Policy, step: int
) -> TensorDict:
    """The same rows from the dispatcher's workers, session by session; complete groups only."""
    dispatcher.broadcast("load", policy.state_dict())
    rows, _ = dispatcher.collect(prompts, step=step)
    rows = rows.exclude("uid", "session_id")  # the game's own columns name them
    # Rows come as jagged tensors; these all have one length.
    dense = {k: torch.stack(v.unbind()) if v.is_nested else v for k, v in rows.items()}
    return TensorDict(dense, rows.batch_size)


@SkipManager.annotate(role="rollout", rows={"prompt_group": "index"})
def generate_rollouts(
    prompts: TensorDict,
    policy: Policy,
    cfg: DictConfig,
    step: int,
    dispatcher: RolloutDispatcher | None,
) -> TensorDict:
    """All the rows of a step; a group is a batch, so that its sessions share the prompt."""
    if dispatcher is not None:
        return dispatch_rollouts(dispatcher, prompts, policy, step)
    sessions = range(cfg.actor_rollout_ref.rollout.n)
    return torch.cat([play(policy, prompt, sessions, cfg, step) for prompt in prompts])


def fold_turns(rows: TensorDict, config: MergeConfig) -> tuple[TensorDict, MergeReport]:
    """The turns of a session as one row where `config` says so; other fields are the last's."""
    if not config.stepwise_output:
        return rows, MergeReport()
    width, at = rows["input_ids"].shape[1], rows["response_mask"].int().argmax(1).tolist()

    def cut(name: str, guess: bool = True) -> Tensor:
        """Each row's guess, or the part before it, as a jagged tensor."""
        cuts = zip(rows[name], at, strict=True)
        parts = [row[i : i + 1] if guess else row[:i] for row, i in cuts]
        return torch.nested.nested_tensor(parts, layout=torch.jagged)

    whole = rows.exclude("input_ids", "response_mask", "rollout_log_probs").update(
        {
            "prompt_token_ids": cut("input_ids", guess=False),
            "response_ids": cut("input_ids"),
            "loss_masks": cut("response_mask"),
            "rollout_logprobs": cut("rollout_log_probs"),
            "trajectory_ids": rows["prompt"] * (1 + rows["session"].max()) + rows["session"],
        }
    )
    whole, _, report = merge(whole, config)
    prompts = whole["prompt_token_ids"].unbind()

    def pad(heads: Sequence[Tensor], name: str, value: float) -> Tensor:
        tails = whole[name].unbind()
        both = [torch.cat([head, tail]) for head, tail in zip(heads, tails, strict=True)]
        return torch.stack([F.pad(row, (0, width - len(row)), value=value) for row in both])

    nothing = [torch.zeros_like(prompt, dtype=torch.float32) for prompt in prompts]
    rows = whole.select("rewards", "success", "prompt", "session", "turn", "is_last_step")
    rows["input_ids"] = pad(prompts, "response_ids", PAD)
    rows["response_mask"] = pad(nothing, "loss_masks", 0).bool()
    rows["rollout_log_probs"] = pad(nothing, "rollout_logprobs", 0)
    return rows, report


# -- the update ----------------------------------------------------------------------------


def advantages(rows: TensorDict, prompts: int, n: int) -> Tensor:
    """What each row's session earned above its group, in the group's standard deviations."""
    session = rows["prompt"], rows["session"]
    earned = torch.zeros(prompts, n).index_put_(session, rows["rewards"], accumulate=True)
    above = earned - earned.mean(1, keepdim=True)
    return (above / (earned.std(1, keepdim=True) + 1e-6))[session]


def update(
    policy: Policy, optimizer: torch.optim.Adam, rows: TensorDict, cfg: DictConfig, step: int
) -> dict[str, float]:
    """Clipped policy loss over the step's rows; returns its figures, means over mini-batches."""
    actor, n = cfg.actor_rollout_ref.actor, cfg.actor_rollout_ref.rollout.n
    advantage = advantages(rows, cfg.data.train_batch_size, n)
    record("advantages", advantage, rows=rows)
    # A group whose sessions all earned the same has nothing to say.
    rows, advantage = rows[advantage != 0], advantage[advantage != 0]
    rng = np.random.default_rng([cfg.seed, step])
    figures = []
    for _ in range(actor.ppo_epochs):
        for pick in torch.from_numpy(rng.permutation(len(rows))).split(actor.ppo_mini_batch_size):
            batch = rows[pick]
            # The logits at a position are about the token after it. Padding is on the right,
            # where causal attention does not look, so no other mask is needed.
            tokens, sampled = batch["input_ids"], batch["response_mask"][:, 1:]
            scores = policy(tokens[:, :-1])[0][sampled].log_softmax(-1)
            log_prob = scores.gather(1, tokens[:, 1:][sampled][:, None])[:, 0]
            record("log_probs", log_prob, rows=batch)
            gain = advantage[pick][:, None].expand(sampled.shape)[sampled]
            ratio = (log_prob - batch["rollout_log_probs"][:, 1:][sampled]).exp()
            clipped = ratio.clamp(1 - actor.clip_ratio, 1 + actor.clip_ratio)
            loss = -torch.minimum(gain * ratio, gain * clipped).mean()
            record("loss", loss)
            entropy = -(scores.exp() * scores).sum(-1).mean()
            optimizer.zero_grad()
            (loss - actor.entropy_coeff * entropy).backward()
            grad_norm = nn.utils.clip_grad_norm_(policy.parameters(), actor.grad_clip)
            record("grad_norm", grad_norm)
            optimizer.step()
            share = (ratio != clipped).float().mean()
            figures.append([loss.item(), entropy.item(), share.item()])
    means = np.mean(figures, 0).tolist() if figures else [float("nan")] * 3
    return dict(zip(["loss", "entropy", "clip_share"], means, strict=True))


# -- the picture ---------------------------------------------------------------------------


def plot(history: list[dict[str, float]], best: float, file: Path) -> None:
    """Success over the steps, between what the untrained policy and the best player reach."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    steps = [row["step"] for row in history]
    success = np.array([row["success"] for row in history])
    window = min(9, len(success))
    smooth = np.convolve(
        np.pad(success, (window - 1, 0), "edge"), np.ones(window) / window, "valid"
    )
    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    axes.plot(steps, success, color="#9cc3e6", linewidth=1)
    axes.plot(steps, smooth, color="#1f6fb4", linewidth=2.2)
    for level, name in ((best, "best possible player"), (success[0], "untrained")):
        axes.axhline(level, color="0.6", linewidth=1, linestyle=(0, (4, 3)))
        axes.annotate(
            f"{name}  {level:.2f}", (1, level), xycoords=("axes fraction", "data"), color="0.35",
            xytext=(-4, 4), textcoords="offset points", ha="right", fontsize=9,
        )  # fmt: skip
    axes.annotate(
        f"policy  {smooth[-1]:.2f}", (steps[-1], smooth[-1]), color="#1f6fb4", fontsize=10,
        xytext=(-4, -16), textcoords="offset points", ha="right", fontweight="bold",
    )  # fmt: skip
    axes.set(
        xlabel="training step", ylabel="games won", ylim=(0, 1.06), xlim=(1, max(2, len(steps)))
    )
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title("GRPO finds the hidden number", loc="left", fontsize=11)
    figure.savefig(file, dpi=150)
    plt.close(figure)


# -- the loop ------------------------------------------------------------------------------


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(cfg: DictConfig) -> None:
    torch.set_num_threads(cfg.threads)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(cfg.seed)
    policy = make_policy(cfg)
    dispatcher = None
    numbers = range(1, cfg.trainer.total_training_steps + 1)
    # Workers are this trainer's inference engine: a run of replays alone needs none.
    if "dispatch" in cfg and not SkipManager.will_replay("rollout", numbers):
        store = SkipManager.store("rollout")
        dispatcher = RolloutDispatcher.from_config(cfg, partial(Player, cfg), store=store)
    optimizer = torch.optim.Adam(policy.parameters(), lr=cfg.actor_rollout_ref.actor.optim.lr)
    output, best = Path(HydraConfig.get().runtime.output_dir), best_success(cfg)
    sessions = cfg.data.train_batch_size * cfg.actor_rollout_ref.rollout.n
    merge_config = read_merge(cfg)
    history: list[dict[str, float]] = []
    log.info(
        "won: share of the games; the best possible player wins %.3f. loss: of the update. e.g.: a "
        "game. `3 14: 9- 5+ 7=` hides a number from 3 to 14; each guess is too high (-), too low "
        "(+), right (=) or no number (?)",
        best,
    )
    steps = tqdm(numbers, unit="step", disable=None)  # no bar in a file
    with (
        logging_redirect_tqdm(),
        dispatcher or nullcontext(),
        (output / "metrics.jsonl").open("w") as metrics,
    ):
        for step in steps:
            SkipManager.set_step(step)
            prompts = draw_prompts(cfg, step)
            start = time.perf_counter()
            rows = generate_rollouts(prompts, policy, cfg, step, dispatcher)
            rolled_out = time.perf_counter()
            train_rows, report = fold_turns(rows, merge_config)
            figures = update(policy, optimizer, train_rows, cfg, step)
            updated = time.perf_counter()
            history.append(
                {
                    "step": step,
                    "success": rows["success"].sum().item() / sessions,
                    "reward": rows["rewards"].sum().item() / sessions,
                    "turns": len(rows) / sessions,
                    **figures,
                    **report,
                    "time/rollout_s": rolled_out - start,
                    "time/update_s": updated - rolled_out,
                }
            )
            metrics.write(json.dumps(history[-1]) + "\n")
            metrics.flush()
            game = "".join(TOKENS[token] for token in rows["input_ids"][rows["is_last_step"]][0])
            log.info(
                "step %3d  won %.3f  loss %+.4f  e.g.%s",
                step, history[-1]["success"], figures["loss"], game,
            )  # fmt: skip
    plot(history, best, output / "learning_curve.png")
    log.info("metrics and learning curve in %s", output)


if __name__ == "__main__":
    main()
