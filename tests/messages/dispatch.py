"""Of dispatching: batches, policies and journals that cannot be."""

from rlskip.dispatch import LocalPool, RolloutDispatcher
from rlskip.dispatch.dispatcher import DispatcherClosedError
from rlskip.dispatch.units import BatchError
from rlskip.errors import ConfigError, RlskipError
from rlskip.queue import MemoryQueue, UnequalFieldsError


def dispatcher(**dispatch):
    config = {"dispatch": {"rollout_level": True, "n": 2, **dispatch}}
    return RolloutDispatcher(LocalPool(lambda *_: {"x": 1}), config=config)


def submit(prompts, **more):
    with dispatcher() as open_one:
        open_one.submit(prompts, **more)


def generate(policy):
    config = {"dispatch": {"rollout_level": True, "policy": policy}}
    with RolloutDispatcher(LocalPool(lambda *_: {"x": 1}), MemoryQueue(), config) as open_one:
        open_one.submit([{"uid": "a"}], step=1).result()


def collect_again(_):
    with dispatcher() as open_one:
        open_one.submit([{"uid": "a"}], step=1).result()
        open_one.collect([{"uid": "a"}], step=2, batch_size=1)


def collect_refilled(_):
    config = {"dispatch": {"rollout_level": True}, "replay": {"on_incomplete": "refill"}}
    with RolloutDispatcher(LocalPool(lambda *_: {"x": 1}), config=config) as open_one:
        open_one.collect([{"uid": "a"}], step=1)


def collect_unequal(_):
    def worker(prompt, sampling, session):
        return {"x": 1, **({"y": 2} if session.session_id else {})}

    with RolloutDispatcher(LocalPool(worker), config={"dispatch": {"n": 2}}) as open_one:
        open_one.collect([{"uid": "a"}], step=1)


def submit_to_earlier(_):
    queue = MemoryQueue()
    pools = [LocalPool(lambda *_: {"x": 1}) for _ in range(2)]
    with RolloutDispatcher(pools[0], queue) as earlier, RolloutDispatcher(pools[1], queue):
        earlier.submit([{"uid": "a"}], step=1)


def submit_to_closed(_):
    closed = dispatcher()
    closed.close()
    closed.submit([{"uid": "a"}], step=1)


CASES = [
    (
        "a batch without a step",
        lambda _: submit([{"uid": "a"}]),
        BatchError,
        "global_steps",
        """\
global_steps: no step is given
  -> pass step=... or add the field to the batch""",
    ),
    (
        "a uid whose group was not taken",
        collect_again,
        BatchError,
        "uid",
        """\
uid: an earlier prompt of the uid 'a' is in flight
  -> give this one a uid of its own; or first take the other's group, or give it up: cancel its \
batch""",
    ),
    *(
        (
            f"the step {step!r}",
            lambda _, step=step: submit([{"uid": "a"}], step=step),
            BatchError,
            "global_steps",
            f"global_steps: expected a whole number, got {step!r}",
        )
        for step in ("3", 1.5)
    ),
    (
        "a refill for collect",
        collect_refilled,
        ConfigError,
        "replay.on_incomplete",
        """\
replay.on_incomplete: collect() has no prompts to refill a group with
  -> use raise, drop or min_viable (dispatch.max_retries and max_data_retries try sessions again); \
refill is for ReplayBuffer(queue, refill=...)""",
    ),
    (
        "rows of unequal fields",
        collect_unequal,
        UnequalFieldsError,
        "partition 'train'",
        """\
partition 'train': the rows do not hold the same fields: 'a_0_0' (session 0 of prompt 'a') lacks 'y'
  -> return the same fields from every session, or read those that all rows hold: x""",
    ),
    (
        "a batch without uids",
        lambda _: submit([{"x": "a"}], step=1),
        BatchError,
        "uid",
        """\
uid: the batch has no uids
  -> add a field that names each prompt""",
    ),
    (
        "two prompts of one uid",
        lambda _: submit([{"uid": "a"}, {"uid": "a"}], step=1),
        BatchError,
        "uid",
        "uid: duplicate uids: a",
    ),
    *(
        (
            f"a batch without prompts: {prompts}",
            lambda _, prompts=prompts: submit(prompts, step=1),
            BatchError,
            "",
            """\
the batch has no prompts
  -> pass a TensorDict of batch size (prompts,), or a list of one mapping per prompt""",
        )
        for prompts in ([], [{"uid": "a"}, None])
    ),
    *(
        (
            f"a prompt with {n!r} sessions",
            lambda _, n=n: submit([{"uid": "a", "__rollout_n__": n}], step=1),
            BatchError,
            "__rollout_n__",
            f"""\
__rollout_n__: {n!r} sessions for prompt 0
  -> set at least one""",
        )
        for n in (0, 2.5, "x")
    ),
    (
        "a policy that returns no placement",
        lambda _: generate("builtins:id"),
        ConfigError,
        "dispatch.policy",
        """\
dispatch.policy: the policy returned a int
  -> return a Placement""",
    ),
    (
        "a closed dispatcher",
        submit_to_closed,
        DispatcherClosedError,
        "",
        """\
this dispatcher is closed
  -> make a new one""",
    ),
    (
        "a second dispatcher of a queue",
        submit_to_earlier,
        RlskipError,
        "",
        """\
another RolloutDispatcher was made for this queue
  -> use that one, or close it; or give each a queue of its own""",
    ),
    (
        "a journal without a directory",
        lambda _: dispatcher(journal=True),
        ConfigError,
        "dispatch.journal",
        """\
dispatch.journal: a journal needs the directory of the dumps
  -> pass store=... to the dispatcher; SkipManager.store('rollout') returns the store of an \
enabled role (+skip=rollout_cache)""",
    ),
]
