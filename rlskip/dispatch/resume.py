"""Resuming a step that was interrupted: its journal, and the sessions that it holds."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path

import attrs

from rlskip.config.dispatch import DispatchConfig
from rlskip.dispatch.handle import Prompt
from rlskip.dispatch.history import tokens_of
from rlskip.dispatch.journal import SessionJournal
from rlskip.dispatch.pools import Rows, as_rows
from rlskip.store import Identity, StepStore

logger = logging.getLogger(__name__)


def journal_identity(identity: Identity, config: DispatchConfig) -> Identity:
    """What sessions depend on besides their prompts: `identity` and parts of `config`."""
    return attrs.evolve(
        identity,
        n=config.n,
        sampling={**identity.sampling, **(config.sampling or {})},
        extra={**identity.extra, "seed": config.seed},
    )


def open_journal(store: StepStore, step: int, identity: Identity) -> SessionJournal:
    """Open the journal of `step`, next to its dump, and remove those of steps with a dump."""
    dumped = {str(done) for done in store.steps()}
    for path in store.directory.glob("*.journal"):
        if path.stem in dumped:
            with contextlib.suppress(OSError):
                path.unlink()
    return SessionJournal(Path(store.directory, f"{step}.journal"), identity)


def resumable(prompt: Prompt) -> list[tuple[int, Rows, int]]:
    """The open sessions of `prompt` in its batch's journal, with their rows and tokens."""
    journal = prompt.batch.journal
    if journal is None or prompt.journal_key is None:
        return []
    found: list[tuple[int, Rows, int]] = []
    for session in sorted(prompt.open):
        with contextlib.suppress(Exception):  # a file may hold anything
            rows = as_rows(journal.entries.get((*prompt.journal_key, session)))
            if rows is not None:
                found.append((session, rows, tokens_of(rows)))
    return found
