"""One bad row, prompt or exception fails its session by name; its siblings go on."""

from __future__ import annotations

import pytest
import torch

from rlskip.dispatch import DataFailure, InfrastructureFailure, LocalPool, RolloutDispatcher
from rlskip.dispatch.history import History
from rlskip.store import StepStore


class Raises:
    """Raises whatever is asked of it."""

    def __init__(self, error=RuntimeError):
        self.error = error

    def _fail(self, *args):
        raise self.error("odd")

    __len__ = __iter__ = __getitem__ = __array__ = sum = _fail


class Unprintable(Exception):
    def __str__(self):
        raise RuntimeError("no text")

    __repr__ = __str__


class Unnamed(DataFailure):
    """Does not call its base class's constructor."""

    def __init__(self):
        pass


class OddMapping(dict):
    def __iter__(self):
        raise RuntimeError("no keys")

    keys = __iter__


ROWS = {
    "NaN mask": {"response_mask": torch.tensor([1.0, float("nan")])},
    "infinite mask": {"response_mask": torch.tensor([float("inf")])},
    "mask of NaN in a list": {"response_mask": [float("nan")]},
    "meta mask": {"response_mask": torch.ones(3, device="meta")},
    "mask that raises": {"response_mask": Raises()},
    "mask that raises a BaseException": {"response_mask": Raises(KeyboardInterrupt)},
    "responses that raise": {"responses": Raises()},
    "responses that raise a BaseException": {"responses": Raises(SystemExit)},
    "not a mapping": [("responses", torch.ones(2))],
    "a set": {"responses"},
    "a list of lists": [[1, 2]],
    "a mapping and a string": [{"responses": torch.ones(2)}, "responses"],
    "a key that is a number": {3: torch.ones(2)},
    "a key that is None": {None: torch.ones(2)},
    "a mapping without keys": OddMapping(a=1),
    "no rows": [],
}
ERRORS = {
    "unprintable": Unprintable(),
    "unprintable I/O": type("UnprintableOSError", (Unprintable, OSError), {})(),
    "unnamed": Unnamed(),
    "long": ValueError("x" * 10_000_000),
    "text that is no text": DataFailure(object()),  # type: ignore[arg-type]
    "infrastructure": InfrastructureFailure("gone"),
}


@pytest.mark.parametrize("kind", ["async", "blocking"])
@pytest.mark.parametrize("case", [*ROWS, *ERRORS])
def test_its_session_fails_by_name_and_its_siblings_go_on(
    make_dispatcher, make_prompts, queue, case, kind
):
    def blocking(prompt, sampling, session):
        if session.session_id == 2:
            if case in ERRORS:
                raise ERRORS[case]
            return ROWS[case]
        return {"responses": torch.ones(3)}

    async def coroutine(*args):
        return blocking(*args)

    worker = blocking if kind == "blocking" else coroutine
    dispatcher = make_dispatcher(worker, max_retries=0, max_data_retries=1)
    report = dispatcher.submit(make_prompts(2), step=1).result(20)
    assert report.failed.keys() == {("u_0", 2), ("u_1", 2)}
    for cause in report.failed.values():
        assert cause.startswith(
            "infrastructure: " if "I/O" in case or "infra" in case else "data: "
        )
        assert 10 < len(cause) < 3000
    assert report.attempts == 8 + (2 if report.failed["u_0", 2].startswith("data") else 0)
    final = dict(queue.markers())
    assert sorted(tag["status"] for tag in final.values()) == ["failure"] * 2 + ["success"] * 6
    assert len(queue.markers()) == 8


def test_a_bad_row_is_named_by_its_number(make_dispatcher, make_prompts):
    async def worker(prompt, sampling, session):
        return [{"response_mask": torch.ones(2)}, {"response_mask": torch.tensor(float("nan"))}]

    report = make_dispatcher(worker, n=1).generate_sequences(make_prompts(1), step=1)
    assert "row 1: the length of its response_mask cannot be read" in report.failed["u_0", 0]


def test_a_pool_of_the_users_may_return_anything(make_prompts, queue):
    class Odd(LocalPool):
        def start(self, worker, job):
            future = super().start(worker, job)
            if job.session.session_id == 1:
                future.cancel()
                future = future.get_loop().create_future()
                future.set_result("rows")
            return None if job.session.session_id == 2 else future

    async def worker(prompt, sampling, session):
        return {"responses": torch.ones(3)}

    config = {"dispatch": {"rollout_level": True, "n": 3}}
    with RolloutDispatcher(Odd(worker, 2), queue, config) as dispatcher:
        report = dispatcher.submit(make_prompts(2), step=1).result(20)
    assert {session for _, session in report.failed} == {1, 2}
    assert len(queue.markers()) == 6


def test_fields_that_only_share_the_name_count_no_tokens(make_dispatcher, make_prompts):
    async def worker(prompt, sampling, session):
        return {"response_mask": None, "responses": 7} if session.session_id else {"other": 1}

    report = make_dispatcher(worker, n=2).generate_sequences(make_prompts(1), step=1)
    assert (report.failed, report.tokens) == ({}, 0)


def test_odd_columns_of_a_dump_teach_nothing(tmp_path):
    store = StepStore(tmp_path)
    store.save(1, {"index": [1, 2], "response_mask": [[1, 1], [float("nan")]]})
    store.save(2, {"index": [3], "response_mask": ["text"]})
    store.save(3, {"index": torch.tensor(4), "response_mask": torch.tensor(1)})
    store.save(4, [1, 2, 3])
    store.save(5, {"index": [5], "response_mask": [None]})
    history = History(["index"])
    assert history.learn_dumps(store) >= 1
    assert history.expected(history.key({"index": 1})) == 2
    assert history.expected(history.key({"index": 2})) is None
