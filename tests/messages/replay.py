"""Of the replay buffer: groups that do not arrive, or arrive incomplete."""

from rlskip.keys import prompt_tag, row_tag, session_tag
from rlskip.queue import GroupFilter, KVBatchMeta, MemoryQueue, ReplayBuffer


def sample(errors):
    """Sample a group of two, of which these sessions have ended, each with its error or None."""
    queue = MemoryQueue()
    queue.put(["u"], "train", tags=[prompt_tag(1, 2)])
    for number, error in enumerate(errors):
        queue.put([f"u_{number}_0"], "train", [{"x": 1}], [row_tag(1)])
        queue.put([f"u_sess{number}"], "train", tags=[session_tag(number, error=error)])
    ReplayBuffer(queue, {"replay": {"timeout_s": 0.01}}).sample(1, "train")


def sample_nothing(_):
    ReplayBuffer(MemoryQueue(), {"replay": {"timeout_s": 0.01}}).sample(1, "train")


def sample_from_earlier(_):
    queue = MemoryQueue()
    earlier, _later = ReplayBuffer(queue), ReplayBuffer(queue)
    earlier.sample(1, "train")


def buffer(replay=None, **more):
    return ReplayBuffer(MemoryQueue(), {"replay": replay}, **more)


CASES = [
    ("a batch that was not sampled", lambda _: buffer().clear(KVBatchMeta(["a"], [{}], "train"))),
    ("refills without a callback", lambda _: buffer({"on_incomplete": "refill"})),
    ("a filter without a callback", lambda _: buffer(group_filter=GroupFilter(lambda *_: []))),
    ("a second buffer of a queue", sample_from_earlier),
    ("a group that does not arrive", lambda _: sample([None])),
    ("a step of which nothing was submitted", sample_nothing),
    ("a session that failed", lambda _: sample([None, "tool died"])),
]
