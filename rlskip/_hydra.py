"""The search-path plug-in.

Not in `hydra_plugins` itself, because Hydra 1.3 executes the modules there again on every scan:
the class would then exist twice, and its pickles would fail.
"""

import re
import sys
from collections.abc import Sequence

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin

from rlskip.config.register import NODES, options, register

register()


class RlskipSearchPathPlugin(SearchPathPlugin):
    """Adds rlskip's option files (`+skip=...`, `+dispatch=...`) to every application."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        # Appended, so that an application's own conf/skip/rollout_cache.yaml wins.
        if not sets_own_key(sys.argv[1:]):
            search_path.append("rlskip", "pkg://rlskip_conf")


def sets_own_key(arguments: Sequence[str]) -> bool:
    """Whether a command sets an application's own key with the name of a node, and no option.

    Hydra takes `record=true` for the choice of an option wherever the search path has a group
    `record`, and refuses it. So an application that has nothing to do with rlskip gets no groups.
    """
    is_option = []
    for argument in arguments:
        name, _, value = argument.lstrip("+").partition("=")
        if name in NODES and value:
            from difflib import get_close_matches  # a misspelt option is one, and Hydra names it

            words = re.findall(r"\w+", value)
            is_option.append(any(get_close_matches(word, options(name)) for word in words))
    return bool(is_option) and not any(is_option)
