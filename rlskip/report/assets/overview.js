// The first screen: what the runs are, the verdict, curves, and the steps.
"use strict";

async function overview() {
  // What both runs say of themselves is said once.
  const known = (run, name, value) => run.id && runs[0].facts.some(([n, v]) => n === name && v === value);
  const heads = runs.map((run) =>
    h(
      "section.run",
      h("h1", badge(run), broken(run.name)),
      facts(
        run.facts.filter(([name, value]) => (name !== "run" || value !== run.name) && !known(run, name, value)),
      ),
      left(run),
    ),
  );
  const made = [
    chart("Reward", "mean, quartiles", [{ name: "", of: "reward", band: ["reward_low", "reward_high"] }], {
      unlessZero: false,
    }),
    chart(
      "Success",
      "reward from " + number(data.success) + " on",
      [
        { name: "pass@1", of: "pass_1" },
        { name: passK(), of: "pass_k" },
      ],
      { share: true },
    ),
    ...recordedCharts(),
    chart("Length", "tokens of a session: mean, quartiles", [
      { name: "", of: "length", band: ["length_low", "length_high"] },
    ]),
    hasTurns() && chart("Turns", "mean of the sessions", [{ name: "", of: "turns" }]),
    chart("No signal", "groups whose sessions earn the same", [{ name: "", of: "no_signal" }], {
      share: true,
    }),
    chart("Time", "seconds to generate a step", [{ name: "", of: "seconds" }]),
  ].filter(Boolean);
  // Two trainings on the same rollouts share most curves: what differs comes first.
  made.sort((a, b) => Boolean(a.isSame) - Boolean(b.isSame));
  return [verdict(), h("div.runs", heads), await sample(), h("div.charts", made), ...stepsTable()];
}

/** A chart for each stage that a job recorded, by name. */
function recordedCharts() {
  const names = [...new Set(runs.flatMap((run) => Object.keys(run.curves)))];
  return names.map((name) =>
    chart(visible(name.replace(/^metrics\./, "")), "recorded, mean of the step", [{ name: "", of: name }], {
      from: "curves",
    }),
  );
}

/** The best beside the worst session of the last group that has both; else one session. */
async function sample() {
  for (const run of runs) {
    const s = run.sessions;
    const there = run.members.map((of) => of.filter((k) => s.chunk[k] >= 0));
    const ranked = there.map((of) =>
      of.filter((k) => s.reward[k] !== null).sort((a, b) => s.reward[b] - s.reward[a]),
    );
    let group = ranked.findLastIndex((of) => of.length > 1 && s.reward[of[0]] > s.reward[of[of.length - 1]]);
    const signal = group >= 0;
    if (!signal) group = there.findLastIndex((of) => of.length);
    if (group < 0) continue;
    const chosen = signal ? [ranked[group][0], ranked[group][ranked[group].length - 1]] : there[group].slice(0, 1);
    const loaded = await Promise.all(chosen.map((k) => sessionOf(run, k)));
    setColours(loaded);
    view.colours = [];
    const step = run.groups.step[group];
    const prompt = run.groups.prompt[group];
    return h(
      "section.sample",
      { "aria-label": "sample" },
      h(
        "h2",
        signal ? "Best beside worst: " : "A session: ",
        h("a", { href: address(run, step, group) }, nameOf(run, step) + ", group ", text(run.groups.name[group])),
      ),
      prompt && h("p.asked", { dir: "auto" }, visible(gist(prompt))),
      h(
        "div.panes",
        chosen.map((k, n) => pane(run, k, loaded[n], address(run, step, group, s.number[k]))),
      ),
    );
  }
  return null;
}

/** Whether any step has sessions of several turns. */
const hasTurns = () => runs.some((run) => (run.steps.turns || []).some((v) => v !== 1));
const passK = () => {
  const ks = [...new Set(runs.flatMap((run) => run.steps.k || []))].filter((k) => k !== null);
  return ks.length === 1 ? "pass@" + ks[0] : "pass@k";
};

function left(run) {
  const details = run.sessions.chunk.filter((c) => c >= 0).length;
  const lines = [];
  if (details < run.all.sessions)
    lines.push(
      count(run.all.sessions - details, "session") +
        " of " +
        run.all.sessions.toLocaleString("en") +
        " did not fit and are left out. One of each group came first, then the best, the worst and random ones. The figures count all.",
    );
  if (run.groups.step.length < run.all.groups)
    lines.push(
      "Tables list " + run.groups.step.length.toLocaleString("en") + " of " + count(run.all.groups, "group") + ".",
    );
  if (!run.facts.length) lines.push("The rollouts of this job are not beside its records.");
  for (const [name, problem] of run.problems) lines.push([text(name), " cannot be read: ", text(problem)]);
  return lines.length
    ? h(
        "ul.notes",
        lines.map((line) => h("li", line)),
      )
    : null;
}

function verdict() {
  const found = data.verdict;
  if (!found) return null;
  const columns = found.columns.map((name, i) => ({
    name: name.replace(/^>/, ""),
    value: (row) => row[i],
    right: name.startsWith(">"),
    minor: i > 0 && name.startsWith(">"),
    wide: i === found.columns.length - 1,
  }));
  const open = (row) => runs[0].at.steps.has(Number(row[0])) && address(runs[0], Number(row[0]));
  return h(
    "section.verdict" + (found.is_equal ? ".equal" : ".differs"),
    { "aria-label": "verdict" },
    h("p", h("strong", found.is_equal ? "Equal" : "Different"), text(found.said)),
    h(
      "details",
      { open: found.rows.length <= 12 },
      h("summary", "What was compared"),
      table(columns, found.rows, { label: "what was compared", open }),
    ),
  );
}

/** The steps with their figures: of one run, or of both side by side. */
function stepsTable() {
  const steps = stepsOf(runs, "steps"),
    one = runs.length === 1;
  if (!steps.length) return [];
  const of = (label, name, more) =>
    runs.map((run) =>
      column([label, run.label].filter(Boolean).join(" "), (step) => figure(run, name, step), {
        ...more,
        shown: more?.share && ((step) => text(percent(figure(run, name, step)))),
      }),
    );
  const share = { share: true, minor: !one };
  const columns = [
    column("step", (step) => step),
    of("sessions", "sessions", { minor: true }),
    one && of("groups", "groups", { minor: true }),
    of("reward", "reward", { title: "mean" }),
    of("pass@1", "pass_1", share),
    one && of(passK(), "pass_k", share),
    of("no signal", "no_signal", { ...share, title: "groups whose sessions all earn the same" }),
    of("length", "length", { title: "mean, in tokens" }),
    one && hasTurns() && of("turns", "turns", { title: "mean" }),
    one && of("seconds", "seconds", { title: "to generate it", minor: true }),
  ];
  const all = (run) =>
    h("a.button", { href: "#" + run.id + "/all" }, one ? "All groups" : "All groups of " + run.label);
  return [
    h("div.title", h("h2", "Steps"), runs.map(all)),
    table(columns.flat().filter(Boolean), steps, {
      open: (step) =>
        address(
          runs.find((run) => run.at.steps.has(step)),
          step,
        ),
      label: "steps",
    }),
  ];
}

/** The address of the same step in the other run, or of its only one. */
function partner(run, step) {
  const other = runs[1 - run.id];
  if (other?.at.steps.has(step)) return address(other, step);
  return other?.steps.step.length === 1 ? address(other, other.steps.step[0]) : null;
}
