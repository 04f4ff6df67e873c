// Curves over steps.
"use strict";

let charts = [];
const colour = (name) =>
  getComputedStyle(document.documentElement)
    .getPropertyValue("--" + name)
    .trim();

/**
 * A chart of figures by step: `lines` are {name, of: figure, band: [low, high]}, drawn for each run.
 * The figures are those of a run's `steps`, or its `curves`. What is equal in both is drawn once.
 */
function chart(title, note, lines, { share = false, from = "steps", unlessZero = true } = {}) {
  const all = stepsOf(runs, from);
  const column = (run, name, steps = all) => steps.map((step) => figure(run, name, step, from));
  lines = lines.filter((line) =>
    runs.some((run) => column(run, line.of).some((v) => v || (v === 0 && !unlessZero))),
  );
  let shown = runs.filter((run) => lines.some((line) => column(run, line.of).some((v) => v !== null)));
  if (!shown.length) return null;
  const key = (run) => JSON.stringify([[...run.at[from].keys()], ...lines.map((line) => run[from][line.of])]);
  const same = shown.length > 1 && key(shown[0]) === key(shown[1]);
  if (same) shown = shown.slice(0, 1);
  const steps = stepsOf(shown, from);
  const values = [steps],
    series = [{ label: "step" }],
    bands = [];
  const show = share ? percent : number;
  // Two runs have a colour each, and further lines are dashed; in one run the lines have colours.
  const two = runs.length > 1;
  for (const [n, line] of lines.entries())
    for (const run of shown) {
      const ink = colour("c" + (two ? run.id : n));
      const add = (name, given) => values.push(column(run, name, steps)) && series.push(given) - 1;
      if (line.band) {
        const [low, high] = line.band.map((name) => add(name, { stroke: "transparent", points: { show: false } }));
        bands.push({ series: [high, low], fill: ink + "26" });
      }
      add(line.of, {
        label: [line.name, same ? "" : run.label].filter(Boolean).join(" "),
        stroke: ink,
        width: 1.75,
        spanGaps: true,
        dash: two && n ? [5, 3] : undefined,
        points: { show: steps.length < 40, size: 5, fill: ink },
      });
    }
  const holder = h("div.plot");
  const names = two || lines.length < 2 ? [] : lines.map((line, n) => h("span.key.c" + n, line.name));
  if (two && lines.length > 1) note += ": " + lines.map((line, n) => (n ? "dashed " : "") + line.name).join(", ");
  const last = shown.map((run) => {
    const values = column(run, lines[0].of);
    return h(
      "strong.c" + run.id,
      run.label && h("small", (same ? "A, B" : run.label) + " "),
      show(values[values.findLastIndex((v) => v !== null)] ?? null),
    );
  });
  const made = h(
    "figure.chart",
    { "aria-label": title },
    h("figcaption", h("span", title), last),
    h("p.legend", names, h("span", note)),
    h("output.value"),
    holder,
  );
  made.isSame = same;
  charts.push({ made, holder, values, series, bands, share, shown, steps, show });
  return made;
}

function drawCharts() {
  for (const one of charts) {
    one.plot?.destroy();
    one.holder.replaceChildren();
    const ink = colour("dim"),
      grid = { stroke: colour("line"), width: 1 },
      font = "11px system-ui, sans-serif";
    const said = one.made.querySelector(".value");
    one.plot = new uPlot(
      {
        width: Math.max(200, one.holder.clientWidth),
        height: 140,
        legend: { show: false },
        cursor: { sync: { key: "steps" }, drag: { x: false, y: false }, points: { size: 6 } },
        scales: {
          x: { time: false, range: one.steps.length > 1 ? undefined : () => [one.steps[0] - 1, one.steps[0] + 1] },
          y: { range: (_, low, high) => spread(low, high, one.share) },
        },
        series: one.series,
        bands: one.bands,
        axes: [
          {
            stroke: ink,
            grid: { show: false },
            ticks: grid,
            font,
            size: 26,
            incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 1e5, 1e6],
          },
          {
            stroke: ink,
            grid,
            ticks: { show: false },
            font,
            size: 46,
            space: 28,
            values: (_, ticks) => ticks.map((v) => (one.share ? Math.round(100 * v) + " %" : number(v))),
          },
        ],
        hooks: {
          setCursor: [
            (plot) => {
              const i = plot.cursor.idx;
              const lines = one.series.map((s, k) => k && s.width && s.label + " " + one.show(one.values[k][i]));
              const figures = lines.filter(Boolean).join(", ");
              said.textContent = absent(i) ? "" : "step " + one.steps[i] + ": " + figures;
            },
          ],
        },
      },
      one.values,
      one.holder,
    );
    one.plot.over.addEventListener("click", () => {
      const step = one.steps[one.plot.cursor.idx];
      if (step !== undefined) go(address(one.shown[0], step));
    });
  }
}

/** The range of an axis: from 0 where that is near, and never of no height. */
function spread(low, high, share) {
  if (absent(low)) return [0, 1];
  if (share) return [0, Math.max(0.05, Math.min(1, high * 1.1))];
  if (low === high) return low === 0 ? [0, 1] : [Math.min(0, 2 * low), Math.max(0, 2 * high)];
  const room = 0.08 * (high - low);
  return [low >= 0 && low < high - low ? 0 : low - room, high + room];
}
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => draw());
let width = innerWidth;
addEventListener("resize", () => {
  if (innerWidth !== width) {
    width = innerWidth;
    drawCharts();
  }
});
