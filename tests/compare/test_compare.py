"""`rlskip compare`: rows are found wherever they are, and the first difference is named."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import rlskip as package
from rlskip._human import counted
from rlskip.compare.rounding import Rounding
from rlskip.compare.sides import Side, compare_sides
from rlskip.compare.verdict import Comparison, Place, StageResult
from rlskip.config.steps import Steps
from rlskip.stages.parts import MOMENTS
from rlskip.store import StepStore
from rlskip.testing import assert_same_training

Batch = dict[str, torch.Tensor]
N, PROMPT, RESPONSE = 12, 3, 6


def rows(step: int = 1) -> Batch:
    """Rows of 4 prompts, three sessions each; row i has 1 + i % 6 tokens."""
    made = torch.Generator().manual_seed(step)
    real = torch.arange(RESPONSE) <= (torch.arange(N) % RESPONSE)[:, None]
    prompts = torch.randint(1, 90, (4, PROMPT), generator=made).repeat_interleave(3, 0)
    responses = torch.randint(1, 90, (N, RESPONSE), generator=made)
    return {
        "prompts": prompts,
        "responses": torch.where(real, responses, 0),
        "attention_mask": torch.cat([torch.ones_like(prompts), real], 1),
        "response_mask": real.long(),
        "session": torch.arange(3).repeat(4),
    }


def log_probs(step: int = 1) -> torch.Tensor:
    return -torch.rand(N, RESPONSE, generator=torch.Generator().manual_seed(step + 100))


def compared(a: Side, b: Side, **tolerance: float) -> Comparison:
    return compare_sides(a, b, Rounding(**tolerance), Steps.parse("all"))


def first_of(found: Comparison) -> tuple[StageResult, Place]:
    """The first stage that differs, and where."""
    assert found.first is not None
    assert found.first.at is not None
    return found.first, found.first.at


def train(step: int, change: Callable[[torch.Tensor], torch.Tensor] = lambda x: x) -> None:
    batch, values = rows(step), log_probs(step)
    package.record("advantages", values.sum(1), rows=batch)
    package.record("log_probs", change(values) if step == 2 else values, rows=batch)
    package.record("loss", change(values).mean() if step == 2 else values.mean())


def moved(step: int, *, parts: int = 1, pad: int = 0, by: str = "response") -> None:
    """What `train` records, with the rows in another order, other batches and other padding."""
    batch, values = rows(step), log_probs(step)
    order = torch.randperm(N, generator=torch.Generator().manual_seed(3))
    package.record("advantages", values.sum(1)[order], rows={k: v[order] for k, v in batch.items()})
    for pick in order.split(N // parts):
        some = {k: v[pick] for k, v in batch.items()}
        value = values[pick]
        if pad:
            value = torch.nn.functional.pad(value, (0, pad), value=7.0)
            for name in ("responses", "attention_mask", "response_mask"):
                some[name] = torch.nn.functional.pad(some[name], (0, pad))
        if by == "sampled":
            value = value[some["response_mask"].bool()]
        package.record("log_probs", value, rows=some)
    package.record("loss", values.mean())


@pytest.mark.parametrize("values", ["all", "digest"])
@pytest.mark.parametrize(
    "how", [{}, {"parts": 4}, {"pad": 5}, {"parts": 3, "pad": 1, "by": "sampled"}]
)
def test_moved_rows_are_the_same_rows(
    job_of: Callable[..., Side], how: dict[str, Any], values: str
) -> None:
    a = job_of("a", train, values=values)
    b = job_of("b", lambda step: moved(step, **how), values=values)
    found = compared(a, b)
    assert found.is_equal, found.verdict()
    assert {(one.stage, one.state) for one in found.stages} == {
        (stage, "equal") for stage in ("rollouts", "mask", "advantages", "log_probs", "loss")
    }
    assert found.verdict() == "equal to the bit: 3 stages of steps 1,2"


def test_the_verdict_comes_first_and_what_is_equal_or_follows_is_folded(
    job_of: Callable[..., Side], rlskip: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def long(step: int) -> None:
        train(step)
        for i in range(9):
            package.record(f"more{i}", torch.ones(3) * i)

    def changed(step: int) -> None:
        train(step, planted((5, 3), -3.0))
        for i in range(9):
            package.record(f"more{i}", torch.ones(3) * (i + (step == 2)))

    a, b = job_of("a", long), job_of("b", changed)
    monkeypatch.setenv("COLUMNS", "160")
    said = rlskip("compare", a.directory, b.directory)
    lines = said.out.splitlines()
    assert (said.code, len(lines) < 20) == (1, True), said.out
    assert lines[0].startswith("Log_probs differs first, at step 2")
    (equal,) = (line for line in lines if "rollouts, mask, advantages, 11 more" in line)
    (follows,) = (line for line in lines if "loss, more0, more1, 7 more" in line)
    assert (equal.split()[0], "equal to" in equal) == ("1,2", True)
    assert "differs," in follows
    assert "8 sqrt(n) u max(|a|, |b|, scale" in lines[-1]
    given = rlskip("compare", a.directory, b.directory, "--rtol", 5).out
    assert "|a - b| <= 0 + 5 max(|a|, |b|)" in given


def planted(at: tuple[int, int], value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(values: torch.Tensor) -> torch.Tensor:
        values = values.clone()
        values[at] = value
        return values

    return change


def test_the_first_difference_is_named_with_row_token_and_values(
    job_of: Callable[..., Side],
) -> None:
    a, b = (job_of("a", train), job_of("b", lambda step: train(step, planted((5, 3), math.nan))))
    found = compared(a, b)
    first, at = first_of(found)
    assert (first.step, first.stage, first.off, first.largest) == (2, "log_probs", 1, math.inf)
    assert at.row is not None
    assert ("session 2" in at.row, at.entry, at.token) == (True, 3, PROMPT + 3)
    assert (at.a, math.isnan(at.b)) == (log_probs(2)[5, 3].item(), True)
    around, place = at.around or ([], 0)
    assert around[place] == rows(2)["responses"][5, 3].item()
    assert found.follow == {(2, "loss")}
    assert "log_probs differs first, at step 2: in 1 of 12 rows" in found.verdict()
    assert found.verdict().endswith("; the rollouts are equal")


def test_digests_name_the_row(job_of: Callable[..., Side]) -> None:
    a, b = (
        job_of(name, lambda step, v=value: train(step, planted((4, 1), v)), values="digest")
        for name, value in (("a", -0.5), ("b", -0.75))
    )
    first, at = first_of(compared(a, b))
    assert (first.stage, first.off, at.token) == ("log_probs", 1, None)
    assert at.what in MOMENTS
    assert at.row is not None
    assert at.row.endswith("session 1")


@pytest.mark.parametrize(
    ("kind", "is_float32"),
    [
        (float, True),
        (np.float64, True),
        (torch.tensor, True),
        (lambda value: [value, value], True),
        (lambda value: torch.tensor(value, dtype=torch.float64), False),
        (lambda value: round(value * 1e7), False),
    ],
)
def test_a_number_of_unknown_precision_counts_as_float32(
    job_of: Callable[..., Side], kind: Callable[[float], Any], is_float32: bool
) -> None:
    """A trainer's metric was a float32 tensor before it was a Python float."""
    value = float(np.float32(244.8))
    a, b, other = (
        job_of(name, lambda step, by=by: package.record("metric", kind(value * by)))
        for name, by in (("a", 1.0), ("b", 1 + 2**-23), ("other", 1 + 1e-5))
    )
    states = {one.state for one in compared(a, b).stages}
    assert states == {"within rounding" if is_float32 else "differs"}
    assert {one.state for one in compared(a, other).stages} == {"differs"}


def test_what_only_one_side_has_is_listed(job_of: Callable[..., Side]) -> None:
    def more(step: int) -> None:
        train(step)
        package.record("kl", 0.1)

    found = compared(job_of("a", train, steps=[1, 2, 3]), job_of("b", more))
    assert (found.only_a, found.only_b, found.steps[0].only_b) == ([3], [], ["kl"])
    assert (found.first, found.is_equal) == (None, False)
    assert "not everything could be compared" in found.verdict()
    digests = job_of("d", train, values="digest")
    assert "1 stage of steps 1,2; not everything" in compared(job_of("c", train), digests).verdict()


@pytest.mark.parametrize(
    ("a", "b", "state", "note"),
    [
        ([1.0] * 2, [1.0] * 4, "not comparable", "2 records in A, 4 in B"),
        ([1.0], [np.ones(2)], "not comparable", "recorded in two forms: number and whole"),
        ([np.ones(2)], [np.ones(3)], "differs", ""),
        (["x"], ["y"], "differs", ""),
        ([2**60], [2**60 + 1], "differs", ""),  # one number in float64
        ([np.array([2**60])], [np.array([2**60 + 1])], "differs", ""),
    ],
)
def test_values_of_the_whole_step_need_one_form(
    job_of: Callable[..., Side], a: list[Any], b: list[Any], state: str, note: str
) -> None:
    def values(some: list[Any]) -> Callable[[int], None]:
        return lambda step: [package.record("loss", one) for one in some] and None

    found = compared(job_of("a", values(a), steps=[1]), job_of("b", values(b), steps=[1]))
    assert [(one.state, one.note) for one in found.stages] == [(state, note)]
    assert not found.is_equal


def test_what_differs_first_within_a_step_is_the_first_record(job_of: Callable[..., Side]) -> None:
    """Mini-batches alternate: the second log-probs come before the second loss."""

    def epochs(change: float) -> Callable[[int], None]:
        def body(step: int) -> None:
            for epoch in range(2):
                package.record("log_probs", log_probs() + change * epoch, rows=rows())
                package.record("loss", 1.0 + change if epoch else 1e7 + 2 * change)
                package.record("grad_norm", 1.0)

        return body

    found = compared(job_of("a", epochs(0.0), steps=[1]), job_of("b", epochs(0.5), steps=[1]))
    first, _ = first_of(found)
    assert (first.stage, first.order, first.off) == ("log_probs", 3, N)
    assert found.stages[-1].at.a == 1.0, "of the record that differs beyond rounding"


def test_in_a_test_the_failure_is_the_table(job_of: Callable[..., Side]) -> None:
    a, b = (job_of("a", train), job_of("b", lambda step: train(step, lambda values: values + 1)))
    assert_same_training(a.directory, a.directory)
    assert_same_training(a.directory, b.directory, atol=1.1)
    with pytest.raises(AssertionError) as caught:
        assert_same_training(a.directory, b.directory)
    lines = str(caught.value).splitlines()
    assert lines[0].startswith("log_probs differs first, at step 2")
    assert any(line.split()[:2] == ["2", "log_probs"] for line in lines)


# -- the command ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["job", "path", "dump_dir", "output"])
def test_what_a_side_may_be(
    job_of: Callable[..., Side], rlskip: Any, tmp_path: Path, name: str
) -> None:
    job_of("then", lambda step: train(step, lambda values: values + 1))
    b, output = job_of("now", train), tmp_path / "out" / "rlskip_summary.json"
    output.parent.mkdir()
    output.write_text(f'{{"stages": "{b.directory}"}}')
    given = {"job": b.name, "path": b.directory, "dump_dir": tmp_path, "output": tmp_path / "out"}
    answer = rlskip("compare", b.name, given[name], "-d", tmp_path)
    assert answer.code == 0, answer.err
    assert "Equal to the bit: 3 stages of steps 1,2" in answer.out
    assert "nope: no such" in rlskip("compare", b.name, "nope", "-d", tmp_path).err
    # A long path wraps the line in any place.
    assert ("jobnow,thenewestof2" in "".join(answer.out.split())) == (name == "dump_dir")


@pytest.mark.parametrize("below", ["", "GBS4_N3_in4_out6", "GBS4_N3_in4_out6/generate"])
def test_a_side_may_be_a_directory_of_runs_that_a_job_used(
    job_of: Callable[..., Side], rlskip: Any, tmp_path: Path, below: str
) -> None:
    sides = []
    for name, value in (("a", 0.0), ("b", 1.0)):
        job_of(name, lambda step, v=value: train(step, lambda values: values + v))
        run = Path(f"{name}_p/GBS4_N3_in4_out6/generate")
        StepStore(tmp_path / run).save(1, rows())
        records = tmp_path / "records" / name
        records.mkdir(parents=True)
        (records / "x.jsonl").write_text(f'{{"role": "r", "event": "miss", "run": "{run}"}}')
        sides.append(tmp_path / f"{name}_p" / below)
    said = rlskip("compare", *sides)
    assert (said.code, "Log_probs differs first, at step 2" in said.out) == (1, True)
    assert "nope: no such" in rlskip("compare", tmp_path, "nope").err, "A has several runs"


def test_exit_codes(job_of: Callable[..., Side], rlskip: Any, tmp_path: Path) -> None:
    a = job_of("a", train)
    b = job_of("b", lambda step: train(step, lambda values: values + 1))
    where = ("-d", tmp_path)
    assert rlskip("compare", "a", "a", *where).code == 0
    assert rlskip("compare", "a", "b", *where).code == 1
    assert rlskip("compare", "a", "b", *where, "--steps", "1").code == 0
    assert rlskip("compare", "a", "b", *where, "--atol", "2").code == 0
    assert rlskip("compare", "a", "c", *where).code == 2
    assert rlskip("compare", "a", "b", *where, "--steps", "7").code == 2
    (damaged,) = b.directory.glob("2*/gen_batch.dp")
    damaged.write_bytes(damaged.read_bytes()[:-9])
    listed = rlskip("compare", "a", "b", *where)
    assert (listed.code, "\nstep 2: " in listed.out) == (1, True)
    assert rlskip("compare", "a", "b", *where, "--steps", "2").code == 2
    assert rlskip("ls", tmp_path, "--json").json == [], "records are no runs"
    data = rlskip("compare", "a", "b", *where, "--steps", "1", "--json").json
    assert (data["equal"], data["first"]) == (True, None)
    assert data["steps"][0]["stages"][0]["stage"] == "rollouts"
    for meta in (a.directory / "1").rglob("meta.json"):
        meta.write_bytes(b"")
    lost = rlskip("compare", a.directory, "a", *where)
    assert (lost.code, "cannot be read" in " ".join(lost.out.split())) == (1, True)


# -- digests, and which values count as equal --------------------------------------------------


VECTOR = torch.randn(200, generator=torch.Generator().manual_seed(1))
CANCELS = torch.cat([VECTOR, -VECTOR])
LEAST = torch.finfo(torch.float32).min


def filled(fill: float, at: slice, values: torch.Tensor = VECTOR) -> torch.Tensor:
    values = values.clone()
    values[at] = fill
    return values


OFF = VECTOR + (torch.arange(200) == 199) * 1e-2


@pytest.mark.parametrize(
    ("a", "b", "tolerance", "state"),
    [
        *(
            (filled(fill, at), filled(fill, at, OFF), {}, "differs")
            for fill in (-1e9, LEAST, math.nan)
            for at in (slice(1), slice(0, 198))
        ),
        (filled(-1e9, slice(9)), filled(-2e9, slice(9)), {}, "differs"),
        (filled(-1e9, slice(9)), filled(-1e9, slice(9)) * (1 + 2**-23), {}, "within rounding"),
        (filled(1e6, slice(1)), filled(1e6 + 1, slice(1), OFF), {}, "differs"),
        (filled(-1e9, slice(1), 0 * OFF), filled(-1e9, slice(1), OFF - VECTOR), {}, "differs"),
        (VECTOR, VECTOR.roll(1) * (1 + 2**-23), {}, "differs"),
        (VECTOR, VECTOR.roll(1), {"rtol": 1e-3}, "differs"),
        (CANCELS, CANCELS * (1 + 1e-4 * CANCELS.roll(1)), {"rtol": 1e-3}, "within rounding"),
        (torch.ones(99), torch.ones(98), {"rtol": 0.1}, "differs"),
        (torch.zeros(9), -torch.zeros(9), {}, "within rounding"),
        (torch.zeros(9), -torch.zeros(9), {"rtol": 0.0}, "within rounding"),
        (VECTOR * math.nan, -(VECTOR * math.nan), {}, "equal"),
        (VECTOR.bfloat16(), VECTOR.bfloat16().float(), {}, "equal"),
        (VECTOR.bfloat16(), VECTOR, {}, "differs"),
        (torch.arange(9), torch.arange(9.0), {}, "equal"),
        (torch.arange(9) + 2**60, torch.arange(9) + 2**60 + 1, {}, "differs"),
    ],
)
@pytest.mark.parametrize("values", ["all", "digest"])
def test_digests_judge_as_whole_values_do(
    job_of: Callable[..., Side],
    values: str,
    a: torch.Tensor,
    b: torch.Tensor,
    tolerance: dict[str, float],
    state: str,
) -> None:
    sides = (
        job_of(name, lambda step, x=x: package.record("of", x), steps=[1], values=values)
        for name, x in (("a", a), ("b", b))
    )
    (found,) = compared(*sides, **tolerance).stages
    assert found.state == state
    assert ("two dtypes" in found.note) is (state == "equal" and a.dtype != b.dtype)


@pytest.mark.parametrize(("values", "by"), [("all", 1e-5), ("digest", 1e-3)])
def test_one_large_value_hides_no_other(
    job_of: Callable[..., Side], values: str, by: float
) -> None:
    off = VECTOR + (torch.arange(200) == 199) * by
    sides = (
        job_of(name, lambda step, x=x: package.record("of", x), steps=[1], values=values)
        for name, x in (("a", filled(900.0, slice(1))), ("b", filled(900.0, slice(1), off)))
    )
    (found,) = compared(*sides).stages
    assert found.state == "differs"


# -- rows with equal tokens --------------------------------------------------------------------


def test_rows_with_equal_tokens_are_told_by_their_sessions(job_of: Callable[..., Side]) -> None:
    def twins(order: list[int]) -> Callable[[int], None]:
        def body(step: int) -> None:
            batch = {k: v[:1].repeat(3, 1) if v.dim() > 1 else v[:3] for k, v in rows().items()}
            some = {k: v[order] for k, v in batch.items()}
            package.record("advantages", torch.tensor([1.0, 2.0, 3.0])[order], rows=some)

        return body

    assert compared(job_of("a", twins([0, 1, 2])), job_of("b", twins([2, 0, 1]))).is_equal


@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize(
    ("masks", "first"), [([3, 1, 2, 1], None), ([3, 1, 1, 4], "mask"), ([1, 2, 3], "rollouts")]
)
def test_rows_of_equal_tokens_may_have_other_masks(
    job_of: Callable[..., Side], parts: int, masks: list[int], first: str | None
) -> None:
    """Of each row the mask tells how many of its tokens were sampled."""

    def sampled(upto: list[int], parts: int) -> Callable[[int], None]:
        def body(step: int) -> None:
            mask = (torch.arange(12) < torch.tensor(upto)[:, None]).long()
            batch = {"prompts": torch.full((len(upto), 3), 7), "responses": torch.ones_like(mask)}
            batch |= {"attention_mask": torch.ones(len(upto), 15), "response_mask": mask}
            for some in torch.arange(len(upto)).tensor_split(parts):
                rows = {name: column[some] for name, column in batch.items()}
                package.record("log_probs", torch.zeros(len(some), 12), rows=rows)

        return body

    found = compared(job_of("a", sampled([1, 1, 2, 3], parts)), job_of("b", sampled(masks, 1)))
    assert (found.first and found.first.stage, found.stages[0].compared) == (first, 4)


def test_sessions_may_have_other_numbers_in_the_other_run(job_of: Callable[..., Side]) -> None:
    """As where they are numbered through the batch, and prompts are drawn in another order."""

    def numbered(order: list[int]) -> Callable[[int], None]:
        def body(step: int) -> None:
            batch = {k: v[order] for k, v in rows().items()} | {"session": torch.arange(N)}
            package.record("advantages", log_probs()[order], rows=batch)

        return body

    order = [*range(2, N), 0, 1]
    assert compared(job_of("a", numbered([*range(N)])), job_of("b", numbered(order))).is_equal


@pytest.mark.parametrize(
    ("a", "b", "epochs", "only"),
    [
        ([1, 1, 0, 0], [1, 0, 0, 0], 1, (1, 1)),
        ([1, 1, 1, 1], [1, 1, 1, 2], 1, (1, 1)),
        ([1, 1, 0], [1, 0], 1, (1, 0)),
        ([1, 1, 0, 2], [1, 0, 2, 1], 1, (0, 0)),
        ([1, 1, 0, 0], [1, 1, 0, 0], 2, (0, 0)),
        ([1, 1, 0, 0], [1, 0, 0, 0], 2, (1, 1)),
    ],
)
def test_how_often_a_response_was_sampled_is_of_the_rollouts(
    job_of: Callable[..., Side], a: list[int], b: list[int], epochs: int, only: tuple[int, int]
) -> None:
    """B trains for `epochs`; its rollouts are the same."""

    def train_on(responses: list[int], epochs: int) -> Callable[[int], None]:
        def body(step: int) -> None:
            batch = {
                "prompts": torch.full((len(responses), 3), 7),
                "responses": torch.tensor(responses)[:, None],
            }
            rewards = (batch["responses"] == 1).float()
            package.record("advantages", rewards - rewards.mean(), rows=batch)
            for _ in range(epochs):
                package.record("log_probs", torch.zeros(len(responses), 1), rows=batch)

        return body

    found = compared(job_of("a", train_on(a, 1)), job_of("b", train_on(b, epochs)))
    first = found.stages[0]
    note = f"{counted(only[0], 'row')} only in A, {only[1]} only in B" if len({*only}) > 1 else ""
    assert (first.stage, first.note, first.off) == ("rollouts", note, max(only))
    assert first.compared == max(len(a), len(b))
    assert (found.first == first) is any(only)
