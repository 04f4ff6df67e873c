"""Of the nodes of a config: unknown keys, impossible values, a node of another form."""

from rlskip.config.replay import read_replay
from rlskip.config.settings import read_skip
from rlskip.errors import ConfigError, NotInstalledError


def read(**skip):
    return read_skip({"skip": skip})


CASES = [
    (
        "several problems",
        lambda _: read(wait_s="long", on_mis="error", rollout={"enable": "x"}),
        ConfigError,
        "",
        """\
3 problems in the configuration:
  - skip.wait_s: expected float, got 'long' (str); seconds to wait for another job that generates \
the same step; 0: not at all
  - skip.on_mis: unknown key; did you mean skip.on_miss?
  - skip.rollout.enable: expected bool, got 'x' (str); whether this role skips at all; an option \
sets it""",
    ),
    (
        "an option that Hydra did not find",
        lambda _: read_skip({"skip": "rollout_cache"}),
        NotInstalledError,
        "skip",
        """\
skip: 'rollout_cache' arrived as a plain string, so Hydra did not discover rlskip's plug-in
  -> install rlskip into the environment that runs this application and check with \
`python <app> --info plugins` (look for RlskipSearchPathPlugin); if `skip` is the application's \
own key, rename it: rlskip's node has that name""",
    ),
    (
        "an application's own key of that name",
        lambda _: read_replay({"replay": {"eval_batches": 3}}),
        ConfigError,
        "replay.eval_batches",
        """\
replay.eval_batches: unknown key
  -> known: on_incomplete, min_viable, max_refills, n, val_n, max_off_policy_threshold, \
max_off_policy_strategy, timeout_s, progress_interval_s; if `replay` is the application's own \
key, rename it: rlskip's node has that name""",
    ),
]
