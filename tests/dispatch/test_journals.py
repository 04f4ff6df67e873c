"""The journals of a run: a killed step resumes, whoever writes the rows and journals them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

from rlskip.config.nodes import read_node
from rlskip.config.other_nodes import DispatchConfig
from rlskip.dispatch import LocalPool, RolloutDispatcher
from rlskip.dispatch.sink import Journals, journal_identity
from rlskip.jobs.served import forget_served
from rlskip.keys import split_session, split_trajectory
from rlskip.queue import MemoryQueue
from rlskip.store import Identity, StepStore
from tests.dispatch.conftest import evict

N = 4
CONFIG = read_node(DispatchConfig, {"dispatch": {"rollout_level": True, "n": N, "journal": True}})
IDENTITY = Identity.of(
    {"role": "rollout_tq", "stage": "verl.submit", "verl": "0.9.1"}, {"model": "one"}
)


@attrs.define
class Run:
    """A process of a run: its queue, its journals, and the sessions that it generated."""

    directory: Path
    identity: Identity = IDENTITY
    max_span: int | None = 1
    config: Any = CONFIG
    weights: int | None = None  # that sample; None: those of the step before
    stop_at: int = 10**6  # sessions from this number on fail
    returns: bool = False  # whether workers return their rows, or write them as verl's do
    queue: MemoryQueue = attrs.field(factory=MemoryQueue)
    ran: list[tuple[str, int]] = attrs.field(factory=list)

    def __attrs_post_init__(self) -> None:
        forget_served()  # the one before has ended

    def journals(self) -> Journals:
        identity = journal_identity(self.identity, self.config)
        store = StepStore(self.directory)
        return Journals(store, identity, self.queue, self.max_span)

    def submit(self, *batches: list[dict[str, Any]], step: int | None = 3) -> list[Any]:
        """Generate batches one after the other, of one step or of the steps that they name."""
        journals = self.journals()
        journal = journals.writer

        async def worker(prompt: Any, sampling: Any, session: Any) -> Any:
            if len(self.ran) >= self.stop_at:
                raise ValueError("the run ends here")
            self.ran.append((session.uid, session.session_id))
            weights = session.step - 1 if self.weights is None else self.weights
            rows = [{"responses": torch.tensor([session.session_id]), **prompt}]
            span = {"min_global_steps": weights, "max_global_steps": weights}
            tags = [session.tag(seq_len=7, **span)]
            if self.returns:
                return rows
            await journal.add(session, rows, tags)
            self.queue.put([session.key(0)], session.partition, rows, tags)
            return None

        def generate(batch: list[dict[str, Any]]) -> Any:
            evict(self.queue, [prompt["uid"] for prompt in batch])  # of an earlier one
            return dispatcher.submit(batch, step=step).result()

        pool = LocalPool(worker, 1)
        with RolloutDispatcher(pool, self.queue, self.config, journals=journals) as dispatcher:
            return [generate(batch) for batch in batches]


def prompts(*numbers: int, step: int = 3, of: str = "u") -> list[dict[str, Any]]:
    return [
        {"uid": f"{of}{i}", "input_ids": torch.full((3,), number), "global_steps": step}
        for i, number in enumerate(numbers)
    ]


def killed(directory: Path, *numbers: int, ran: int, **more: Any) -> Run:
    """A run that ended after `ran` sessions."""
    run = Run(directory, stop_at=ran, **more)
    run.submit(prompts(*numbers))
    assert len(run.ran) == ran
    return run


@pytest.mark.parametrize("returns", [False, True])
def test_the_next_run_generates_what_is_missing(tmp_path: Path, returns: bool) -> None:
    killed(tmp_path, 1, 2, ran=5, returns=returns)
    again = Run(tmp_path, returns=returns)
    (report,) = again.submit(prompts(1, 2, of="v"))
    assert (report.resumed, len(again.ran), report.failed) == (5, 2 * N - 5, {})
    listing = again.queue.list("train")
    assert sorted(filter(None, map(split_session, listing))) == [
        (uid, i) for uid in ("v0", "v1") for i in range(N)
    ]
    rows = [key for key in listing if split_trajectory(key)]
    assert len(rows) == 2 * N
    assert returns or all(listing[key]["seq_len"] == 7 for key in rows)
    fields = again.queue.get(rows, "train")
    assert list(fields["uid"]) == [key.rsplit("_", 2)[0] for key in rows]
    assert [int(r[0]) for r in fields["responses"]] == [split_trajectory(k)[1] for k in rows]
    size = (tmp_path / "3.journal").stat().st_size
    (report,) = Run(tmp_path, returns=returns).submit(prompts(1, 2))
    assert (report.resumed, report.attempts) == (2 * N, 0)
    assert (tmp_path / "3.journal").stat().st_size == size, "each session is journaled once"


@pytest.mark.parametrize("returns", [False, True])
def test_a_run_resumes_nothing_of_its_own(tmp_path: Path, returns: bool) -> None:
    """Under one uid or another, also after many later steps; the next run resumes each batch."""
    again, others = prompts(1), [prompts(1, step=step, of=f"{step}-") for step in range(10, 20)]
    batches = [again, again, prompts(1, of="v"), again]
    first = Run(tmp_path, returns=returns)
    assert [r.resumed for r in first.submit(*batches, *others, again, step=None)] == [0] * 15
    second = Run(tmp_path, returns=returns)
    resumed = [r.resumed for r in second.submit(*batches, again, *others, again, step=None)]
    assert resumed == [N] * 4 + [0] + [N] * 10 + [0]
    assert [r.resumed for r in Run(tmp_path).submit(*batches, again)] == [N] * 5


@pytest.mark.parametrize(
    ("weights", "max_span", "resumed"),
    [
        (2, 1, True), (1, 1, False), (1, 2, True), (0, 2, False), (0, None, True),
        (3, 1, False), (3, None, False),
    ],
)  # fmt: skip
def test_sessions_of_other_weights(
    tmp_path: Path, caplog: Any, weights: int, max_span: int | None, resumed: bool
) -> None:
    killed(tmp_path, 1, ran=N, weights=weights)
    caplog.clear()
    (report,) = Run(tmp_path, max_span=max_span).submit(prompts(1))
    assert report.resumed == N * resumed
    told = [r.message for r in caplog.records if "not resumed" in r.message]
    assert len(told) == (not resumed)
    if not resumed:
        assert f"{N} sessions are not resumed: weights of step {weights} sampled them" in told[0]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"identity": attrs.evolve(IDENTITY, noted={"model": "another"})}, "model: 'another' now"),
        ({"identity": IDENTITY.adding({"stage": "another"})}, "stage"),
        ({"identity": IDENTITY.adding({"verl": "0.9.2"})}, "verl: '0.9.2' now, '0.9.1' in the"),
        ({"identity": IDENTITY.adding({"sampling.top_k": 3})}, "sampling.top_k"),
        ({"config": dataclasses.replace(CONFIG, n=2)}, "n: 2 now, 4 in the dump"),
        ({"config": dataclasses.replace(CONFIG, seed=1)}, "dispatch.seed"),
        ({"config": dataclasses.replace(CONFIG, sampling={"top_p": 0.5})}, "sampling.top_p"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_journal_of_other_conditions_says_so_and_of_another_model_only_is_resumed(
    tmp_path: Path, caplog: Any, change: dict[str, Any], named: str
) -> None:
    killed(tmp_path, 1, ran=N)
    caplog.clear()
    resumed, said = (N, "was resumed") if "model" in named else (0, "holds sessions of another run")
    assert [r.resumed for r in Run(tmp_path, **change).submit(prompts(1))] == [resumed]
    (told,) = [r.message for r in caplog.records if said in r.message]
    assert named in told
    (again,) = Run(tmp_path, **change).submit(prompts(1))
    assert again.resumed == again.sessions


def test_a_journal_of_other_prompts_is_named_once(tmp_path: Path, caplog: Any) -> None:
    killed(tmp_path, 1, ran=N)
    caplog.clear()
    reports = Run(tmp_path).submit(prompts(7), prompts(8, of="v"))
    assert [r.resumed for r in reports] == [0, 0]
    told = [r.message for r in caplog.records if "not resumed" in r.message]
    assert len(told) == 1
    assert f"3.journal: {N} sessions are not resumed: they are of other prompts" in told[0]
