"""``skip.match=prompt``: the rows of its prompts serve a batch that was composed otherwise."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlskip import SkipManager
from rlskip.errors import ConfigError, MismatchError, MissError
from rlskip.skip.assembling import AssemblyError
from rlskip.store.layout import INDEX
from tests.faulty_files import FaultyFiles
from tests.skip.prompt_stages import KINDS, check_rows, counter, made, run, stage, values_of


@pytest.fixture(autouse=True)
def _forget() -> None:
    made.clear()


# -- the rules of docs/skip.md against a model -------------------------------------------------

BATCH = st.text("abcde", min_size=1, max_size=4)
RUN = st.lists(st.lists(BATCH, min_size=1, max_size=2), min_size=1, max_size=5)


class Model:
    """What each prompt's groups are, by step, and which have served."""

    def __init__(self, dumped: dict[tuple[int, int], tuple[str, list[Any]]], first: int) -> None:
        self.dumped, self.uses = dumped, Counter[tuple[int, int, int]]()
        self.served: dict[tuple[int, int, int], int] = {}  # the step that each served first
        order = sorted(dumped, key=lambda at: (at[0] < first, at))
        self.groups: dict[str, list[tuple[int, int, int]]] = {}
        for at in order:
            for i, p in enumerate(dumped[at][0]):
                self.groups.setdefault(p, []).append((*at, i))

    def visit(self, step: int) -> None:
        self.step, self.used = step, set[int]()

    def serve(self, batch: str, cycles: bool) -> list[Any] | None:
        """The rows that serve a batch; None: it is generated."""
        for (step, call), (prompts, rows) in sorted(self.dumped.items()):
            all_of_it = [(step, call, i) for i in range(len(batch))]
            unused = all(self.served.get(at, self.step) == self.step for at in all_of_it)
            if step == self.step and call not in self.used and prompts == batch and unused:
                self.used.add(call)
                self.take(all_of_it)
                return [row for group in rows for row in group]
        uses, chosen = self.uses.copy(), list[tuple[int, int, int]]()
        for p in batch:
            left = [at for at in self.groups.get(p, ()) if cycles or not uses[at]]
            if not left:
                return None
            best = min(left, key=lambda at: uses[at])
            uses[best] += 1
            chosen.append(best)
        self.take(chosen)
        self.used |= {call for step, call, _ in chosen if step == self.step}
        return [row for step, call, i in chosen for row in self.dumped[step, call][1][i]]

    def take(self, groups: list[tuple[int, int, int]]) -> None:
        self.uses.update(groups)
        self.served = {**dict.fromkeys(groups, self.step), **self.served}


@pytest.mark.parametrize(
    ("kind", "background"), [*((kind, False) for kind in KINDS), ("column", True)]
)
@given(a=RUN, b=RUN, first=st.integers(1, 3), on_miss=st.sampled_from(["generate", "error"]),
       action=st.sampled_from(["cache", "cache", "repeat"]))  # fmt: skip
@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_prompts_are_served_by_the_rules(
    kind: str, background: bool, a: Any, b: Any, first: int, on_miss: str, action: str
) -> None:
    generate = stage(kind)
    with tempfile.TemporaryDirectory() as folder:
        skip = {"dump_dir": folder, "background_write": background, "rollout": {"enable": True}}
        SkipManager.init({"skip": {**skip, "wait_s": 0}})
        dumped = {}
        for step, calls in enumerate(a, 1):
            SkipManager.set_step(step)
            for call, batch in enumerate(calls):
                rows = iter(values_of(generate(batch)))
                sizes = [KINDS[kind][1] or 1 + ord(p) % 3 for p in batch]
                dumped[step, call] = batch, [[*itertools.islice(rows, size)] for size in sizes]
        SkipManager.flush()
        replay = {"match": "prompt", "on_miss": on_miss, "action": action}
        SkipManager.init({"skip": {**skip, **replay, "wait_s": 0}})
        model = Model(dumped, first)
        for step, calls in enumerate(b, first):
            SkipManager.set_step(step)
            model.visit(step)
            for batch in calls:
                made.clear()
                expected = model.serve(batch, action == "repeat")
                if expected is None and on_miss == "error":
                    with pytest.raises(MissError, match="prompts"):
                        generate(batch)
                    continue
                result = generate(batch)
                assert made == ([] if expected is not None else [batch])
                check_rows(result)
                if expected is not None:
                    assert values_of(result) == expected
        SkipManager.flush()
        SkipManager.reset()


def test_a_hit_names_where_its_prompts_come_from(
    init: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    generate = stage("column")
    caplog.set_level(logging.INFO)
    dumps = init()
    run(generate, "ab", "cd", "ef")
    made.clear()
    init(match="prompt")
    run(generate, "fc", "ag")
    assert made == ["ag"]
    assert "the groups of 2 prompts (1 from step 2, 1 from step 3) (match=prompt)" in caplog.text
    assert "1 of 2 prompts are in no dump of the run" in caplog.text
    assert "is generated" in caplog.text
    files = [path.read_text().splitlines() for path in dumps.glob("records/*/*")]
    records = [json.loads(line) for lines in files for line in lines]
    assert [r["seconds_saved"] > -1 for r in records if r["event"] == "hit"] == [True]
    init(match="prompt")
    assert values_of(run(generate, "ga")[0])[1][0] == "a", "what was generated is there now"
    assert made == ["ag"]


def test_other_arguments_are_a_mismatch(init: Callable[..., Path]) -> None:
    @SkipManager.annotate(role="rollout")
    def generate(prompts: list[str], temperature: float) -> list[Any]:
        made.append("".join(prompts))
        return [{"name": p, "t": temperature} for p in prompts]

    dumps = init()
    run(lambda batch: generate([*batch], 1.0), "ab", "cd")
    made.clear()
    init(match="prompt", on_mismatch="error")
    with pytest.raises(MismatchError, match=r"temperature: 0\.5 now, 1\.0 in the dump"):
        run(lambda batch: generate([*batch], 0.5), "ad")
    run(lambda batch: generate([*batch], 0.5), "ax")
    assert made.pop() == "ax", "one prompt was never asked for"
    init(match="prompt", on_mismatch="regenerate")
    (rows,) = run(lambda batch: generate([*batch], 0.5), "ad")
    assert [row["t"] for row in rows] == [0.5, 0.5]
    assert not [*dumps.rglob("*.bad-*")]
    (rows,) = run(lambda batch: generate([*batch], 1.0), "cb", first=2)
    assert [row["t"] for row in rows] == [1.0, 1.0]


def test_another_batch_size_is_found(
    init: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    generate, dumped = stage("column"), {}
    for first, batch in enumerate(("ab", "cd"), 1):
        init(gbs=2, host={"temperature": float(first)})
        (found,) = run(generate, batch, first=first)
        dumped |= dict(values_of(found))
    made.clear()
    init(gbs=4, match="prompt", on_miss="error", host={"temperature": None})
    (found,) = run(generate, "dbca")
    for then in (1.0, 2.0):
        assert caplog.text.count(f"not compared: temperature ({then} then, None now)") == 1
    assert values_of(found) == [(name, dumped[name]) for name in "dbca"]
    with pytest.raises(ConfigError, match="no usable dump"):
        init(match="prompt", on_miss="error", n=7, host={"trainer": {"total_training_steps": 2}})


@pytest.mark.parametrize("batch", ["a", "ab"])
def test_groups_are_named_as_the_prompts_are_now(init: Callable[..., Path], batch: str) -> None:
    annotate = SkipManager.annotate(role="rollout")
    generate = annotate(lambda prompts: {"uid": [*prompts["uid"]], "said": [*prompts["text"]]})
    for step, uids in ((1, "xy"), (2, "yx"), (3, "vw")):
        init(match="prompt", on_miss="generate" if step == 1 else "error", at=step)
        named = [*uids[: len(batch)]]
        got = generate({"uid": named, "text": [*batch]})
        assert got == {"uid": named, "said": [*batch]}


def test_prompts_are_padded_where_the_dumps_have_padding(init: Callable[..., Path]) -> None:
    @SkipManager.annotate(role="rollout")
    def generate(prompts: list[str]) -> dict[str, Any]:
        asked = torch.tensor([[*text.ljust(max(map(len, prompts))).encode()] for text in prompts])
        return {"prompts": asked, "prompt_mask": asked != 32, "responses": asked[:, :1]}

    init()
    run(generate, ["xyz", "d"], ["ef", "g"])
    init(match="prompt", on_miss="error")
    (found,) = run(generate, ["xyz", "ef"])  # of which none has padding
    assert found["prompts"].tolist() == [[120, 121, 122], [101, 102, 32]]


def test_rows_of_two_prompts_are_never_one_group(init: Callable[..., Path]) -> None:
    def decorated(indexed: bool, **rows: Any) -> Callable[..., Any]:
        @SkipManager.annotate(role="rollout", stage="same", rows={"group": "task", **rows})
        def generate(prompts: dict[str, Any]) -> dict[str, Any]:
            groups = [i for i in range(len(prompts["text"])) for _ in range(2)]
            return {"task": groups, "said": [prompts["text"][i] for i in groups]}

        index = (lambda n: {"index": [*range(n)]}) if indexed else lambda n: {}
        return lambda batch: generate({"text": [*batch], **index(len(batch))})

    init()
    run(decorated(True, prompt_group="index"), "ab", "cd")
    init(match="prompt", on_miss="error")
    (found,) = run(decorated(True, prompt_group="index"), "ca")
    assert found == {"task": [0, 0, 1, 1], "said": [*"ccaa"]}
    other = str(init()) + "2"
    init(dump_dir=other)
    run(decorated(False), "ab", "cd")
    init(dump_dir=other, match="prompt")
    with pytest.raises(AssemblyError, match="task names groups of two prompts 0"):
        run(decorated(False), "ca")
    assert run(decorated(False), "cb", first=2) == [{"task": [0, 0, 1, 1], "said": [*"ccbb"]}]


@pytest.mark.parametrize(
    ("result", "n", "what"),
    [
        ({"said": ["x"] * 3}, None, "3 rows for 2 prompts"),
        (([1, 2], [3, 4]), None, "a tuple, whose rows are not known"),
        (3.5, None, "a float, whose rows"),
        ({"uid": ["x", "y", "x", "y"], "said": [1, 2, 3, 4]}, None, "4 rows for 2"),
        *(({"uid": [*order], "said": [*order]}, n, "by uid the rows are in another order")
          for order, n in (("ba", None), ("abab", 2), ("bbaa", 2))),
        *(({"uid": [*order], "said": [*order]}, n, "by uid some of the rows are of other prompts")
          for order, n in (("ac", None), ("aacc", 2), ("cb", None))),
        ({"uid": ["q", "q"], "said": [1, 2]}, None, "by uid the rows of two prompts are one group"),
    ],
)  # fmt: skip
def test_rows_that_are_nobodys_are_refused_at_the_first_dump(
    init: Callable[..., Path], result: Any, n: int | None, what: str
) -> None:
    generate = SkipManager.annotate(role="rollout", rows={"n": n})(lambda prompts: result)
    init(match="prompt", at=1)
    with pytest.raises(ConfigError, match=rf"^skip\.rollout\.match=prompt: .*{what}"):
        generate({"uid": ["a", "b"], "text": ["x", "y"]})


def test_a_group_that_the_stage_dropped_is_nobodys(init: Callable[..., Path]) -> None:
    """Two rows of one prompt are not one of each."""
    left = "a"

    @SkipManager.annotate(role="rollout")
    def generate(prompts: dict[str, Any]) -> dict[str, Any]:
        uids = [uid for uid in prompts["uid"] for _ in range(2) if uid in left]
        made.append("".join(uids))
        return {"uid": uids, "said": uids}

    def ask(uids: str) -> str:
        return "".join(generate({"uid": [*uids], "text": [*uids]})["said"])

    made.clear()
    init(match="prompt", at=1)
    assert (ask("ab"), ask("b")) == ("aa", "")
    left = "ab"
    init(match="prompt", at=2)
    assert (ask("b"), ask("a")) == ("bb", "aa")
    assert made == ["aa", "", "bb"]


def test_values_for_a_whole_batch(init: Callable[..., Path]) -> None:
    def decorated(**options: Any) -> Callable[..., Any]:
        @SkipManager.annotate(role="rollout", stage="same", **options)
        def generate(prompts: list[str]) -> dict[str, Any]:
            made.append("".join(prompts))
            within = {"name": [7] * len(prompts)}
            return {"name": [*prompts], "total": len(made), "more": within}

        return lambda batch: generate([*batch])

    init()
    run(decorated(), "ab", "cd")
    made.clear()
    init(match="prompt")
    with pytest.raises(AssemblyError, match="total is one value for a whole batch") as caught:
        run(decorated(), "bc")
    assert "skip.drop_fields=[total]" in caught.value.remedy
    init(match="prompt", drop_fields=["total"])
    assert run(decorated(), "bc") == [{"name": ["b", "c"], "more": {"name": [7, 7]}}]
    init(match="prompt")
    (found,) = run(decorated(totals={"total": lambda rows: "".join(rows["name"])}), "bc")
    assert found == {"name": ["b", "c"], "total": "bc", "more": {"name": [7, 7]}}
    assert made == []


@pytest.mark.parametrize("more", [list, np.array, torch.tensor, lambda v: {"within": v}])
def test_a_value_a_prompt_is_never_another_ones(init: Callable[..., Path], more: Any) -> None:
    """Nor is a list for the whole batch one of rows, if as many rows are picked."""

    @SkipManager.annotate(role="rollout", rows={"n": 2})
    def generate(prompts: list[str]) -> dict[str, Any]:
        said = [prompt for prompt in prompts for _ in range(2)]
        ids = [ord(prompt) for prompt in prompts]
        return {"said": said, "stop": [4, 5, 6, 7], "of": more(ids), "in": {"said": said, "x": [8]}}

    def asked(batch: str) -> Any:
        (found,) = run(generate, [*batch], first=9)
        assert found["said"] == found["in"]["said"] == [prompt for prompt in batch for _ in "12"]
        assert (found["stop"], found["in"]["x"]) == ([4, 5, 6, 7], [8])
        return found.get("of")

    init()
    run(generate, [*"abc"], [*"def"])
    init(match="prompt", on_miss="error")
    assert str(asked("abc")) == str(more([97, 98, 99])), "the whole dump"
    for batch in ("d", "fe", "dfe"):
        init(match="prompt", on_miss="error")
        with pytest.raises(AssemblyError, match="of has as many values as its dump has prompts"):
            asked(batch)
        init(match="prompt", on_miss="error", drop_fields=["of"])
        assert asked(batch) is None
    init(match="prompt", on_miss="error")
    with pytest.raises(AssemblyError, match="of has as many values as its dump has prompts"):
        asked("ad")


def test_dumps_that_name_no_prompts_serve_their_own_batch_only(
    init: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    generate = stage("column")
    init()
    with monkeypatch.context() as patched:
        patched.setattr("rlskip.skip.dumps.rows_per_prompt", lambda *_: "not known")
        run(generate, "ab", "cd")
    made.clear()
    init(match="prompt")
    run(generate, "ab", "dc")
    assert made == ["dc"]


def test_a_damaged_dump_costs_the_batches_that_need_it(init: Callable[..., Path]) -> None:
    generate = stage("column")
    dumps = init()
    run(generate, "ab", "cd", "ef")
    (file,) = dumps.glob("*/*/1/gen_batch.dp")
    content = file.read_bytes()
    file.write_bytes(content[:20] + b"\xff\xfe" + content[22:])
    made.clear()
    init(match="prompt")
    run(generate, "ac", "de", "cf")
    assert made == ["ac"], "c is still there for its next batch"


def test_validation_is_put_together_of_its_own_step(init: Callable[..., Path]) -> None:
    @SkipManager.annotate(role="rollout_val")
    def validate(prompts: dict[str, Any]) -> dict[str, Any]:
        made.append("".join(prompts["text"]))
        return {"name": [*prompts["text"]], "value": [next(counter) for _ in prompts["text"]]}

    def once(batch: str) -> Any:
        return validate({"text": [*batch], "validate": True})

    init(validation="replay", at=10)
    ten = dict(values_of(once("ab")) + values_of(once("cd")))
    SkipManager.set_step(20)
    once("abcd")
    made.clear()
    init(validation="replay", match="prompt", at=20)
    assert [name for name, _ in values_of(once("dc"))] == ["d", "c"]
    SkipManager.set_step(10)
    assert values_of(once("cabd")) == [(name, ten[name]) for name in "cabd"]
    SkipManager.set_step(30)
    once("ab")
    assert made == ["ab"], "no other step's"


def test_samples_side_by_side_each_get_their_own(init: Callable[..., Path]) -> None:
    @SkipManager.annotate(role="async_rollout")
    async def generate(prompts: dict[str, Any], sample_id: str) -> list[dict[str, Any]]:
        await asyncio.sleep(0)
        made.append(prompts["text"][0])
        return [{"name": prompts["text"][0], "value": next(counter)} for _ in range(3)]

    async def epoch(order: str) -> list[Any]:
        calls = [generate({"text": [p]}, f"sample_0_{i}") for i, p in enumerate(order)]
        return [values_of(found) for found in await asyncio.gather(*calls)]

    init("async_rollout")
    dumped = asyncio.run(epoch("abcda"))
    made.clear()
    for order in ("dacba", "aabcd", "badca", "acbda"):
        init("async_rollout", match="prompt", on_miss="error")
        again = asyncio.run(epoch(order))
        assert made == []
        assert sorted(again) == sorted(dumped)
        assert [rows[0][0] for rows in again] == [*order]


# -- the run's index and its ledger: who finds which dump, and which has served ---------------


def index_of(dumps: Path) -> Path:
    (run_directory,) = dumps.glob("*/GBS*")
    return run_directory / INDEX


def replaced(dumps: Path) -> None:
    """As a job that was killed before it wrote its line."""
    before = index_of(dumps).read_bytes()
    SkipManager.store("rollout").quarantine(1, "for a test")
    run(stage("column"), "xy")
    index_of(dumps).write_bytes(before)


@pytest.mark.parametrize("match", ["run", "prompt"])
@pytest.mark.parametrize(
    "accident",
    [
        lambda dumps: None,
        lambda dumps: index_of(dumps).unlink(),
        lambda dumps: index_of(dumps).write_bytes(index_of(dumps).read_bytes()[:-30]),
        lambda dumps: shutil.copy(index_of(dumps).parent / "2" / "meta.json", index_of(dumps)),
        replaced,
    ],
    ids=["nothing", "gone", "torn", "foreign", "replaced"],
)
def test_whatever_became_of_the_index_what_is_there_serves(
    init: Callable[..., Path], match: str, accident: Callable[[Path], Any]
) -> None:
    dumps = init()
    generate = stage("column")
    one, two = run(generate, "ab", "cd")
    accident(dumps)
    made.clear()
    init(match=match, wait_s=0)
    third, fourth, _ = run(generate, "cd", "ab", "xy", first=5)
    assert values_of(third) == values_of(two)
    if accident is replaced:
        assert made == ["ab"], "xy is there, and ab is not"
    else:
        assert values_of(fourth) == values_of(one)
        assert made == ["xy"]


@pytest.mark.parametrize("match", ["run", "prompt"])
def test_a_dump_that_another_job_replaced_meanwhile(init: Callable[..., Path], match: str) -> None:
    dumps = init()
    generate = stage("groups")
    run(generate, "ab", "cd", "ef")
    other = init(dump_dir=str(dumps) + "2")
    run(generate, "gh")
    (theirs,) = other.glob("*/GBS*/1")
    made.clear()
    init(dump_dir=str(dumps), match=match, wait_s=0)
    run(generate, "cd", first=7)
    (ours,) = dumps.glob("*/GBS*/1")
    shutil.rmtree(ours)
    shutil.copytree(theirs, ours)
    run(generate, "ab", "ef", first=8)
    assert made == ["ab"]


def test_a_hit_under_match_step_leaves_the_index_alone(init: Callable[..., Path]) -> None:
    dumps = init()
    generate = stage("column")
    with FaultyFiles(dumps) as seen:
        run(generate, "ab", "cd")
    of_index = [o.name for o in seen.operations if o.path.endswith(INDEX)]
    assert of_index.count("write") == of_index.count("open") == 2, "a line each"
    init()
    made.clear()
    with FaultyFiles(dumps) as seen:
        run(generate, "ab", "cd")
    assert made == []
    assert not [o for o in seen.operations if o.path.endswith(INDEX)]
