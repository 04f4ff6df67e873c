"""The grammar of a target: which function of which module."""

from __future__ import annotations

import re

import attrs

from rlskip.errors import ConfigError

_TARGET = re.compile(r"(?P<module>[^\W\d]\w*(\.[^\W\d]\w*)*):(?P<path>[^\W\d]\w*(\.[^\W\d]\w*)*)")


class TargetError(ConfigError):
    """A string that names no function."""


@attrs.frozen
class Target:
    """``package.module:function`` or ``package.module:Class.method``."""

    module: str
    path: str

    @classmethod
    def parse(cls, text: str, where: str = "") -> Target:
        """Read `text`, which stands at config key `where`; raises :class:`TargetError`."""
        match = _TARGET.fullmatch(text)
        if match is None:
            raise TargetError(
                f"{text!r} names no function",
                where,
                'write "package.module:Class.method" or "package.module:function"',
            )
        return cls(match["module"], match["path"])

    def __str__(self) -> str:
        return f"{self.module}:{self.path}"
