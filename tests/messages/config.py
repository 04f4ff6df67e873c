"""Of a config: unknown keys, impossible values, a node of another form."""

from rlskip.config.settings import read_skip


def read(**skip):
    return read_skip({"skip": skip})


CASES = [
    ("several problems", lambda _: read(wait_s="long", on_mis="error", rollout={"enable": "x"})),
    ("an option that Hydra did not find", lambda _: read_skip({"skip": "rollout_cache"})),
]
