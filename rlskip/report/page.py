"""The report as one HTML file without scripts or links; text from a dump is escaped."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from statistics import fmean

from rlskip._human import duration, number, size
from rlskip._version import __version__
from rlskip.report.charts import bars, curve, histogram, timeline
from rlskip.report.figures import Report, StepFigures
from rlskip.report.sample import Sampled
from rlskip.runs.counts import Counts, mean

# Even text that escaped the escaping could neither run nor load anything.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_MAX_ROWS = 500

_STYLE = """
:root { color-scheme: light dark; --a: #1f6f8b; --b: #8fc1a9; --r: #c9a227; --f: #b3362b;
  --dim: #777; --line: #8884; --other: #8882 }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.4rem; overflow-wrap: anywhere } h2 { font-size: 1.1rem; margin-top: 2.2rem }
h2 + p { margin: .3rem 0 } h3 { font-size: 1rem; font-weight: normal; color: var(--dim) }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 24rem), 1fr));
  gap: 0 2rem }
.wide { overflow-x: auto } .wide svg { min-width: 640px }
svg { display: block; width: 100%; font: 11px system-ui, sans-serif; fill: currentColor }
svg line { stroke: var(--line) } polyline { fill: none; stroke: var(--a); stroke-width: 1.5 }
.a { fill: var(--a) } .b { fill: var(--b) } .r { fill: var(--r) } .f { fill: var(--f) }
table { border-collapse: collapse; white-space: nowrap }
td, th { padding: .15rem .8rem .15rem 0; text-align: right }
th { color: var(--dim); font-weight: normal; border-bottom: 1px solid var(--line) }
td:last-child { text-align: left; color: var(--f) }
dl { display: flex; flex-wrap: wrap; gap: .5rem 2rem } dt { color: var(--dim) }
dd { margin: 0; font-size: 1.3rem } dl div { min-width: 7rem }
.dim { color: var(--dim) } .key { white-space: nowrap }
.key::before { content: ""; display: inline-block; width: .8em;
  height: .8em; margin: 0 .4em 0 .9em; background: var(--c) }
details { border-top: 1px solid var(--line); padding: .4rem 0 } summary { cursor: pointer }
pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: .4rem 0; font-size: .85rem }
.sampled { background: color-mix(in srgb, var(--a) 25%, transparent) }
.other { background: var(--other); color: var(--dim) }
"""


def render(report: Report) -> str:
    """The page."""
    name = escape(report.run.name)
    sections = [
        f"<h1>{name.replace('_', '_<wbr>')}</h1>",
        _totals(report),
        _uncounted(report),
        '<div class="charts">',
        *_charts("reward", "reward", report.rewards, report),
        *_charts("response length", "tokens", report.lengths, report),
        _times(report),
        "</div>",
        *_timelines(report),
        _sample(report),
        _table(report.steps),
        f'<p class="dim">rlskip {escape(__version__)}</p>',
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{name}</title><style>{_STYLE}</style></head>\n<body>\n"
        + "\n".join(sections)
        + "\n</body></html>\n"
    )


def _totals(report: Report) -> str:
    tally = report.tally
    pairs = [
        ("steps dumped", str(report.steps_dumped)),
        ("sessions", f"{report.counted} in {report.groups} groups"),
        ("on disk", size(sum(step.dump.size for step in report.steps))),
        ("hits", str(tally.hits)),
        ("misses", str(tally.misses)),
        ("generation saved", duration(max(0.0, tally.seconds_saved))),
    ]
    rewards, lengths = _means(report.rewards), _means(report.lengths)
    if rewards:
        pairs.append(("mean reward", number(mean(_all(report.rewards)))))
        pairs.append((f"in step {rewards[-1][0]}", number(rewards[-1][1])))
    if lengths:
        pairs.append(("mean response", _tokens(fmean(_all(report.lengths)))))
    items = "".join(f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in pairs)
    return f"<dl>{items}</dl>"


def _times(report: Report) -> str:
    steps = [step for step in report.steps if step.dump.seconds is not None or step.tally.hits]
    if not steps:
        return ""
    chart = bars(
        [step.dump.name.partition(" ")[0] for step in steps],  # too narrow for the rank
        [
            ("a", [step.dump.seconds or 0.0 for step in steps]),
            ("b", [max(0.0, step.tally.seconds_saved) for step in steps]),
        ],
        "seconds",
        "step",
    )
    keys = _keys([("--a", "to generate it, once"), ("--b", "saved by all replays")])
    return f"<section><h2>Time per step</h2><p>{keys}</p>{chart}</section>"


def _charts(
    title: str, unit: str, by_step: Mapping[int, Sequence[float]], report: Report
) -> Iterable[str]:
    """The means of the steps, and the distribution over all sessions."""
    means, values = _means(by_step), _all(by_step)
    if len(means) > 1:
        note = f"the mean of each step's sessions; {number(means[-1][1])} in step {means[-1][0]}"
        yield _section(f"Mean {title} by step", note, curve(means, unit, "step"))
    if values:
        low, high = number(min(values)), number(max(values))
        note = f"{len(values)} of {report.counted} sessions; from {low} to {high}, "
        note += f"{number(mean(values))} on average"
        yield _section(f"{title.capitalize()} of the sessions", note, histogram(values, unit))


def _section(title: str, note: str, chart: str) -> str:
    return f'<section><h2>{escape(title)}</h2><p class="dim">{escape(note)}</p>{chart}</section>'


def _means(by_step: Mapping[int, Sequence[float]]) -> list[tuple[int, float]]:
    means = ((step, mean(values)) for step, values in sorted(by_step.items()))
    return [(step, found) for step, found in means if found is not None]


def _all(by_step: Mapping[int, Sequence[float]]) -> list[float]:
    return [float(value) for values in by_step.values() for value in values]


def _uncounted(report: Report) -> str:
    """What the figures leave out; the table has the dumps that cannot be read."""
    older = [step for step in report.steps if step.counts is None and step.problem is None]
    if not older:
        return ""
    dumps = "dump is" if len(older) == 1 else "dumps are"
    return (
        f"<p>Rewards and lengths are those of the last {report.counted} sessions; "
        f"{len(older)} earlier {dumps} not counted.</p>"
    )


def _timelines(report: Report) -> Iterable[str]:
    if not report.timelines:
        return
    keys = _keys([("--a", "session"), ("--r", "retried"), ("--f", "failed attempt")])
    shown, there = len(report.timelines), report.all_timelines
    note = f"<p>The last {shown} of {there} timelines.</p>" if shown < there else ""
    yield f"<h2>Dispatch</h2>{note}<p>{keys}</p>"
    for i, one in enumerate(report.timelines):
        boxes = len(one.boxes)
        less = boxes < one.attempts
        note = f"<p>{boxes} of its {one.attempts} attempts are shown.</p>" if less else ""
        chart = f'<div class="wide">{timeline(one.boxes, one.lanes)}</div>'
        state = " open" if i == 0 else ""
        yield f"<details{state}><summary>{escape(one.name)}</summary>{note}{chart}</details>"


def _keys(pairs: Sequence[tuple[str, str]]) -> str:
    return "".join(f'<span class="key" style="--c: var({v})">{escape(n)}</span>' for v, n in pairs)


def _sample(report: Report) -> str:
    if not any(report.sample.values()):
        return ""
    what = "text" if report.decoded else "token ids (--tokenizer DIRECTORY shows text)"
    head = (
        f"<h2>Sessions</h2><p>The last turn of each, as {what}. "
        '<span class="sampled">sampled by the policy</span> '
        '<span class="other">inserted (tools, templates)</span></p>'
    )
    titles = {"best": "The best", "worst": "The worst", "random": "Drawn at random"}
    for kind, some in report.sample.items():
        if some:
            rows = "".join(_row(one, i == 0) for i, one in enumerate(some))
            head += f"<h3>{titles[kind]}</h3>{rows}"
    return head


def _row(one: Sampled, is_open: bool) -> str:
    row, turns = one.row, len(one.session.rows)
    title = f"step {one.dump}, group {one.session.group}, session {one.session.number}"
    if turns > 1:
        title += f", {turns} turns"
    if one.reward is not None:
        title += f", reward {number(one.reward)}"
    title += f", {_tokens(one.length)}"
    if turns == 1:
        title += f", {len(row.response) if row.mask is None else sum(row.mask)} of them sampled"
    parts = " ".join(
        f'<span class="{"sampled" if by_policy else "other"}">{escape(what)}</span>'
        for by_policy, what in one.parts
    )
    return (
        f"<details{' open' if is_open else ''}><summary>{escape(title)}</summary>"
        f'<pre class="dim">{escape(one.prompt)}</pre><pre>{parts}</pre></details>'
    )


def _tokens(count: float) -> str:
    return f"{number(count)} token{'' if count == 1 else 's'}"


def _counted(counts: Counts | None) -> tuple[str, ...]:
    if counts is None:
        return ("",) * 4
    means = number(counts.mean_reward), number(counts.mean_length)
    return (str(len(counts.sessions)), str(counts.groups), *means)


def _table(steps: Sequence[StepFigures]) -> str:
    heads = (
        "step", "sessions", "groups", "mean reward", "mean length", "on disk", "generated in",
        "hits", "misses", "saved", "",
    )  # fmt: skip
    lines = []
    for step in steps[-_MAX_ROWS:]:
        cells = (
            step.dump.name,
            *_counted(step.counts),
            size(step.dump.size),
            "" if step.dump.seconds is None else duration(step.dump.seconds),
            str(step.tally.hits),
            str(step.tally.misses),
            duration(max(0.0, step.tally.seconds_saved)),
            step.problem or "",
        )
        lines.append("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>")
    note = f"<p>The last {_MAX_ROWS} of {len(steps)}.</p>" if len(steps) > _MAX_ROWS else ""
    head = "".join(f"<th>{escape(head)}</th>" for head in heads)
    rows = "".join(lines)
    shown = f'<div class="wide"><table><tr>{head}</tr>{rows}</table></div>'
    return f"<h2>Steps</h2>{note}{shown}"
