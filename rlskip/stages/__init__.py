"""What the stages of a step computed, recorded row by row for ``rlskip compare``.

>>> rlskip.record("advantages", advantages, rows=batch)
>>> rlskip.record("loss", loss)

Recording is off unless the config has ``record.enable: true`` (``+record=stages``). Importing this
package is light.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlskip.config.other_nodes import RecordConfig
    from rlskip.stages.recorder import Recorder

log = logging.getLogger(__name__)

# What records in this process; None while recording is off.
_recorder: Recorder | None = None
# Hydra's own state, kept because to ask for it takes longer than a call may, and the config of the
# job of which it is known whether it records.
_hydra: Any = None
_settled: Any = None


def record(name: str, value: Any, *, rows: Any = None) -> None:
    """Record what a stage computed at the present step. It costs one look-up while that is off.

    Never raises: what cannot be recorded costs a warning, once for each reason.

    Parameters
    ----------
    name
        The stage's name, such as ``advantages``. All records of one name and step are one stage.
    value
        A tensor or an array of real numbers, on any device, a number, a text, or a mapping of
        these, whose entries are recorded as ``{name}.{key}``. It is copied.
    rows
        The batch that the value belongs to (a TensorDict, a DataProto, a mapping of columns): its
        rows are named by their tokens, so that their order, their padding and their division into
        batches may differ between two runs. The value then has one entry for each row: shape [B],
        [B, ...], or [B, T] where T is the width of the responses, of the rows, or one less; or one
        for each sampled token of the batch. None: the value belongs to the whole step.
    """
    if _recorder is not None:
        _recorder.record(name, value, rows)
    elif "hydra.core.hydra_config" in sys.modules and (
        _hydra is None or _hydra.cfg is not _settled
    ):
        _settle()
        _warn_if_lost(_settled)


def _settle() -> None:
    """It is known from now on whether the present job of Hydra's records."""
    global _hydra, _settled
    module = sys.modules.get("hydra.core.hydra_config")
    if module is not None:
        _hydra = module.HydraConfig.instance()
        _settled = _hydra.cfg


def _warn_if_lost(job: Any) -> None:
    """Warn where a job chose to record, and no callback of rlskip's has started that."""
    from rlskip.config.nodes import add_callback, dropped_callback, record_chosen_by

    if job is not None and (chosen := record_chosen_by(job, enabled=True)):
        log.warning(
            "rlskip: %s was chosen for this job, and NOTHING is recorded: %s, or call "
            "SkipManager.init(cfg) first",
            chosen, dropped_callback(job) or add_callback(job),
        )  # fmt: skip


def comparable(metrics: Mapping[str, Any], of_the_machine: Sequence[str]) -> dict[str, Any]:
    """The numbers among a host's metrics, without those whose names have a part that is named."""

    def is_number(value: Any) -> bool:
        # A tensor is not asked for its value: of one that is spread over processes, all must ask.
        if getattr(value, "ndim", None) == 0 and hasattr(value, "dtype"):
            return getattr(value.dtype, "kind", "f") in "biuf"
        return isinstance(value, int | float)

    return {
        name: value
        for name, value in metrics.items()
        if not any(part in name for part in (*of_the_machine, "rlskip/")) and is_number(value)
    }


def start(settings: RecordConfig, step: Callable[[], int | None]) -> None:
    """Record from now on in this process, if `settings` say so; end what was recorded before.

    What is recorded is a job of its own, unless Hydra's callback or the user has named the job.
    `step` returns the present step of the training loop; None before the first.
    """
    global _recorder
    stop()
    _settle()
    if not settings.enable:
        return
    from rlskip.jobs.records import begin_job
    from rlskip.stages.recorder import Recorder

    begin_job()
    _recorder = Recorder(settings, step)
    atexit.register(stop)


def directory() -> Path | None:
    """Where this process records; None while recording is off."""
    return None if _recorder is None else _recorder.directory


def flush() -> None:
    """Wait until everything that was recorded is on disk."""
    if _recorder is not None and _recorder.process == os.getpid():
        _recorder.flush()


def stop() -> None:
    """Write everything that was recorded, and record no more."""
    global _recorder
    recorder, _recorder = _recorder, None
    if recorder is not None and recorder.process == os.getpid():
        atexit.unregister(stop)
        recorder.close()
