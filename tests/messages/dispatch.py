"""Of dispatching: batches, policies and journals that cannot be."""

from threading import Lock

from rlskip.dispatch import LocalPool, RolloutDispatcher
from rlskip.queue import MemoryQueue


def dispatcher(worker=lambda *_: {"x": 1}, queue=None, replay=None, **dispatch):
    config = {"dispatch": {"rollout_level": True, "n": 2, **dispatch}, "replay": replay}
    return RolloutDispatcher(LocalPool(worker), queue, config)


def submit(prompts, **more):
    with dispatcher() as open_one:
        open_one.submit(prompts, **more)


def collect(**how):
    with dispatcher(**how) as open_one:
        open_one.collect([{"uid": "a"}], step=1)


def collect_again(_):
    with dispatcher() as open_one:
        open_one.submit([{"uid": "a"}], step=1).result()
        open_one.collect([{"uid": "a"}], step=2, batch_size=1)


def of_unequal_fields(prompt, sampling, session):
    return {"x": 1, **({"y": 2} if session.session_id else {})}


def submit_to_earlier(_):
    queue = MemoryQueue()
    with dispatcher(queue=queue) as earlier, dispatcher(queue=queue):
        earlier.submit([{"uid": "a"}], step=1)


def submit_to_closed(_):
    closed = dispatcher()
    closed.close()
    closed.submit([{"uid": "a"}], step=1)


CASES = [
    ("a batch without a step", lambda _: submit([{"uid": "a"}])),
    ("a uid whose group was not taken", collect_again),
    ("the step '3'", lambda _: submit([{"uid": "a"}], step="3")),
    ("a refill for collect", lambda _: collect(replay={"on_incomplete": "refill"})),
    ("a worker that returns no rows", lambda _: collect(worker=lambda *_: None)),
    ("rows of unequal fields", lambda _: collect(worker=of_unequal_fields)),
    ("a batch without uids", lambda _: submit([{"x": "a"}], step=1)),
    ("a uid that is None", lambda _: submit([{"uid": None}], step=1)),
    ("a prompt that cannot be copied", lambda _: submit([{"uid": "a", "lock": Lock()}], step=1)),
    (
        "prompts of one batch that differ in global_steps",
        lambda _: submit([{"uid": "a"}, {"uid": "b", "global_steps": 3}]),
    ),
    ("two prompts of one uid", lambda _: submit([{"uid": "a"}, {"uid": "a"}], step=1)),
    ("a batch without prompts", lambda _: submit([], step=1)),
    ("a batch of other rows", lambda _: submit([{"uid": "a"}, None], step=1)),
    ("a prompt without sessions", lambda _: submit([{"uid": "a", "__rollout_n__": 0}], step=1)),
    ("a prompt of 2.5 sessions", lambda _: submit([{"uid": "a", "__rollout_n__": 2.5}], step=1)),
    (
        "a policy that returns no placement",
        lambda _: collect(queue=MemoryQueue(), policy="builtins:id"),
    ),
    ("a closed dispatcher", submit_to_closed),
    ("a second dispatcher of a queue", submit_to_earlier),
    ("a journal without a directory", lambda _: dispatcher(journal=True)),
]
