"""What rollouts are read of, and every way to read them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rlskip.runs.on_disk import Dump

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa
    from datasets import Dataset

    import rlskip.runs.rollouts
    from rlskip.runs.rollouts import Rollouts, SessionRows


class Scope:
    """What rollouts are read of: runs, a run, a step or a call."""

    @property
    def run(self) -> Scope:
        """The run that it belongs to; of runs the only one."""
        raise NotImplementedError

    def iter_dumps(self) -> Iterator[Dump]:
        """The dumps in order, looked up one after the other."""
        raise NotImplementedError

    def dumps(self) -> list[Dump]:
        """All dumps, in order."""
        return list(self.iter_dumps())

    def fields(self) -> list[str]:
        """The names of the trainer's own fields, in any dump; of a list of rows all is read."""
        return list(dict.fromkeys(name for dump in self.iter_dumps() for name in dump.fields()))

    def rollouts(self, fields: Sequence[str] | None = None) -> Iterator[Rollouts]:
        """The rollouts of each dump; one dump is in memory at a time.

        Parameters
        ----------
        fields
            What the rows are to have: ``group``, ``session``, ``turn``, ``uid``, ``prompt``,
            ``response``, ``mask``, ``log_probs``, ``reward``, or names of the trainer's own fields.
            Only what these need is read and verified. None for everything.

        Raises
        ------
        DumpError
            A dump cannot be used, or has no such field. It stays where it is.
        """
        return (self.read(dump, fields) for dump in self.iter_dumps())

    def read(self, dump: Dump, fields: Sequence[str] | None = None) -> Rollouts:
        """The rollouts of one of its dumps."""
        return self.run.read(dump, fields)

    def iter_rows(self, fields: Sequence[str] | None = None) -> Iterator[dict[str, Any]]:
        """The rows as mappings, with ``step``, ``call`` and ``row``; `fields` as in `rollouts`.

        Tokens, masks and log-probs are lists without padding.
        """
        return (row for part in self.rollouts(fields) for row in part)

    def sessions(self, fields: Sequence[str] | None = None) -> Iterator[SessionRows]:
        """The sessions, each with its turns; `fields` are those of the turns, as in `rollouts`."""
        return (session for part in self._named(fields) for session in part.sessions)

    def groups(self, fields: Sequence[str] | None = None) -> Iterator[rlskip.runs.rollouts.Group]:
        """The groups of sessions of one prompt; `fields` are those of the turns."""
        return (group for part in self._named(fields) for group in part.groups)

    # -- as tables (the extra `data`) --------------------------------------------------------

    def to_arrow(self, fields: Sequence[str] | None = None) -> pa.Table:
        """All rows as a table of pyarrow; `fields` as in `rollouts`.

        Raises
        ------
        RlskipError
            pyarrow is not installed.
        DumpError
            As in `rollouts`.
        """
        from rlskip.runs.tables import joined

        return joined(list(self.iter_tables(fields)))

    def iter_tables(self, fields: Sequence[str] | None = None) -> Iterator[pa.Table]:
        """As :meth:`to_arrow`, a table for each dump, one after the other."""
        from rlskip.runs.tables import table_of

        return map(table_of, self.rollouts(fields))

    def to_pandas(self, fields: Sequence[str] | None = None) -> pd.DataFrame:
        """As :meth:`to_arrow`, as a DataFrame of pandas."""
        return self.to_arrow(fields).to_pandas()

    def to_datasets(self, fields: Sequence[str] | None = None) -> Dataset:
        """As :meth:`to_arrow`, as a Dataset of Hugging Face."""
        from rlskip.runs.tables import extra

        return extra("datasets").Dataset(self.to_arrow(fields))

    def _named(self, fields: Sequence[str] | None) -> Iterator[Rollouts]:
        """With what tells which session a row belongs to, its reward and its length."""
        needed = ("group", "session", "turn", "reward", "response")
        return self.rollouts(None if fields is None else [*needed, *fields])
