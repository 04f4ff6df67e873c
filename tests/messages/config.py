"""Of a config: unknown keys, impossible values, a node of another form."""

from rlskip.config.settings import read_skip

SEVERAL = {"wait_s": "long", "on_mis": "error", "rollout": {"enable": "x"}}
CASES = [
    ("several problems", lambda _: read_skip({"skip": SEVERAL})),
    ("an option that Hydra did not find", lambda _: read_skip({"skip": "rollout_cache"})),
]
