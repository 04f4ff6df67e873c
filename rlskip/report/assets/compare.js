// Two steps on the same prompts: what changed.
"use strict";

function comparedSteps(a, b) {
  view.up = address(a.run, a.step);
  const groups = (one) => (one.run.groupsOf.get(one.step) || []).filter((g) => promptOf(one.run, g));
  const theirs = new Map();
  for (const g of groups(b)) {
    const key = promptOf(b.run, g)[0];
    if (!theirs.has(key)) theirs.set(key, []);
    theirs.get(key).push(g);
  }
  const rows = [],
    alone = [];
  for (const g of groups(a)) {
    const other = theirs.get(promptOf(a.run, g)[0])?.shift();
    other === undefined ? alone.push(g) : rows.push([g, other]);
  }
  const A = a.run.groups,
    B = b.run.groups;
  const change = (x, y) => (x === null || y === null ? null : y - x);
  const delta = (name, of) => column(name, ([g, k]) => change(A[of][g], B[of][k]), { sign: true });
  const words = h("input.search", {
    type: "search",
    placeholder: "Search prompts ( / )",
    "aria-label": "search",
    oninput: (event) => {
      const wanted = event.target.value.toLowerCase();
      made.show(rows.filter(([g]) => promptOf(a.run, g)[1].toLowerCase().includes(wanted)));
    },
  });
  const made = table(
    [
      { name: "group", value: ([g]) => A.name[g] },
      {
        name: "prompt",
        value: ([g]) => promptOf(a.run, g)[1],
        wide: true,
        shown: ([g]) => h("bdi.clip", { dir: "auto" }, gist(promptOf(a.run, g)[1])),
      },
      column("reward A", ([g]) => A.reward[g]),
      column("reward B", ([, k]) => B.reward[k]),
      delta("change", "reward"),
      column("length A", ([g]) => A.length[g]),
      column("length B", ([, k]) => B.length[k]),
      delta("change", "length"),
    ],
    rows,
    {
      open: ([g, k]) => address(a.run, a.step, g) + "/vs/" + address(b.run, b.step, k).slice(1),
      label: "prompts",
      sort: null,
      note: "They have no prompt in common.",
    },
  );
  const mean = (of) =>
    rows.length
      ? rows.reduce((sum, [g, k]) => sum + (change(A[of][g], B[of][k]) ?? 0), 0) / rows.length
      : null;
  return [
    h("h1", null, "The same prompts"),
    runs.length > 1 && a.run !== b.run
      ? null
      : h("p.dim", null, "A is " + nameOf(a.run, a.step) + ", B is " + nameOf(b.run, b.step) + "."),
    facts([
      ["prompts in both", rows.length],
      ["only in A", alone.length],
      ["only in B", [...theirs.values()].flat().length],
      ["mean change of reward", mean("reward")],
      ["mean change of length", mean("length")],
    ]),
    h("div.filters", null, words),
    made,
  ];
}

async function comparedGroups(a, b) {
  view.up = address(a.run, a.step) + "/vs/" + address(b.run, b.step).slice(1);
  const mine = a.run.members[a.group],
    theirs = b.run.members[b.group];
  const load = (run, some) => Promise.all(some.map((k) => sessionOf(run, k)));
  const [x, y] = [await load(a.run, mine), await load(b.run, theirs)];
  setColours([...x, ...y]);
  const said = (one) => one.parts.filter((part) => part.kind !== "prompt").flatMap((part) => part.ids);
  const pairs = Array.from({ length: Math.max(mine.length, theirs.length) }, (_, i) => {
    const [p, q] = [x[i], y[i]];
    const [left, right] = p && q ? difference(said(p), said(q)) : [null, null];
    const others = left ? [left.indexOf(true), right.indexOf(true)].filter((at) => at >= 0) : [];
    const state = others.length
      ? "differ from token " + Math.min(...others) + " on"
      : left && "the same tokens";
    return h(
      "section.pair",
      null,
      state ? h("p.dim", null, "Sessions " + i + ": " + state) : null,
      h(
        "div.panes.two",
        null,
        mine[i] === undefined
          ? h("article.pane", null, h("p.dim", null, "only in B"))
          : pane(a.run, mine[i], p, {
              link: address(a.run, a.step, a.group, a.run.sessions.number[mine[i]]),
              where: nameOf(a.run, a.step),
              flags: left,
            }),
        theirs[i] === undefined
          ? h("article.pane", null, h("p.dim", null, "only in A"))
          : pane(b.run, theirs[i], q, {
              link: address(b.run, b.step, b.group, b.run.sessions.number[theirs[i]]),
              where: nameOf(b.run, b.step),
              flags: right,
            }),
      ),
    );
  });
  const changed = (name) => [a, b].map((one) => number(one.run.groups[name][one.group])).join(" \u2192 ");
  const prompt = promptOf(a.run, a.group);
  return [
    h("h1", null, "The same prompt"),
    h("p.dim", null, "What only one of them says is marked."),
    facts(["reward", "length"].map((name) => [name, changed(name)])),
    prompt
      ? h(
          "details.lead",
          { open: true },
          h("summary", null, "Prompt"),
          h("div.body", { dir: "auto" }, prompt[1]),
        )
      : null,
    toolbar([...x, ...y]),
    ...pairs,
  ];
}

/** Which entries of each list the other lacks, by Myers; beyond 600 changes all that is left. */
function difference(a, b) {
  let start = 0,
    end = 0;
  while (start < a.length && start < b.length && a[start] === b[start]) start++;
  while (end < a.length - start && end < b.length - start && a[a.length - 1 - end] === b[b.length - 1 - end])
    end++;
  const flags = [new Array(a.length).fill(false), new Array(b.length).fill(false)];
  const n = a.length - start - end,
    m = b.length - start - end,
    most = Math.min(n + m, 600);
  const trace = [],
    reach = new Map([[1, 0]]);
  for (let d = 0; d <= most; d++) {
    trace.push(new Map(reach));
    for (let k = -d; k <= d; k += 2) {
      let i =
        k === -d || (k !== d && reach.get(k - 1) < reach.get(k + 1))
          ? reach.get(k + 1)
          : reach.get(k - 1) + 1;
      while (i < n && i - k < m && a[start + i] === b[start + i - k]) i++;
      reach.set(k, i);
      if (i >= n && i - k >= m) return back(d, k);
    }
  }
  for (let i = start; i < a.length - end; i++) flags[0][i] = true;
  for (let i = start; i < b.length - end; i++) flags[1][i] = true;
  return flags;

  function back(d, k) {
    for (let i = n; d > 0; d--) {
      const before = trace[d];
      const down = k === -d || (k !== d && before.get(k - 1) < before.get(k + 1));
      const from = down ? k + 1 : k - 1,
        at = before.get(from);
      if (down) flags[1][start + at - from] = true;
      else flags[0][start + at] = true;
      [k, i] = [from, at];
    }
    return flags;
  }
}
