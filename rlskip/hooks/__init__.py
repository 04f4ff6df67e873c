"""The Hydra callback: installs SkipManager and the recorder of stages, and writes a summary.

Launchers send a pickled copy of the callback to their workers without calling `__init__`, so
everything is read from `config`, and nothing is kept between jobs.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from rlskip.config.check import look_up
from rlskip.config.facts import Origin, retire_legacy_flag
from rlskip.config.settings import why_off
from rlskip.hooks.job import end, log_jobs, refuse, start
from rlskip.skip.said import chosen_by

log = logging.getLogger(__name__)


class SkipCallback(Callback):
    """Every option of `skip` and `record` adds it, under the key ``hydra.callbacks.rlskip``."""

    _origin: Origin | None = None

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Turn verl's legacy flag off: only here is `config` the object that the task gets."""
        # Not by read_skip: other keys may need the job's HydraConfig, which is not set yet.
        on = look_up(config, "skip.rollout.enable") is True
        if on and look_up(config, "skip.enable") is not False:
            retire_legacy_flag(config)

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        self._multirun_began = time.time()
        self._origin = Origin.of(None)  # a launcher's worker has another script

    def on_job_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Install SkipManager and the recorder, or end the job.

        Hydra turns an `Exception` of a callback into a warning and runs the task nevertheless. So
        a job whose config cannot be honoured is ended by SystemExit or
        :class:`~rlskip.errors.RlskipAbort`, and the SkipManager that stays behind refuses every
        call.
        """
        try:
            settings = start(config, self._origin)
        except Exception as error:
            refuse(config, error)
        asked = settings.roles or chosen_by(config)
        if asked and (why := "; ".join(map(str, why_off(settings)))):
            nothing = "" if settings.roles else "NOTHING is skipped or cached in this job: "
            log.warning("rlskip: %s%s", nothing, why)

    def on_job_end(self, config: DictConfig, job_return: Any, **kwargs: Any) -> None:
        """Log one line per role, and write ``rlskip_summary.json`` to the output directory."""
        end(config, job_return)

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Log one table of all jobs of the sweep."""
        log_jobs(Path(config.hydra.sweep.dir), self._multirun_began)
