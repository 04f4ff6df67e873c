"""Resume a half-generated step: which journal, and what of it a prompt may take."""

from __future__ import annotations

from pathlib import Path

import attrs

from rlskip.config.dispatch import DispatchConfig
from rlskip.dispatch.batch import Prompt
from rlskip.dispatch.pools import Rows
from rlskip.store import Identity, StepStore
from rlskip.store.journal import SessionJournal


def journal_identity(identity: Identity, config: DispatchConfig) -> Identity:
    """What sessions depend on beside their prompts: `identity`, and what `config` says."""
    return attrs.evolve(
        identity,
        n=config.n,
        sampling={**identity.sampling, **(config.sampling or {})},
        extra={**identity.extra, "seed": config.seed},
    )


def open_journal(store: StepStore, step: int, identity: Identity) -> SessionJournal:
    """The journal of `step`, beside its dump. Journals of steps with a dump are removed."""
    dumped = {str(done) for done in store.steps()}
    for path in store.directory.glob("*.journal"):
        if path.stem in dumped:
            path.unlink(missing_ok=True)
    return SessionJournal(Path(store.directory, f"{step}.journal"), identity)


def resumable(prompt: Prompt) -> list[tuple[int, Rows]]:
    """The open sessions of `prompt` that its batch's journal has, with their rows."""
    journal = prompt.batch.journal
    if journal is None or prompt.journal_key is None:
        return []
    keys = {session: (*prompt.journal_key, session) for session in sorted(prompt.open)}
    return [(s, journal.entries[key]) for s, key in keys.items() if key in journal.entries]
