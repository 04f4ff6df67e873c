"""One decorated call next to ``joblib.Memory`` and ``diskcache.Cache.memoize``, in one process.

There is a call that returns a small dict, and one that returns 8 MB of token ids; both take and
return tensors. Ours syncs a dump to disk before the caller gets the result; neither peer syncs.
Figures are medians.

small_hit, big_hit    a call whose result is on disk, in milliseconds
small_miss, big_miss  a call whose result is computed, and kept
*_diskcache           the same figure of ours next to diskcache instead of joblib
files, functions, classes
                      the library's files, distinct code objects, and classes with such
                      a method that a later call of a run goes through; the peer's is joblib's

Needs joblib and diskcache in the same environment: pip install joblib diskcache
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType
from typing import Any

import diskcache
import joblib
import torch

import rlskip
from benchmarks._report import Goal, Row, arguments, report, versions
from rlskip import SkipManager

SMALL, BIG = 300, 30
GOALS = {
    "small_hit": 1.0, "big_hit": 0.4, "small_miss": 4.0, "big_miss": 1.0,
    "files_miss": 20, "files_hit": 15, "functions_miss": 140, "functions_hit": 100,
    "classes_miss": 14, "classes_hit": 10,
}  # fmt: skip


def small(prompts: dict[str, Any], temperature: float = 1.0) -> dict[str, Any]:
    return {"responses": prompts["input_ids"] + 1, "texts": ["a text", "another"]}


def big(prompts: dict[str, Any], temperature: float = 1.0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(int(prompts["input_ids"].sum()))
    return {"responses": torch.randint(0, 150_000, (1024, 1024), generator=generator)}


def prompts_of(call: int) -> dict[str, Any]:
    return {"input_ids": torch.arange(16).reshape(2, 8) + call}


def caches(directory: str) -> dict[str, Callable[[Any], Callable[..., Any]]]:
    """The three decorators, each with its own directory."""
    memory = joblib.Memory(f"{directory}/joblib", verbose=0)
    cache = diskcache.Cache(f"{directory}/diskcache", eviction_policy="none", size_limit=1 << 40)
    return {
        "rlskip": lambda stage: SkipManager.annotate(role="rollout")(stage),
        "joblib": memory.cache,
        "diskcache": lambda stage: _memoized(cache, stage),
    }


def _memoized(cache: Any, stage: Any) -> Callable[..., Any]:
    """diskcache makes keys of hashable arguments alone."""
    remembered = cache.memoize()(lambda ids: stage({"input_ids": torch.tensor(ids)}))
    return lambda prompts: remembered(tuple(map(tuple, prompts["input_ids"].tolist())))


def start(directory: str) -> None:
    SkipManager.init(
        {
            "skip": {
                "dump_dir": f"{directory}/rlskip",
                "background_write": False,
                "experiment_name": "caches",
                "rollout": {"enable": True},
            }
        }
    )


def seconds(stage: Any, calls: int) -> Iterator[tuple[str, str, float]]:
    """Name of the cache, ``miss`` or ``hit``, and the median of its calls in milliseconds."""
    with tempfile.TemporaryDirectory() as directory:
        decorated = {name: decorate(stage) for name, decorate in caches(directory).items()}
        for kind in ("miss", "hit"):
            start(directory)
            taken: dict[str, list[float]] = {name: [] for name in decorated}
            # They take turns, so that a slow phase of the machine affects all.
            for call in range(1, calls + 1):
                SkipManager.set_step(call)
                for name, function in decorated.items():
                    began = time.perf_counter()
                    function(prompts_of(call))
                    taken[name].append(time.perf_counter() - began)
            for name, figures in taken.items():
                yield name, kind, statistics.median(figures) * 1e3
        SkipManager.reset()


def passed(name: str, kind: str) -> tuple[int, int, int]:
    """The files, functions and classes of a library that a later call of a run goes through."""
    library = rlskip if name == "rlskip" else joblib
    home = str(Path(str(library.__file__)).parent)
    seen: set[CodeType] = set()

    def note(frame: Any, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(home):
            seen.add(frame.f_code)

    with tempfile.TemporaryDirectory() as directory:
        function = caches(directory)[name](small)
        for _ in range(1 if kind == "miss" else 2):
            if name == "rlskip":
                start(directory)
            for call in range(1, 6):
                if name == "rlskip":
                    SkipManager.set_step(call)
                seen.clear()
                sys.setprofile(note)
                try:
                    function(prompts_of(call))
                finally:
                    sys.setprofile(None)
        SkipManager.reset()
    names = {(c.co_filename, getattr(c, "co_qualname", "")) for c in seen}  # of Python 3.11
    owners = {(file, name.split(".<locals>")[0].rpartition(".")[0]) for file, name in names}
    classes = {owner for owner in owners if owner[1]}
    return len({code.co_filename for code in seen}), len(seen), len(classes)


def main() -> None:
    options = arguments(__doc__).parse_args()
    rows = []
    for size, stage, calls in (("small", small, SMALL), ("big", big, BIG)):
        found = {(name, kind): figure for name, kind, figure in seconds(stage, calls)}
        for kind in ("hit", "miss"):
            what, ours = f"{size}_{kind}", found["rlskip", kind]
            rows += [
                Row(what, ours, "ms", found["joblib", kind], Goal("<=", GOALS[what])),
                Row(f"{what}_diskcache", ours, "ms", found["diskcache", kind]),
            ]
    for kind in ("hit", "miss"):
        counts, peers = passed("rlskip", kind), passed("joblib", kind)
        for what, mine, other in zip(("files", "functions", "classes"), counts, peers, strict=True):
            goal = Goal("<=", GOALS[f"{what}_{kind}"])
            rows += [
                Row(f"{what}_{kind}", mine, "", goal=goal),
                Row(f"{what}_{kind}_joblib", other, ""),
            ]
    report(rows, versions("joblib", "diskcache"), options.json)


if __name__ == "__main__":
    main()
