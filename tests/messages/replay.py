"""Of the replay buffer: groups that do not arrive, or arrive incomplete."""

from rlskip.errors import RlskipError
from rlskip.keys import prompt_tag, row_tag, session_tag
from rlskip.queue import IncompleteRolloutError, MemoryQueue, ReplayBuffer, ReplayTimeoutError


def sample(errors):
    """Sample a group of two, of which these sessions have ended, each with its error or None."""
    queue = MemoryQueue()
    queue.put(["u"], "train", tags=[prompt_tag(1, 2)])
    for number, error in enumerate(errors):
        queue.put([f"u_{number}_0"], "train", [{"x": 1}], [row_tag(1)])
        queue.put([f"u_sess{number}"], "train", tags=[session_tag(number, error=error)])
    ReplayBuffer(queue, {"replay": {"timeout_s": 0.01}}).sample(1, "train")


def sample_deleted(_):
    ReplayBuffer(MemoryQueue(), {"replay": {"timeout_s": 0.01}}).sample(1, "train", uids={"u"})


def sample_from_earlier(_):
    queue = MemoryQueue()
    earlier, _later = ReplayBuffer(queue), ReplayBuffer(queue)
    earlier.sample(1, "train")


CASES = [
    (
        "a second buffer of a queue",
        sample_from_earlier,
        RlskipError,
        "",
        """\
another ReplayBuffer was made for this queue, and two would sample its groups twice
  -> use that one, or a queue for each""",
    ),
    (
        "a named prompt that is not there",
        sample_deleted,
        ReplayTimeoutError,
        "partition 'train', step 1",
        """\
partition 'train', step 1: no batch after 0.0 s; 0 of 1 prompts are complete, 0 are running; not \
submitted at this step, or deleted: u
  u: expected some, got 0
  -> find out why the sessions are missing; raise replay.timeout_s if they are only slow""",
    ),
    (
        "a group that does not arrive",
        lambda _: sample([None]),
        ReplayTimeoutError,
        "partition 'train', step 1",
        """\
partition 'train', step 1: no batch after 0.0 s; 0 of 1 prompts are complete, 1 are running
  u: expected 2, got 1 (session 1 missing)
  -> find out why the sessions are missing; raise replay.timeout_s if they are only slow""",
    ),
    (
        "a session that failed",
        lambda _: sample([None, "tool died"]),
        IncompleteRolloutError,
        "partition 'train', step 1",
        """\
partition 'train', step 1: incomplete groups:
  u: expected 2, got 1 (session 1 failed: tool died)
  -> find the cause in the logs of the sessions; replay.on_incomplete can drop, refill or accept \
such groups (raise, drop, refill, min_viable)""",
    ),
]
