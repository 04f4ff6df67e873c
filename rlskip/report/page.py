"""The report as one HTML file without scripts or links; text from a dump is escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from statistics import fmean

from rlskip._human import duration, number, size
from rlskip._version import __version__
from rlskip.report.charts import bars, histogram, timeline
from rlskip.report.figures import Report, Sampled, StepFigures

# Even text that escaped the escaping could neither run nor load anything.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_MAX_ROWS = 500

_STYLE = """
:root { color-scheme: light dark; --a: #1f6f8b; --b: #8fc1a9; --r: #c9a227; --f: #b3362b;
  --dim: #777; --line: #8884; --other: #8882 }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.4rem; overflow-wrap: anywhere } h2 { font-size: 1.1rem; margin-top: 2.2rem }
svg { display: block; width: 100%; font: 10px system-ui, sans-serif; fill: currentColor }
svg line { stroke: var(--line) } .a { fill: var(--a) } .b { fill: var(--b) }
.r { fill: var(--r) } .f { fill: var(--f) }
table { border-collapse: collapse } td, th { padding: .15rem .8rem .15rem 0; text-align: right }
th { color: var(--dim); font-weight: normal; border-bottom: 1px solid var(--line) }
td:last-child { text-align: left; color: var(--f) }
dl { display: flex; flex-wrap: wrap; gap: .5rem 2rem } dt { color: var(--dim) }
dd { margin: 0; font-size: 1.3rem } dl div { min-width: 7rem }
.dim { color: var(--dim) } .key::before { content: ""; display: inline-block; width: .8em;
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
        f"<h1>{name}</h1>",
        _totals(report),
        _times(report),
        _distribution("Response length", report.lengths, "tokens", report.counted),
        _distribution("Reward", report.rewards, "reward", report.counted),
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
        ("on disk", size(sum(step.size for step in report.steps))),
        ("hits", str(tally.hits)),
        ("misses", str(tally.misses)),
        ("generation saved", duration(max(0.0, tally.seconds_saved))),
    ]
    if report.rewards:
        pairs.append(("mean reward", number(fmean(report.rewards))))
        last = [step.reward for step in report.steps if step.reward is not None]
        pairs.append(("in the last step", number(last[-1])))
    if report.lengths:
        pairs.append(("mean response", _tokens(fmean(report.lengths))))
    items = "".join(f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in pairs)
    return f"<dl>{items}</dl>"


def _times(report: Report) -> str:
    steps = [step for step in report.steps if step.seconds is not None or step.tally.hits]
    if not steps:
        return ""
    chart = bars(
        [step.name.partition(" ")[0] for step in steps],  # there is no room for the rank
        [
            ("a", [step.seconds or 0.0 for step in steps]),
            ("b", [max(0.0, step.tally.seconds_saved) for step in steps]),
        ],
        "s",
        "step",
    )
    keys = _keys([("--a", "to generate it, once"), ("--b", "saved by all replays")])
    return f"<h2>Time per step</h2><p>{keys}</p>{chart}"


def _distribution(title: str, values: Sequence[float], x: str, counted: int) -> str:
    if not values:
        return ""
    low, high, mean = number(min(values)), number(max(values)), number(fmean(values))
    summary = f"{len(values)} of {counted} sessions; from {low} to {high}, {mean} on average"
    chart = histogram([float(value) for value in values], x)
    return f'<h2>{title}</h2><p class="dim">{escape(summary)}</p>{chart}'


def _timelines(report: Report) -> Iterable[str]:
    if not report.timelines:
        return
    keys = _keys([("--a", "session"), ("--r", "retried"), ("--f", "failed attempt")])
    shown, there = len(report.timelines), report.all_timelines
    note = f"<p>The last {shown} of {there} timelines.</p>" if shown < there else ""
    yield f"<h2>Dispatch</h2>{note}<p>{keys}</p>"
    for i, one in enumerate(report.timelines):
        chart = timeline(one.boxes, one.lanes)
        state = " open" if i == 0 else ""
        name, boxes = escape(one.name), len(one.boxes)
        less = boxes < one.attempts
        note = f"<p>{boxes} of its {one.attempts} attempts are shown.</p>" if less else ""
        yield f"<details{state}><summary>{name}</summary>{note}{chart}</details>"


def _keys(pairs: Sequence[tuple[str, str]]) -> str:
    return "".join(f'<span class="key" style="--c: var({v})">{escape(n)}</span>' for v, n in pairs)


def _sample(report: Report) -> str:
    if not report.sample:
        return ""
    what = "text" if report.decoded else "token ids; name a tokenizer to read them"
    head = (
        "<h2>A sample of the rollouts</h2>"
        f"<p>The last turn of {len(report.sample)} sessions, as {what}. "
        '<span class="sampled">sampled by the policy</span> '
        '<span class="other">inserted (tools, templates)</span></p>'
    )
    return head + "".join(_row(one, i == 0) for i, one in enumerate(report.sample))


def _row(one: Sampled, is_open: bool) -> str:
    row = one.row
    title = f"step {one.dump}, group {one.session.group}, session {one.session.number}"
    if len(one.session.rows) > 1:
        title += f", {len(one.session.rows)} turns"
    if one.reward is not None:
        title += f", reward {number(one.reward)}"
    sampled = len(row.response) if row.mask is None else sum(row.mask)
    title += f", {_tokens(len(row.response))}, {sampled} of them sampled"
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


def _table(steps: Sequence[StepFigures]) -> str:
    heads = (
        "step", "sessions", "mean reward", "on disk", "generated in", "hits", "misses", "saved", ""
    )  # fmt: skip
    lines = []
    for step in steps[-_MAX_ROWS:]:
        cells = (
            step.name,
            "" if step.sessions is None else str(step.sessions),
            number(step.reward),
            size(step.size),
            "" if step.seconds is None else duration(step.seconds),
            str(step.tally.hits),
            str(step.tally.misses),
            duration(max(0.0, step.tally.seconds_saved)),
            step.problem or "",
        )
        lines.append("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>")
    note = f"<p>The last {_MAX_ROWS} of {len(steps)}.</p>" if len(steps) > _MAX_ROWS else ""
    head = "".join(f"<th>{escape(head)}</th>" for head in heads)
    return f"<h2>Steps</h2>{note}<table><tr>{head}</tr>{''.join(lines)}</table>"
