// Which view is shown. An address names what is shown: #run/step/group/session.
"use strict";

const address = (run, step, group, session) =>
  "#" +
  [run.id, step, group === undefined ? null : run.groupsOf.get(step).indexOf(group), session]
    .filter((part) => part !== null && part !== undefined)
    .join("/");
function go(where) {
  location.hash = where;
}

/** {run, step, group, index: which of the run's sessions} of an address; null where there is no such thing. */
function place(part) {
  const [r, s, g, n] = part.split("/");
  const run = runs[r];
  if (!run || s === undefined) return null;
  if (s === "all") return { run, step: "all" };
  const step = Number(s);
  if (!run.at.steps.has(step)) return null;
  if (g === undefined) return { run, step };
  const group = run.groupsOf.get(step)[Number(g)];
  if (group === undefined) return null;
  if (n === undefined) return { run, step, group };
  const index = run.members[group].find((k) => run.sessions.number[k] === Number(n));
  return index === undefined ? null : { run, step, group, index };
}

/** A step as its links name it. */
const nameOf = (run, step) => [run.label, "step " + step].filter(Boolean).join(", ");
/** What a prompt asks: its last stretch between the special tokens of a chat template. */
function gist(prompt) {
  const stretches = prompt
    .split(/<\|[^|<>]{1,40}\|>/)
    .map((one) => one.trim())
    .filter((one) => one && !/^(assistant|user|system)$/.test(one));
  return stretches.length ? stretches[stretches.length - 1].replace(/^(user|system|human)\n/, "") : prompt;
}

let view = {};
const settings = { colour: "", messages: null };

async function draw() {
  const here = location.hash.slice(1);
  const at = here ? place(here) : null;
  for (const one of charts) one.plot?.destroy();
  charts = [];
  view = { at, up: "#", before: null, after: null };
  let content;
  if (at) content = at.group === undefined ? stepView(at) : await groupView(at);
  else content = await overview();
  if (location.hash.slice(1) !== here) return;
  path(at);
  shell.main.replaceChildren(...content.filter(Boolean));
  drawCharts();
  scrollTo(0, 0);
  document.documentElement.dataset.view = location.hash || "#";
}

function path(at) {
  const links = [h("a", { href: "#" }, runs.length > 1 ? "Comparison" : "Run")];
  if (at) {
    links.push(
      h("a", { href: address(at.run, at.step) }, at.step === "all" ? "all steps" : nameOf(at.run, at.step)),
    );
    if (at.group !== undefined)
      links.push(
        h("a", { href: address(at.run, at.step, at.group) }, "group ", text(at.run.groups.name[at.group])),
      );
    if (at.index !== undefined) {
      const session = at.run.sessions.number[at.index];
      links.push(h("a", { href: address(at.run, at.step, at.group, session) }, "session " + session));
    }
  }
  links[links.length - 1].setAttribute("aria-current", "page");
  const move = (name, sign, title) =>
    view[name] && h("a.step", { href: view[name], title, "aria-label": title }, sign);
  const moves = h("span.move", move("before", "\u2039", "previous (k)"), move("after", "\u203a", "next (j)"));
  shell.path.replaceChildren(...links, moves);
}
