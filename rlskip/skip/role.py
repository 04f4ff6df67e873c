"""What the manager asks of a role: every question is about one call."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlskip.errors import ConfigError
from rlskip.skip.call import Call, Stage

if TYPE_CHECKING:
    from rlskip.skip.dumps import Dumps
    from rlskip.store import StepStore


class Role:
    """When a call of a stage can be skipped, and what replaces it.

    For every call of the decorated function whose step is listed in ``skip.<role>.steps``, the
    manager asks :meth:`find`. If that is true, the call returns what :meth:`replay` returns. If it
    is false, or `replay` finds the dump unusable, the function itself runs and :meth:`keep` gets
    its result. All methods are plain functions. For an ``async`` stage the manager runs them in
    threads, several at a time: the state of a call is in the :class:`~rlskip.skip.call.Call`.

    Parameters
    ----------
    role
        Its name: the key under `skip`, and what ``annotate(role=...)`` names.
    local_config
        The role's dataclass, complete (``steps`` parsed, ``dump_dir`` absolute).
    """

    #: Whether every call has its own step (:meth:`extract_step`), for concurrent pipelines;
    #: else its step is the one that ``SkipManager.set_step`` set last.
    support_online_step: bool = False

    #: Whether the role concerns batches of validation, which all other roles ignore.
    serves_validation: bool = False

    #: Keyword options of ``annotate`` of this role, besides prompts and identity.
    stage_options: frozenset[str] = frozenset()

    #: Its directory of dumps; None: it has none.
    dumps: Dumps | None = None

    #: The number of a step's first part in the store; None: the step's own dump.
    first_part: int | None = None

    def __init__(self, role: str, local_config: Any) -> None:
        self.role = role
        self.local_config = local_config

    @property
    def directory(self) -> Path | None:
        """Where its dumps are; None where it has none."""
        return None if self.dumps is None else self.dumps.directory

    @property
    def store(self) -> StepStore | None:
        """What reads and writes its dumps; None where it has none."""
        return None if self.dumps is None else self.dumps.store

    def is_enabled(self) -> bool:
        return bool(self.local_config.enable)

    def find(self, call: Call) -> bool:
        """Whether `call` can be skipped. Cheap: presence and identity, no loading."""
        raise NotImplementedError

    def replay(self, call: Call) -> Any:
        """What replaces the result of `call`, which :meth:`find` found.

        Raises
        ------
        DumpError
            It turns out to be unusable: the call then counts as a miss, and the stage runs.
        """
        raise NotImplementedError

    def keep(self, call: Call, result: Any) -> None:
        """Keep `result`, which the stage returned, for the next run. Must not change it."""
        raise NotImplementedError

    def before_stage(self, call: Call) -> None:
        """Called on a miss, before the stage runs; may replace the prompts of `call`."""
        return

    def observes(self, stage: Stage) -> bool:
        """Whether `stage` always runs, at any step, and the role only reads its results.

        Then only :meth:`keep` is called, with the step that ``set_step`` set last (-1 before the
        first).
        """
        return False

    def begin_visit(self) -> None:
        """Called when the training loop's step number changes: a step may have several calls."""
        return

    def idle_at(self, step: int) -> bool:
        """Whether no call can concern this role while the training loop is at `step`."""
        return not (self.support_online_step or step in self.local_config.steps)

    def check_options(self, stage: Stage) -> None:
        """Refuse options of ``annotate`` that this role does not have."""
        unknown = sorted(stage.options.keys() - self.stage_options)
        if unknown:
            known = ", ".join(["prompts", "identity", *sorted(self.stage_options)])
            raise ConfigError(
                f"role {self.role} has no option {', '.join(unknown)}",
                f"SkipManager.annotate of {stage.name}",
                f"known: {known}",
            )

    def flush(self) -> None:
        """Finish what :meth:`keep` began; called when the job ends."""
        return

    def extract_step(self, *args: Any, **kwargs: Any) -> int:
        """The step of a call with these arguments, where :attr:`support_online_step` is true."""
        raise NotImplementedError(f"{type(self).__name__} has no online step")
