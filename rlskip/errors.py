"""The one family of errors: each says what, where, and what to do next.

Every error subclasses :class:`RlskipError` and the built-in that fits it. The three parts are
positional ``args``, too: an error that is pickled on its way between processes arrives whole.
"""

from __future__ import annotations


class RlskipError(Exception):
    """Base of every error that rlskip raises.

    It says in one sentence what is wrong, where (the full config key or the path), and as remedy
    what to do or to type next; the last two may be empty.
    """

    def __init__(self, what: str, where: str = "", remedy: str = "") -> None:
        super().__init__(what, where, remedy)
        self.what = what
        self.where = where
        self.remedy = remedy

    def __str__(self) -> str:
        head = f"{self.where}: {self.what}" if self.where else self.what
        return f"{head}\n  -> {self.remedy}" if self.remedy else head


class ConfigError(RlskipError, ValueError):
    """A configuration that cannot be honoured."""


class MissError(RlskipError, LookupError):
    """`on_miss: error` and the step has no usable dump."""


class MismatchError(RlskipError, ValueError):
    """A dump exists for the step, but for other prompts or other sampling."""


class NoEngineError(RlskipError, RuntimeError):
    """`start_engine: false`, and something asks for a generation."""

    @classmethod
    def of(cls, asks: str) -> NoEngineError:
        """The error for what `asks` says: who asks, and for what."""
        return cls(
            f"rlskip started no inference engine, and {asks}",
            "skip.start_engine=false",
            "set skip.start_engine=true to generate",
        )


class NotInstalledError(RlskipError, RuntimeError):
    """`skip` was asked for on this job, but no SkipManager was installed."""


class RlskipAbort(BaseException):
    """Ends a job from inside a Hydra callback, of which Hydra logs an `Exception` and goes on."""
