"""The dataclasses of the nodes in Hydra's ConfigStore, under ``rlskip_schema/``.

``rlskip_schema/skip``, first in a defaults list, gives the node `skip` its types, its defaults and
its completion. Every Hydra application stores these configs; only one that names one pays for it.
"""

from __future__ import annotations

from typing import Any

from hydra.core.config_store import ConfigNode, ConfigStore
from omegaconf import DictConfig, OmegaConf

from rlskip_conf import NODES, SCHEMAS


class LazyNode(ConfigNode):
    """A dataclass in the store that is imported and made when an application loads it."""

    def __init__(self, name: str) -> None:
        self._node: Any = None
        super().__init__(f"{name}.yaml", None, SCHEMAS, package=name, provider="rlskip")  # type: ignore[arg-type]

    # The store copies this object at each load, then sets `node` of the copy.
    @property
    def node(self) -> Any:
        if self._node is None:
            from rlskip.config import other_nodes, skip  # which cost more than a start may

            name = str(self.package)
            schema = getattr(other_nodes, f"{name.title()}Config", skip.SkipManagerConfig)
            node = self._node = OmegaConf.structured(schema)
            # It takes further keys, such as roles; rlskip's reader finds typos.
            for opened in (node, *node.values()):
                if isinstance(opened, DictConfig):
                    OmegaConf.set_struct(opened, False)
            if name in ("skip", "record"):  # as their options do
                node.defaults = [f"/{SCHEMAS}/callback@_global_.hydra.callbacks", "_self_"]
        return self._node

    @node.setter
    def node(self, value: Any) -> None:
        self._node = value


def store_schemas() -> None:
    """Put all nodes, and the open one, into the ConfigStore; may be called several times.

    Options start from ``rlskip_schema/open``, an empty node whose struct flag is off, so that
    ``skip.steps=...`` works without ``++``. It is untyped, because hosts convert theirs.
    """
    # Not by `ConfigStore.store`, which makes a node at once and warns of one that is there.
    group = ConfigStore.instance().repo.setdefault(SCHEMAS, {})
    group |= {f"{name}.yaml": LazyNode(name) for name in NODES}
    empty = OmegaConf.create({}, flags={"struct": False})
    group["open.yaml"] = ConfigNode("open.yaml", empty, SCHEMAS, package=None, provider="rlskip")
