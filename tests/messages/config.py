"""Of a config: unknown keys, impossible values, a node of another form."""

from omegaconf import OmegaConf

from rlskip.config.settings import read_skip

SEVERAL = {"wait_s": "long", "on_mis": "error", "rollout": {"enable": "x"}}
FOUND_NOTHING = {"skip": "rollout_cache"}
CASES = [
    ("several problems", lambda _: read_skip({"skip": SEVERAL})),
    ("an option that Hydra did not find", lambda _: read_skip(OmegaConf.create(FOUND_NOTHING))),
]
