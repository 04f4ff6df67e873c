"""The dataclasses of the nodes in Hydra's ConfigStore, under ``rlskip_schema/``.

``rlskip_schema/skip``, first in a defaults list, gives the node `skip` its types, its defaults and
its completion. The start of every Hydra application of the environment stores these configs, but
only one that names a config pays for it.
"""

from __future__ import annotations

import functools
import importlib

from hydra.core.config_store import ConfigNode, ConfigStore
from omegaconf import DictConfig, OmegaConf

from rlskip_conf import NODES, SCHEMAS

PROVIDER = "rlskip"

# Naming one of these adds rlskip's callback, as its options do.
_WITH_CALLBACK = ("skip", "record")
_DEFAULTS = [f"/{SCHEMAS}/callback@_global_.hydra.callbacks", "_self_"]


class LazyNode(ConfigNode):
    """A dataclass in the store that is imported and made when an application loads it."""

    def __init__(self, name: str) -> None:
        self._made: DictConfig | None = None
        super().__init__(f"{name}.yaml", None, SCHEMAS, package=name, provider=PROVIDER)  # type: ignore[arg-type]

    # The store copies this object at each load, then sets `node` of the copy to a copy of `node`.
    @property
    def node(self) -> DictConfig:  # type: ignore[override]
        if self._made is None:
            self._made = _make(self.name.removesuffix(".yaml"))
        return self._made

    @node.setter
    def node(self, value: DictConfig | None) -> None:
        self._made = value


@functools.cache  # the store gives copies away
def _make(name: str) -> DictConfig:
    """A typed node that takes further keys: roles of the user's, and verl's ``_target_``.

    rlskip's validation finds typos, all of them at once, with the nearest known key.
    """
    module = importlib.import_module(f"rlskip.config.{name}")  # which costs more than a start may
    schema = "SkipManagerConfig" if name == "skip" else f"{name.title()}Config"
    node: DictConfig = OmegaConf.structured(getattr(module, schema))
    for opened in (node, *node.values()):
        if isinstance(opened, DictConfig):
            OmegaConf.set_struct(opened, False)
    if name in _WITH_CALLBACK:
        node.defaults = _DEFAULTS
    return node


def store_schemas() -> None:
    """Put all nodes, and the open one, into the ConfigStore; may be called several times.

    ``rlskip_schema/open`` is an empty node whose struct flag is off. An option that starts from
    it makes ``skip.steps=...`` work without ``++`` and sets nothing, so the values in a user's
    own YAML are kept. It is untyped, because hosts convert their node with their own classes.
    """
    # Not by `ConfigStore.store`, which makes a node at once and warns of one that is there.
    group = ConfigStore.instance().repo.setdefault(SCHEMAS, {})
    group |= {f"{name}.yaml": LazyNode(name) for name in NODES}
    empty = OmegaConf.create({}, flags={"struct": False})
    group["open.yaml"] = ConfigNode("open.yaml", empty, SCHEMAS, package=None, provider=PROVIDER)
