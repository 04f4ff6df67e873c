"""TRL's environments (`environment_factory`): a reward must not read what no dump holds.

TRL resets its environments before it generates, so a replay resets them too. Their methods are
the tools that are called while it generates: a replay skips these calls, and leaves each
environment as `reset` left it.
"""

from __future__ import annotations

from typing import Any, NoReturn

from rlskip.errors import ConfigError


def hide(trainer: Any) -> None:
    """Replace the environments of the present batch, so that a reward that reads one is refused."""
    if getattr(trainer, "environments", None):
        trainer.environments = _Hidden()


class _Hidden:
    """Replaces a batch's environments where rewards are computed."""

    def __getitem__(self, _: Any) -> NoReturn:  # to iterate is to ask for items, too
        raise ConfigError(
            "a reward reads `environments`, whose state a replay does not restore, because it "
            "skips the calls that change it",
            "rlskip.hosts.trl.attach",
            "compute the reward from `completions`, which hold the calls of tools and their "
            "results, or train without skip",
        )
