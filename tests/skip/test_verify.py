"""Action `verify`: the stage runs although a dump fits, and what it returns is compared with it."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from rlskip import SkipManager, register_skip
from rlskip.batch.columns import rows_of, select
from rlskip.batch.row_fields import RowFields
from rlskip.jobs.records import tally
from rlskip.jobs.verified import Verified
from rlskip.skip import SKIP_REGISTRY
from rlskip.skip.roles import RolloutSkip
from rlskip.skip.verifying import compare
from tests.skip.test_ranks import run, start
from tests.skip.trainers import visit

Init = Callable[..., Path]


def rollouts(prompts: torch.Tensor, upgraded: bool = False) -> dict[str, Any]:
    """Two rows a prompt, of 1 to 4 tokens; an upgraded engine samples another token in row 1."""
    ids = prompts.repeat_interleave(2, 0)
    n = len(ids)
    real = torch.arange(4) <= (torch.arange(n) % 4)[:, None]
    responses = torch.where(real, ids.sum(1, keepdim=True) + torch.arange(4) + 1, 0)
    log_probs = torch.where(real, -responses / 100.0, 0.0)
    if upgraded:
        responses[1, 1] = 7
        log_probs[0, 0] -= 0.25
        log_probs[1, 1] = -9.0  # of another token
    return {
        "prompts": ids,
        "responses": responses,
        "response_mask": real.long(),
        "attention_mask": torch.cat([torch.ones_like(ids), real], 1),
        "rollout_log_probs": log_probs,
    }


class Engine:
    """A stage of each kind; what it was called for."""

    def __init__(self, upgraded: bool = False) -> None:
        self.upgraded = upgraded
        self.calls: list[int] = []

    def _run(self, prompts: dict[str, Any]) -> dict[str, Any]:
        self.calls.append(int(prompts["ids"][0, 0]))
        return rollouts(prompts["ids"], self.upgraded)

    generate = SkipManager.annotate(role="rollout", stage="g", rows={"n": 2})(_run)
    validate = SkipManager.annotate(role="rollout_val", stage="g")(_run)
    own = SkipManager.annotate(role="own", stage="g")(_run)

    @SkipManager.annotate(role="rollout", stage="g", rows={"n": 2})
    async def generate_async(self, prompts: dict[str, Any]) -> dict[str, Any]:
        return self._run(prompts)

    @SkipManager.annotate(role="rollout", stage="g", rows={"n": 2})
    def generate_later(self, prompts: dict[str, Any]) -> Any:
        async def later() -> dict[str, Any]:
            return self._run(prompts)

        return later()

    def at(self, step: int, *calls: int, stage: str = "generate", **more: Any) -> list[Any]:
        visit(step)
        return [getattr(self, stage)(prompts(first, **more)) for first in calls or (step,)]


def prompts(first: int, **more: Any) -> dict[str, Any]:
    return {"ids": torch.tensor([[first, 2], [first, 3]]), **more}


def verified(dumps: Path, role: str = "rollout") -> Verified:
    return tally({role: str(dumps)}, "job")[role].verified


def is_dumped(got: dict[str, Any], first: int) -> bool:
    return bool(torch.equal(got["responses"], rollouts(prompts(first)["ids"])["responses"]))


UPGRADED = Verified(
    calls=1, rows=4, same=3, rows_then=4, rows_now=4, tokens_then=10, tokens_now=10,
    log_probs=9, log_prob_sum=0.25, log_prob_gap=0.25,
    first="row 1, token 3: 5 in the dump, 7 now",
)  # fmt: skip


@pytest.mark.parametrize("stage", ["generate", "generate_async", "generate_later"])
@pytest.mark.parametrize(
    "how", [{}, {"background_write": True}, {"match": "run"}, {"match": "prompt"}], ids=str
)
def test_training_goes_on_with_the_dump(
    init: Init, how: dict[str, Any], stage: str, caplog: pytest.LogCaptureFixture
) -> None:
    def call(engine: Engine, step: int) -> dict[str, Any]:
        (got,) = engine.at(step, 1, stage=stage)
        return got if stage == "generate" else asyncio.run(_await(got))

    dumps = init(**how)
    call(Engine(), 1)
    SkipManager.flush()
    step = 5 if "match" in how else 1
    for engine in (Engine(), Engine(upgraded=True)):
        init(action="verify", **how)
        caplog.clear()
        assert is_dumped(call(engine, step), 1)
        assert engine.calls == [1]
        loud = [line.levelname for line in caplog.records if "verified" in line.message]
        assert loud == (["WARNING"] if engine.upgraded else [])
    found = verified(dumps)
    same = Verified(calls=1, rows=4, same=4, rows_then=4, rows_now=4,
                    tokens_then=10, tokens_now=10, log_probs=10)  # fmt: skip
    assert found.log_prob_sum == pytest.approx(0.25)
    together = same + UPGRADED
    for name in ("calls", "rows", "same", "tokens_then", "tokens_now", "log_probs", "first"):
        assert getattr(found, name) == getattr(together, name), name
    counts = tally({"rollout": str(dumps)}, "job")["rollout"]
    assert (counts.hits, counts.misses, counts.seconds_saved) == (2, 1, 0.0)


async def _await(coroutine: Any) -> Any:
    return await coroutine


def test_what_has_no_dump_is_cached(init: Init) -> None:
    """A job that was killed, say: its last step has one call, and the next step none."""
    dumps = init(action="verify")
    Engine().at(1, 10, 11)
    Engine().at(2, 20)
    assert verified(dumps) == Verified()
    init(action="verify")
    engine = Engine()
    engine.at(1, 11, 10)
    engine.at(2, 20, 21)
    engine.at(3)
    assert engine.calls == [11, 10, 20, 21, 3]
    assert verified(dumps).calls == 3
    init()
    replayed = Engine()
    for step, calls in {1: (10, 11), 2: (20, 21), 3: (3,)}.items():
        replayed.at(step, *calls)
    assert replayed.calls == []


def test_validation_is_verified_too(init: Init) -> None:
    def job() -> Engine:
        engine = Engine()
        for step in (0, 1):
            engine.at(step, 7, stage="validate", validate=True)
            engine.at(step)
        return engine

    init(validation="replay")
    job()
    dumps = init(validation="replay", action="verify")
    assert job().calls == [7, 0, 7, 1]
    assert (verified(dumps).calls, verified(dumps, "rollout_val").same) == (2, 8)
    init(validation="replay", own={"action": "verify"})
    assert job().calls == [0, 1]


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_a_share_of_calls_is_chosen_by_content(init: Init, share: float) -> None:
    init()
    Engine().at(1, *range(16))
    chosen = []
    for _ in range(2):
        init(action="verify", verify_share=share)
        engine = Engine()
        engine.at(1, *range(15, -1, -1))
        chosen.append({*engine.calls})
    assert chosen[0] == chosen[1]
    assert {0.0: 0, 1.0: 16}.get(share, len(chosen[0])) == len(chosen[0])
    assert share != 0.5 or 3 < len(chosen[0]) < 13


@pytest.mark.parametrize("restore", [True, False])
def test_the_generators_are_those_of_the_dump(init: Init, restore: bool) -> None:
    class Sampling(Engine):
        @SkipManager.annotate(role="rollout", stage="s")
        def generate(self, prompts: dict[str, Any]) -> dict[str, Any]:
            return {"value": torch.rand(1)}

    states = []
    for action in ("cache", "verify"):
        init(action=action, restore_rng=restore)
        torch.manual_seed(len(states))
        Sampling().at(1)
        states.append(torch.rand(1).item())
    assert (states[0] == states[1]) is restore


def test_what_has_changed_is_named(init: Init) -> None:
    def job(action: str, host: dict[str, Any]) -> None:
        SkipManager.init({**host, "skip": {
            "dump_dir": str(dumps), "action": action, "on_mismatch": "ignore",
            "rollout": {"enable": True},
        }})  # fmt: skip
        Engine().at(1)

    dumps = init()

    def config(seed: int, temperature: float, engine: str) -> dict[str, Any]:
        of_rollout = {"seed": seed, "temperature": temperature, "name": engine}
        return {"actor_rollout_ref": {"rollout": of_rollout}}

    job("cache", config(1, 1.0, "vllm"))
    job("verify", config(2, 0.5, "sglang"))
    said = ", ".join(verified(dumps).changed)
    for text in ("temperature: 0.5 now, 1.0 in the dump", "seed (1 then, 2 now)", "'sglang'"):
        assert text in said


def test_what_cannot_be_compared_costs_a_warning(
    init: Init, caplog: pytest.LogCaptureFixture
) -> None:
    lacks: list[str] = []

    @SkipManager.annotate(role="rollout", rows={"response": "answers"})
    def generate(prompts: list[int]) -> dict[str, Any]:
        return {name: [[1, 2]] for name in ("answers", "others") if name not in lacks}

    for action in ("cache", "verify"):
        init(action=action)
        visit(1)
        assert generate([1]) == {"answers": [[1, 2]], "others": [[1, 2]]}
        lacks.append("answers")
    assert "could not be compared with its dump, which is replayed" in caplog.text


# -- roles of the user's own -------------------------------------------------------------------


def test_a_role_without_tokens_is_compared_by_value(init: Init) -> None:
    bonus = [0.0]

    @SkipManager.annotate(role="reward")
    def score(prompts: list[int]) -> list[dict[str, float]]:
        return [{"score": p + bonus[0] * (p == 2), "uid": bonus[0]} for p in prompts]

    for action, bonus[0] in (("cache", 0.0), ("verify", 1.0)):
        dumps = init("reward", action=action)
        visit(1)
        assert [row["score"] for row in score([1, 2, 3])] == [1.0, 2.0, 3.0]
    found = verified(dumps, "reward")
    assert (found.rows, found.same, found.first) == (3, 2, "row 1: score")


@pytest.mark.parametrize(
    "made",
    [
        {"responses": [[[1, 2], [3, 4, 5]]] * 2, "rewards": [[1.0, 0.0]] * 2},
        {"responses": [[1, 2], [3]], "rollout_log_probs": [[[-1.0], [-2.0, -3.0]], [[-1.0]]]},
    ],
)
def test_lists_of_unequal_length_are_compared(
    init: Init, caplog: pytest.LogCaptureFixture, made: dict[str, Any]
) -> None:
    @SkipManager.annotate(role="rollout")
    def generate(prompts: list[str]) -> dict[str, Any]:
        return {"prompts": prompts, **made}

    for action in ("cache", "verify"):
        dumps = init(action=action)
        visit(1)
        assert generate(["a", "b"]) == {"prompts": ["a", "b"], **made}
    assert "could not be compared" not in caplog.text
    found = verified(dumps)
    assert (found.rows, found.same) == (2, 2)


def test_a_subclass_of_rollout_skip_verifies(init: Init) -> None:
    @register_skip("own")
    class Own(RolloutSkip): ...

    try:
        init("own")
        Engine().at(1, stage="own")
        dumps = init("own", action="verify")
        assert is_dumped(Engine(upgraded=True).at(1, stage="own")[0], 1)
        assert verified(dumps, "own").same == 3
    finally:
        del SKIP_REGISTRY["own"]


# -- ranks -------------------------------------------------------------------------------------


def _verifying(rank: int, folder: str, action: str) -> None:
    role = start(folder, action=action, verify_share=0.5)
    made = []

    @SkipManager.annotate(role="rollout")
    def generate(prompts: str) -> dict[str, Any]:
        dist.barrier()  # a rank that generated alone would hang here
        made.append(prompts)
        return {"rank": rank, "of": prompts, "value": torch.tensor([rank + len(action)])}

    for step in range(12):
        SkipManager.set_step(step)
        got = generate(f"{step} of rank {rank}")
        assert got["value"].item() == rank + len("cache")
    assert role.ranks.group.world_size == 2
    Path(folder, f"{action}-{rank}").write_text(json.dumps([text.split()[0] for text in made]))


def test_ranks_verify_the_same_calls(tmp_path: Path) -> None:
    for action in ("cache", "verify"):
        run(tmp_path, _verifying, action)
    made = [json.loads((tmp_path / f"verify-{rank}").read_text()) for rank in (0, 1)]
    assert made[0] == made[1]
    assert 0 < len(made[0]) < 12
    assert verified(tmp_path / "dumps").calls == 2 * len(made[0])


# -- the comparison itself -----------------------------------------------------------------------

FIELDS = RowFields.of(rollouts(torch.ones(1, 2, dtype=torch.long)))


def _moved(batch: dict[str, Any]) -> dict[str, Any]:
    return select(batch, [3, 1, 2, 0])  # type: ignore[no-any-return]


def _padded(batch: dict[str, Any]) -> dict[str, Any]:
    pad = torch.nn.functional.pad
    return {
        **{name: pad(batch[name], (0, 3)) for name in batch if name != "prompts"},
        "prompts": batch["prompts"],
    }


def _ragged(batch: dict[str, Any]) -> dict[str, Any]:
    lengths = batch["response_mask"].sum(1).tolist()
    names = ("responses", "response_mask", "rollout_log_probs")
    cut = {k: [row[:n].tolist() for row, n in zip(batch[k], lengths, strict=True)] for k in names}
    return {**cut, "prompts": batch["prompts"].tolist()}


@pytest.mark.parametrize("change", [_moved, _padded, _ragged, rows_of])
@pytest.mark.parametrize("upgraded", [False, True])
def test_rows_are_found_wherever_they_are(change: Any, upgraded: bool) -> None:
    ids = torch.tensor([[5, 2], [5, 3]])
    now = change(rollouts(ids, upgraded))
    if change is rows_of:
        now = [{k: np.asarray(v) for k, v in row.items()} for row in now]
    found = compare(rollouts(ids), now, FIELDS)
    assert (found.rows, found.same, found.tokens_now) == (4, 3 if upgraded else 4, 10)
    assert found.log_probs == (9 if upgraded else 10)
    assert found.log_prob_gap == pytest.approx(0.25 if upgraded else 0.0, abs=1e-7)
    assert found.first == ("row 1, token 3: 9 in the dump, 7 now" if upgraded else "")


@pytest.mark.parametrize(
    ("rows", "same", "first"),
    [
        ([0, 1, 2], 3, "row 3: the stage returned no such row"),
        ([0, 1, 2, 3, 3], 4, "the dump has no counterpart of row 4"),
        ([1, 1, 2, 3], 3, "row 0, token 3: the end in the dump, 9 now"),
    ],
)
def test_rows_that_only_one_side_has(rows: list[int], same: int, first: str) -> None:
    batch = rollouts(torch.tensor([[5, 2], [5, 3]]))
    found = compare(batch, select(batch, rows), FIELDS)
    assert (found.same, found.rows) == (same, max(4, len(rows)))
    assert found.first == first


def test_the_sentence() -> None:
    said = str(Verified(calls=1) + UPGRADED + Verified(changed=("torch: 2.6 now",)))
    assert said == (
        "2 calls verified: 3 of 4 rows are equal; the first difference: row 1, token 3: 5 in the "
        "dump, 7 now; log-probs of equal tokens differ by 0.02778 on average, by at most 0.25; a "
        "response has 2.5 tokens in the dump, 2.5 now; changed since: torch: 2.6 now"
    )


def test_a_forged_record_counts_nothing() -> None:
    assert Verified.of({"calls": "3", "rows": 2.5, "changed": 1, "first": None}) == Verified()


def test_the_log_names_step_and_role(init: Init, caplog: pytest.LogCaptureFixture) -> None:
    init()
    Engine().at(4)
    init(action="verify")
    with caplog.at_level(logging.INFO):
        Engine().at(4)
    assert "role rollout: step 4: 1 call verified: 4 of 4 rows are equal" in caplog.text
