"""The search-path plug-in.

Not in `hydra_plugins` itself, because Hydra 1.3 executes the modules there again on every scan:
the class would then exist twice, and its pickles would fail.
"""

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin

from rlskip.config.register import register

register()


class RlskipSearchPathPlugin(SearchPathPlugin):
    """Adds rlskip's option files (`+skip=...`, `+dispatch=...`) to every application."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        # Appended, so that an application's own conf/skip/rollout_cache.yaml wins.
        search_path.append("rlskip", "pkg://rlskip_conf")
