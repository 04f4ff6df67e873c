"""What Hydra and OmegaConf must know before an application composes its config.

Every Hydra application of the environment pays for this at its start, so it imports hardly
anything of ours: the schema with every default is a file, ``rlskip_conf/rlskip_schema/skip.yaml``,
which is read only where somebody asks for it.
"""

from __future__ import annotations

from typing import Any

from omegaconf import OmegaConf

from rlskip._compat import register_resolver, store_config

# Outside the groups that users choose from, so that nothing here shows up as an option.
GROUP = "rlskip_schema"
PROVIDER = "rlskip"


def register() -> None:
    """Put the open node into Hydra's ConfigStore and the resolvers into OmegaConf.

    ``rlskip_schema/open`` is an empty node whose struct flag is off. An option that starts from
    it makes ``skip.steps=...`` work without ``++`` yet sets nothing, so whatever a user's own
    YAML says survives. Typos are found by our own validation, not by struct mode. The node is
    untyped, because hosts convert theirs with classes of their own.

    Calling it again is harmless.
    """
    store_config(GROUP, "open", OmegaConf.create({}, flags={"struct": False}), PROVIDER)
    register_resolver("rlskip.steps", _resolve_steps)


def _resolve_steps(*pieces: Any) -> Any:
    from rlskip.config.steps import resolve_steps

    return resolve_steps(*pieces)
