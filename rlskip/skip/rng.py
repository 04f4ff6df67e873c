"""The states of the global random generators, as they were after a stage."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from rlskip.errors import ConfigError
from rlskip.store import CorruptDumpError


def capture_rng() -> dict[str, Any]:
    """States of the global python, numpy and torch generators (CUDA's too, where in use).

    Returns plain data: ints, strings, and uint8/uint32 arrays and tensors.
    """
    import torch  # here and below: a job that starts without a call needs none

    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": {"version": version, "words": np.array(words, dtype=np.int64), "gauss": gauss},
        "numpy": {
            "name": name,
            "keys": keys,
            "position": int(position),
            "has_gauss": int(has_gauss),
            "cached": float(cached),
        },
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
    }


def restore_rng(states: dict[str, Any] | None) -> None:
    """Put the generators where :func:`capture_rng` found them.

    Raises
    ------
    ConfigError
        The dump has none.
    CorruptDumpError
        They are not states of generators.
    """
    if states is None:
        raise ConfigError(
            "the dump has no states of the random generators",
            "skip.restore_rng",
            "replay it with skip.restore_rng=false",
        )
    import torch

    try:
        python, legacy = states["python"], states["numpy"]
        words = tuple(python["words"].tolist())
        random.setstate((python["version"], words, python["gauss"]))
        names = ("name", "keys", "position", "has_gauss", "cached")
        np.random.set_state(tuple(legacy[name] for name in names))
        torch.set_rng_state(states["torch"])
        if states["cuda"] and len(states["cuda"]) == torch.cuda.device_count():
            torch.cuda.set_rng_state_all(states["cuda"])
    except Exception as error:  # a file's values may be anything
        raise CorruptDumpError("it does not hold states of the random generators") from error
