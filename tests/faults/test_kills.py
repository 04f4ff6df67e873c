"""Jobs that are killed at any moment, again and again: nothing torn, lost, mixed or served twice.

A window is a few steps that jobs work on until the last of them gets through. Jobs are forks of one
process, which kills some of them. Each draw of a stage is a random number, so a number tells where
rollouts come from. Jobs write one line for each draw and for each call that returned.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

_COMMON = """
    import asyncio, contextlib, functools, itertools, json, os, random, signal, sys, time
    from collections import Counter
    from pathlib import Path
    import torch
    import torch.distributed as dist
    from rlskip import SkipManager
    from rlskip.dispatch import LocalPool, RolloutDispatcher
    from rlskip.jobs import alive, lease
    from rlskip.skip import call_role
    from rlskip.store import StepStore
    import rlskip.skip.roles  # here once, not in every child

    call_role.SingleFlight = functools.partial(lease.SingleFlight, poll_s=0.01)
    folder, kills = Path(sys.argv[1]), int(sys.argv[2])
    chance, system = random.Random(0), random.SystemRandom()
    log = os.open(folder / "log", os.O_CREAT | os.O_RDWR | os.O_APPEND)

    def say(*words):
        os.write(log, (json.dumps(words) + "\\n").encode())

    def said(kind):
        lines = map(json.loads, (folder / "log").read_text().splitlines())
        return [words[1:] for words in lines if words[0] == kind]

    def begin(**keys):
        skip = {"dump_dir": str(folder / "dumps"), "wait_s": 600, "background_write": False}
        SkipManager.init({"skip": {**skip, **keys, "rollout": {"enable": True}}})

    def later(lines):
        # Jobs write so many lines, and work a moment more: a kill must hit them at work.
        size, deadline = os.fstat(log).st_size, time.monotonic() + 1
        while lines and time.monotonic() < deadline:
            if os.fstat(log).st_size != size:
                size, lines = os.fstat(log).st_size, lines - 1
            time.sleep(0.001)
        time.sleep(chance.uniform(0, 0.02))

    def start(job, *args):
        child = os.fork()
        if not child:
            code = 1
            try:
                job(*args)
                code = 0
            except BaseException as error:
                say("error", repr(error)[:500])
            finally:
                os._exit(code)
        return child

    done, torn = 0, 0

    def windows(steps=1):
        # The first step of each, until enough jobs were killed.
        for first in itertools.count(1, steps):
            yield first
            if done == kills:
                return

    def kill(child):
        global done, torn
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        done += 1
        for work in (folder / "dumps").glob("*_*/GBS*/.work"):
            torn += any("~" in name or name.startswith("lease") for name in os.listdir(work))

    def has_ended(child):
        # Without taking its number back, which may be another process's then.
        return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def ends_well(child):
        assert os.waitpid(child, 0)[1] == 0, said("error")

    def run_directory():
        (found,) = (folder / "dumps").glob("*_*/GBS*")
        return found

    def finish(errors=0):
        assert len(said("error")) <= errors, said("error")
        run = run_directory()
        assert not [name for name in os.listdir(run) if ".bad-" in name], "nothing is damaged"
        alive.sweep(run)
        work = run / alive.WORK
        left = [name for name in os.listdir(work) if name != f"job-{alive._HEART.token}"]
        # Who is killed before its own file names its process holds nothing yet.
        assert all(name.startswith("job-") and not (work / name).read_text() for name in left), left
        print(json.dumps({"kills": done, "torn": torn}))
"""

_CALLS = """
    JOBS, CALLS = 3, "aab"

    def job(first):
        begin()

        @SkipManager.annotate(role="rollout", stage="generate")
        def generate(prompts):
            draw = system.getrandbits(62)
            say("made", prompts, draw)
            return {"draw": torch.full((5000,), draw), "of": prompts}

        for step in range(first, first + 3):
            SkipManager.set_step(step)
            for index, prompts in enumerate(CALLS):
                got = generate(prompts)
                assert got["of"] == prompts
                (draw,) = set(got["draw"].tolist())
                say("got", step, index, draw)

    for first in windows(3):
        jobs = [start(job, first) for _ in range(JOBS)]
        for _ in range(min(12, kills - done)):
            later(chance.randint(0, 4))
            kill(jobs.pop(chance.randrange(JOBS)))
            jobs.append(start(job, first))
        for child in jobs:
            ends_well(child)
        made = len(said("made"))
        ends_well(start(job, first))
        assert len(said("made")) == made, "nothing is lost: the last job finds every dump"
    draws = {}
    for step, index, draw in said("got"):
        assert draws.setdefault((step, index), draw) == draw, "one job generates a call"
    assert len({*draws.values()}) == len(draws), "a dump serves one call"
    store = StepStore(run_directory())
    for step in range(1, first + 3):
        found = [store.load(step, call=call)["draw"][0].item() for call in store.in_order(step)]
        assert sorted(found) == sorted(draws[step, index] for index in range(len(CALLS)))
    finish()
"""

_JOURNALS = """
    PROMPTS, N = [1, 2, 3], 4

    def job(step):
        begin()
        made = itertools.count()

        async def worker(prompt, sampling, session):
            await asyncio.sleep(0.002)
            draw = system.getrandbits(62)
            say("made", step, prompt["input_ids"].item(), draw)
            return {"draw": torch.tensor([draw]), "content": prompt["input_ids"]}

        @SkipManager.annotate(role="rollout", prompts="contents")
        def generate(contents):
            prompts = [{"uid": f"u{i}", "input_ids": one} for i, one in enumerate(contents)]
            return dispatcher.collect(prompts, step=step)[0]

        SkipManager.set_step(step)
        config = {"rollout_level": True, "n": N, "journal": True,
                  "max_concurrent_rollouts_per_worker": 1}
        pool, store = LocalPool(worker, 1), SkipManager.store("rollout")
        with RolloutDispatcher(pool, config={"dispatch": config}, store=store) as dispatcher:
            rows = generate(torch.tensor(PROMPTS)[:, None])
        say("got", step, *([*map(int, rows[name])] for name in ("content", "draw")))

    killed = Counter()
    for step in windows():
        child = start(job, step)
        while done < kills and killed[step] < 6:
            later(chance.randint(0, 5))
            if has_ended(child):
                break
            kill(child)
            killed[step] += 1
            child = start(job, step)
        ends_well(child)
    made = {}
    for at, prompt, draw in said("made"):
        assert draw not in made
        made[draw] = (at, prompt)
    for at, contents, draws in said("got"):
        assert sorted(contents) == sorted(PROMPTS * N)
        assert len({*draws}) == len(draws), "no session is served twice"
        assert [made[draw] for draw in draws] == [(at, one) for one in contents], "nor mixed"
    for at in range(1, step + 1):
        ran = sum(where == at for where, _ in made.values())
        # A kill costs what runs, and what ended a moment before and was not written yet.
        assert ran <= len(PROMPTS) * N + 4 * killed[at], "nothing else is lost"
    finish()
"""

_RANKS = """
    CALLS, WORLD = "aab", 2

    def rank_of_job(rank, attempt, step):
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        at = f"file://{folder}/rendezvous-{attempt}"
        dist.init_process_group("gloo", rank=rank, world_size=WORLD, init_method=at)
        begin()

        @SkipManager.annotate(role="rollout", stage="generate")
        def generate(prompts):
            draw = [system.getrandbits(62)]
            dist.broadcast_object_list(draw, src=0)
            return {"draw": torch.full((5000,), draw[0]), "rank": rank, "of": prompts}

        SkipManager.set_step(step)
        for index, prompts in enumerate(CALLS):
            got = generate(prompts)
            assert (got["rank"], got["of"]) == (rank, prompts)
            (draw,) = set(got["draw"].tolist())
            say("got", attempt, step, index, rank, draw)

    def end(children, patience=3 * alive.DEAD_S):
        # A lease that its owner made and had not written when it was killed is nobody's for
        # `DEAD_S` seconds.
        codes, deadline = [], time.monotonic() + patience
        while children:
            for child in [*children]:
                ended, code = os.waitpid(child, os.WNOHANG)
                if ended:
                    children.remove(child)
                    codes.append(code)
                elif time.monotonic() > deadline:
                    os.kill(child, signal.SIGKILL)
            time.sleep(0.002)
        return codes

    attempts = itertools.count()

    def begin_ranks(step):
        attempt = next(attempts)
        return [start(rank_of_job, rank, attempt, step) for rank in range(WORLD)]

    for step in windows():
        for _ in range(min(4, kills - done)):
            children, seen = begin_ranks(step), len(said("got"))
            if chance.random() < 0.8:  # most of the time is for them to meet
                while len(said("got")) == seen and not has_ended(children[0]):
                    time.sleep(0.002)
            time.sleep(chance.uniform(0, 0.03))
            kill(children.pop(chance.randrange(len(children))))
            end(children, 3)  # the other one's error says that its peer is gone
        assert end(begin_ranks(step)) == [0, 0], said("error")
    got, whole = {}, {}
    for attempt, at, index, rank, draw in said("got"):
        ranks = got.setdefault((attempt, at, index), {})
        ranks[rank] = draw
        assert len({*ranks.values()}) == 1, "the ranks' shards are of one generation"
        if len(ranks) == WORLD:
            assert whole.setdefault((at, index), draw) == draw, "what all ranks had is not lost"
    assert len({*whole.values()}) == len(whole), "a dump serves one call"
    stores = [StepStore(run_directory(), rank=rank, world_size=WORLD) for rank in range(WORLD)]
    for at in range(1, step + 1):
        for call in stores[0].calls(at):
            draws = {store.load(at, call=call)["draw"][0].item() for store in stores}
            assert len(draws) == 1
    finish(errors=kills)  # of the peers of those that were killed
"""

_RETENTION = """
    CALLS, KEEP, STEPS = "aab", 2, 4

    def job(first):
        begin(keep_last=KEEP)

        @SkipManager.annotate(role="rollout", stage="generate")
        def generate(prompts):
            return {"draw": torch.full((500,), system.getrandbits(62)), "of": prompts}

        draws = []
        for step in range(first, first + STEPS):
            SkipManager.set_step(step)
            for prompts in CALLS:
                got = generate(prompts)
                assert got["of"] == prompts
                draws += {*got["draw"].tolist()}
                say("got", step)
        assert len({*draws}) == len(draws) == STEPS * len(CALLS), "a dump serves one call"

    def look():
        store = StepStore(run_directory())
        for step, places in store.listed_by_step().items():
            calls = [place.call for place in places]
            assert calls[0] == "", "the first call is there as long as any other"
            for call in calls:
                assert len({*store.load(step, call=call)["draw"].tolist()}) == 1
        return len(store.listed_by_step())

    for first in windows(STEPS):
        child = start(job, first)
        for _ in range(min(8, kills - done)):
            later(chance.randint(1, STEPS * len(CALLS) - 1))
            kill(child)
            look()
            child = start(job, first)
        ends_well(child)
        assert look() == KEEP, "whoever was killed while it removed, the next one removes the rest"
    finish()
"""

LONG = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(3600)]


@pytest.mark.parametrize(
    ("script", "kills"),
    [
        pytest.param(_CALLS, 7, id="calls of several jobs"),
        pytest.param(_JOURNALS, 4, id="journals"),
        pytest.param(_RANKS, 3, id="ranks"),
        pytest.param(_RETENTION, 5, id="retention"),
        pytest.param(_CALLS, 1300, id="calls of several jobs, long", marks=LONG),
        pytest.param(_JOURNALS, 500, id="journals, long", marks=LONG),
        pytest.param(_RANKS, 200, id="ranks, long", marks=LONG),
        pytest.param(_RETENTION, 500, id="retention, long", marks=LONG),
    ],
)
def test_nothing_is_torn_lost_mixed_or_served_twice(
    script: str, kills: int, python: Any, tmp_path: Path
) -> None:
    counts, _ = python.json(_COMMON + script, tmp_path, kills, timeout=3500)
    assert counts["kills"] == kills
    if kills > 100:
        assert counts["torn"] > kills // 20, "the kills must hit jobs in the middle of something"
