"""The dataclasses of the nodes in Hydra's ConfigStore, under ``rlskip_schema/``.

``rlskip_schema/skip``, first in a defaults list, gives the node `skip` its types, its defaults and
its completion. Every Hydra application of the environment stores these configs at its start, but
only one that names a config pays for it.
"""

from __future__ import annotations

from hydra.core.config_store import ConfigNode, ConfigStore
from omegaconf import DictConfig, OmegaConf

from rlskip_conf import NODES, SCHEMAS


class LazyNode(ConfigNode):
    """A dataclass in the store that is imported and made when an application loads it."""

    def __init__(self, name: str) -> None:
        super().__init__(f"{name}.yaml", None, SCHEMAS, package=name, provider="rlskip")  # type: ignore[arg-type]

    # The store copies this object at each load, then sets `node` of the copy.
    @property
    def node(self) -> DictConfig:  # type: ignore[override]
        if self._node is None:
            self._node = _make(str(self.package))
        return self._node

    @node.setter
    def node(self, value: DictConfig | None) -> None:
        self._node = value


def _make(name: str) -> DictConfig:
    """A typed node that takes further keys, such as roles; rlskip's reader finds typos."""
    from rlskip.config import other_nodes, skip  # which cost more than a start may

    schema = getattr(other_nodes, f"{name.title()}Config", skip.SkipManagerConfig)
    node: DictConfig = OmegaConf.structured(schema)
    for opened in (node, *node.values()):
        if isinstance(opened, DictConfig):
            OmegaConf.set_struct(opened, False)
    if name in ("skip", "record"):  # as their options do
        node.defaults = [f"/{SCHEMAS}/callback@_global_.hydra.callbacks", "_self_"]
    return node


def store_schemas() -> None:
    """Put all nodes, and the open one, into the ConfigStore; may be called several times.

    ``rlskip_schema/open`` is an empty node whose struct flag is off. An option that starts from
    it makes ``skip.steps=...`` work without ``++`` and keeps what a user's own YAML sets. It is
    untyped, because hosts convert their node with their own classes.
    """
    # Not by `ConfigStore.store`, which makes a node at once and warns of one that is there.
    group = ConfigStore.instance().repo.setdefault(SCHEMAS, {})
    group |= {f"{name}.yaml": LazyNode(name) for name in NODES}
    empty = OmegaConf.create({}, flags={"struct": False})
    group["open.yaml"] = ConfigNode("open.yaml", empty, SCHEMAS, package=None, provider="rlskip")
