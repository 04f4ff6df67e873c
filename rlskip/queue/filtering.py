"""Groups that teach nothing: a metric has the same value in all their rows."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence

import attrs

from rlskip.errors import RlskipError
from rlskip.queue.readiness import PromptGroup


@attrs.frozen
class GroupFilter:
    """Rejects complete training groups in which a metric does not vary, or is not a number.

    `metric` is called with keys of rows and their partition, and returns the metric of each row.
    `refills` prompts are submitted for each rejected one, of which at most `max_inflight` run at
    once. For trainers that must not train on an older policy, `discards_surplus` waits for all that
    was submitted before a batch is sampled, and discards what the batch does not take.
    """

    metric: Callable[[Sequence[str], str], Sequence[float]]
    refills: int = attrs.field(default=1, validator=attrs.validators.ge(1))
    discards_surplus: bool = False
    max_inflight: int | None = None

    @property
    def name(self) -> str:
        """How errors name the metric."""
        return getattr(self.metric, "__name__", type(self.metric).__name__)

    def rejected(self, partition: str, groups: Iterable[PromptGroup]) -> list[PromptGroup]:
        """Those of these complete groups that are rejected; reads each group's rows once."""
        groups = list(groups)
        new = [group for group in groups if group.varies is None]
        keys = [[key for key, _ in group.successful_rows()] for group in new]
        if new:
            values = iter(self._values(list(itertools.chain(*keys)), partition))
            for group, its_keys in zip(new, keys, strict=True):
                metrics = [next(values) for _ in its_keys]
                odd = next((value for value in metrics if not math.isfinite(value)), None)
                # One NaN makes the advantages of its whole group NaN. It equals nothing, itself
                # neither, so it would count as variance.
                group.varies = odd is None and (len(metrics) == 1 or len({*metrics}) != 1)
                # math.nan is one object, so that equal causes count as one.
                group.metric = metrics[0] if odd is None else math.nan if odd != odd else odd
        return [group for group in groups if not group.varies]

    def _values(self, keys: Sequence[str], partition: str) -> list[float]:
        found = self.metric(keys, partition)
        try:
            values = [float(value) for value in found]
        except (TypeError, ValueError, OverflowError):
            values = []
        if len(values) != len(keys):
            raise RlskipError(
                f"the metric returned {found!r:.200} for {len(keys)} rows",
                "group_filter",
                "return one number for each key, in order",
            )
        return values
