// A step, or all of them: its groups and sessions, to search, filter and select.
"use strict";

function stepView({ run, step }) {
  const all = step === "all",
    g = run.groups,
    s = run.sessions;
  const groups = all ? g.step.map((_, i) => i) : run.groupsOf.get(step);
  const sessions = groups.flatMap((group) => run.members[group]);
  const steps = run.steps.step,
    i = steps.indexOf(step);
  if (!all) {
    view.before = i > 0 ? address(run, steps[i - 1]) : null;
    view.after = i + 1 < steps.length ? address(run, steps[i + 1]) : null;
  }
  const search = h("input.search", {
    type: "search",
    placeholder: "Search ( / )",
    "aria-label": "search",
    oninput: refresh,
  });
  const signal = h("input", { type: "checkbox", onchange: refresh });
  const hasRewards = groups.some((group) => g.reward[group] !== null);
  const dumps = new Set(groups.map((group) => g.dump[group])).size > 1;
  const passes = (group) =>
    (g.name[group] + " " + (g.prompt[group] ?? "")).toLowerCase().includes(search.value.toLowerCase()) &&
    (!signal.checked || g.low[group] !== g.high[group]);
  const groupTable = table(
    [
      { name: "group", value: (k) => g.name[k] },
      ...(all || dumps
        ? [{ name: all ? "step" : "call", value: (k) => (all ? g.step[k] : g.dump[k]), right: true }]
        : []),
      {
        name: "prompt",
        value: (k) => g.prompt[k] ?? "",
        wide: true,
        shown: (k) => h("bdi.clip", { dir: "auto" }, gist(g.prompt[k] ?? "")),
      },
      column("sessions", (k) => g.sessions[k], { minor: true }),
      column("reward", (k) => g.reward[k], { title: "mean" }),
      column("low", (k) => g.low[k], { minor: true }),
      column("high", (k) => g.high[k], { minor: true }),
      column("length", (k) => g.length[k], { title: "mean, in tokens" }),
    ],
    groups,
    { open: (k) => address(run, g.step[k], k), label: "groups", note: "No group passes the filters." },
  );
  const sessionTable = table(
    [
      { name: "session", value: (k) => s.number[k], shown: (k) => String(s.number[k]) },
      { name: "group", value: (k) => g.name[s.group[k]] },
      ...(all ? [column("step", (k) => g.step[s.group[k]])] : []),
      column("reward", (k) => s.reward[k]),
      column("length", (k) => s.length[k]),
      column("turns", (k) => s.turns[k]),
      { name: "", value: (k) => (s.chunk[k] < 0 ? "left out" : "") },
    ],
    sessions,
    {
      open: (k) => address(run, g.step[s.group[k]], s.group[k], s.number[k]),
      sort: { column: all ? 3 : 2, down: true },
      label: "sessions",
      note: "No session passes the filters.",
    },
  );
  const tabs = [groupTable, sessionTable];
  const buttons = tabs.map((_, k) => h("button.tab", { role: "tab", onclick: () => choose(k) }));
  function choose(k) {
    tabs.forEach((one, n) => {
      one.hidden = n !== k;
      buttons[n].setAttribute("aria-selected", String(n === k));
    });
  }
  function refresh() {
    const kept = groups.filter(passes),
      inside = new Set(kept);
    const some = sessions.filter((k) => inside.has(s.group[k]));
    groupTable.show(kept);
    sessionTable.show(some);
    buttons[0].textContent = "Groups (" + kept.length.toLocaleString("en") + ")";
    buttons[1].textContent = "Sessions (" + some.length.toLocaleString("en") + ")";
  }
  choose(0);
  refresh();
  const figures = all
    ? []
    : [
        ["sessions", run.steps.sessions[i]],
        ["groups", run.steps.groups[i]],
        ["mean reward", run.steps.reward[i]],
        ["mean length", run.steps.length[i]],
        ["pass@1", percent(run.steps.pass_1[i])],
        [passK(), percent(run.steps.pass_k[i])],
        ["no signal", percent(run.steps.no_signal[i])],
      ];
  const other = all ? null : partner(run, step);
  return [
    h("h1", badge(run), all ? "All steps" : "Step " + step),
    other && h("p", h("a", { href: other }, "The same step of " + runs[1 - run.id].label)),
    facts(figures),
    h(
      "div.filters",
      h("div.tabs", { role: "tablist" }, buttons),
      search,
      hasRewards && h("label", signal, "with signal"),
    ),
    ...tabs,
  ];
}
