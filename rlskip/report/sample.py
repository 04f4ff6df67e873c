"""The sessions that a report shows: the best, the worst, and some at random."""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence

import attrs

from rlskip.runs.counts import Counts
from rlskip.runs.decoding import Decoder
from rlskip.runs.trajectories import Columns, SessionRows, Trajectory, trajectories_at

_Key = tuple[float, float]
_SHOWN = 3_000  # tokens of a prompt or a response


@attrs.frozen(eq=False)
class Sampled:
    """The last row of a session, as token ids or text; long ones are cut.

    ``parts`` are those of the response: whether the policy sampled them, and their text.
    ``reward`` and ``length`` are the session's.
    """

    dump: str  # its name
    session: SessionRows
    row: Trajectory
    reward: float | None
    length: int
    prompt: str
    parts: list[tuple[bool, str]]


class Sampler:
    """Keeps `rows` sessions of all that it is offered: a third each the best and the worst.

    The others are drawn at random, and so are those of equal rewards; always the same ones. Without
    different rewards all are drawn.
    """

    def __init__(self, rows: int, decoder: Decoder | None) -> None:
        self._sizes = {"best": rows // 3, "worst": rows // 3, "random": rows}
        self._kept: dict[str, list[tuple[_Key, Sampled]]] = {kind: [] for kind in self._sizes}
        self._random = random.Random(0)
        self._decoder = decoder
        self._places: dict[Sampled, tuple[int, int]] = {}
        self._dumps = self._sessions = 0

    def offer(self, dump: str, columns: Columns, counts: Counts) -> None:
        """Choose among the sessions of a dump. Those without tokens cannot be shown."""
        draw = [self._random.random() for _ in counts.sessions]
        given = [(i, r) for i, r in enumerate(counts.rewards) if r is not None]
        keys: dict[str, dict[int, _Key]] = {
            "best": {i: (reward, draw[i]) for i, reward in given},
            "worst": {i: (-reward, draw[i]) for i, reward in given},
            "random": {i: (0.0, number) for i, number in enumerate(draw)},
        }
        chosen = {kind: self._better(kind, of) for kind, of in keys.items()}
        places = sorted({i for some in chosen.values() for i in some})
        rows = trajectories_at(columns, [counts.sessions[i].rows[-1] for i in places])
        if not rows:
            return
        self._dumps += 1
        self._sessions += len(counts.sessions)
        pairs = zip(places, rows, strict=True)
        shown = {i: self._sampled(dump, counts, i, row) for i, row in pairs}
        for kind, some in chosen.items():
            kept = self._kept[kind] + [(keys[kind][i], shown[i]) for i in some]
            kept.sort(key=lambda one: one[0], reverse=True)
            self._kept[kind] = kept[: self._sizes[kind]]

    def _better(self, kind: str, keys: dict[int, _Key]) -> list[int]:
        """The places whose keys are above those that are kept, as far as there is room."""
        kept, size = self._kept[kind], self._sizes[kind]
        above = kept[-1][0] if kept and len(kept) == size else (float("-inf"), 0.0)
        return heapq.nlargest(size, [i for i in keys if keys[i] > above], key=keys.__getitem__)

    def _sampled(self, dump: str, counts: Counts, i: int, row: Trajectory) -> Sampled:
        figures = counts.rewards[i], counts.lengths[i]
        one = Sampled(dump, counts.sessions[i], row, *figures, *_texts(row, self._decoder))
        self._places[one] = (-self._dumps, row.index)
        return one

    def result(self) -> dict[str, list[Sampled]]:
        """What was kept, each session once: ``best``, ``worst`` and ``random``."""
        kept = {kind: [one for _, one in some] for kind, some in self._kept.items()}
        room = min(self._sizes["random"], self._sessions)
        best, worst = kept["best"][: room // 3], kept["worst"][: room // 3]
        if best and best[0].reward == worst[0].reward:
            best, worst = [], []
        worst = [one for one in worst if one not in best]
        others = [one for one in kept["random"] if one not in best and one not in worst]
        others = others[: room - len(best) - len(worst)]
        others.sort(key=self._places.__getitem__)
        return {"best": best, "worst": worst, "random": others}


def _texts(row: Trajectory, decoder: Decoder | None) -> tuple[str, list[tuple[bool, str]]]:
    def as_text(tokens: Sequence[int]) -> str:
        return decoder(tokens) if decoder is not None else " ".join(map(str, tokens))

    response = row.response[:_SHOWN]
    mask = (row.mask or [])[:_SHOWN]
    mask += [1] * (len(response) - len(mask))
    parts: list[tuple[bool, str]] = []
    start = 0
    for i in range(1, len(response) + 1):
        if i == len(response) or mask[i] != mask[start]:
            parts.append((bool(mask[start]), as_text(response[start:i])))
            start = i
    return as_text(row.prompt[-_SHOWN:]), parts
