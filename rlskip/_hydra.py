"""The search-path plug-in.

Not in `hydra_plugins` itself, because Hydra 1.3 executes the modules there again on every scan:
the class would then exist twice, and its pickles would fail.
"""

from typing import Any

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin

from rlskip._compat import after_compose, spare_own_keys
from rlskip.config.register import register

#: The node `hydra` of what the compose API composed last in this process: it runs no callback
#: and installs no HydraConfig, so nothing else shows which options were chosen.
composed: Any = None


def _note(config: Any) -> None:
    global composed
    composed = {"hydra": config.hydra}


register()
after_compose(_note)
spare_own_keys("rlskip")


class RlskipSearchPathPlugin(SearchPathPlugin):
    """Adds rlskip's option files (`+skip=...`, `+dispatch=...`) to every application."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        # Appended, so that an application's own conf/skip/rollout_cache.yaml wins.
        search_path.append("rlskip", "pkg://rlskip_conf")
