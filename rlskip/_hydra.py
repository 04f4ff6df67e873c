"""The search-path plug-in, and the source of the option files.

Not in `hydra_plugins` itself, because Hydra 1.3 executes the modules there again on every scan:
the classes would then exist twice, and their pickles would fail.
"""

import re
import sys
from collections.abc import Callable, Sequence

from hydra._internal.config_repository import ConfigRepository
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.object_type import ObjectType
from hydra.plugins.config_source import ConfigResult
from hydra.plugins.search_path_plugin import SearchPathPlugin

from rlskip.config.schema import store_schemas
from rlskip_conf import NODES, OPTIONS, options

store_schemas()


class RlskipSearchPathPlugin(SearchPathPlugin):
    """Adds rlskip's option files (`+skip=...`, `+dispatch=...`) to every application."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        def is_group(name: str) -> bool:
            return bool(ConfigRepository(search_path).group_exists(name))

        # Appended, so that an application's own conf/skip/rollout_cache.yaml wins.
        if not sets_own_key(sys.argv[1:], is_group):
            search_path.append("rlskip", f"{RlskipConfigSource.scheme()}://{OPTIONS}")


class RlskipConfigSource(FileConfigSource):
    """The option files, which the ``--help`` of an application that uses none does not list."""

    _used = False

    @staticmethod
    def scheme() -> str:
        return "rlskip"

    def load_config(self, config_path: str) -> ConfigResult:
        # Hydra composes before it lists the groups, and from a copy of this source.
        RlskipConfigSource._used = True
        return super().load_config(config_path)

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        hidden = not (config_path or self._used) and bool({"--help", "-h"} & {*sys.argv[1:]})
        return [] if hidden else super().list(config_path, results_filter)


def sets_own_key(
    arguments: Sequence[str], is_group: Callable[[str], bool] = lambda _: False
) -> bool:
    """Whether a command sets an application's own key with the name of a node, and no option.

    Hydra takes `record=true` for the choice of an option wherever the search path has a group
    `record`, and refuses it. So an application that has nothing to do with rlskip gets no groups.
    Where it has such a group itself, `is_group`, its options may build on ours.
    """
    is_option = []
    for argument in arguments:
        name, _, value = argument.lstrip("+").partition("=")
        if name in NODES and value and not is_group(name):
            from difflib import get_close_matches  # a misspelt option is one, and Hydra names it

            words, known = {*re.findall(r"\w+", value)} - {"true", "false"}, options(name)
            parts = {part for option in known for part in option.split("_")}  # `+skip=cache`
            is_near = any(get_close_matches(word, known) for word in words)
            is_option.append(is_near or not words.isdisjoint(parts))
    return bool(is_option) and not any(is_option)
