// The frame of the page, its keys, and its start.
"use strict";

const shell = {
  path: h("nav.path", { "aria-label": "where this is" }),
  main: h("main", { tabindex: "-1" }),
  help: h("dialog.help", { "aria-label": "keys" }),
};
const KEYS = [
  ["j", "next row of a table; step, group, session", () => move(1)],
  ["k", "the one before", () => move(-1)],
  ["Enter", "open the row"],
  ["u", "up", () => view.at && go(view.up)],
  ["/", "search", () => shell.main.querySelector("input.search")?.focus()],
  ["t", "colour tokens by the next value", () => view.colours?.length && colourByNext()],
  ["m", "tokens or messages", () => ((settings.messages = !view.messages), draw())],
  ["?", "these keys", () => shell.help.showModal()],
];
shell.help.append(
  h("h2", "Keys"),
  h(
    "table",
    h(
      "tbody",
      KEYS.map(([key, what]) => h("tr", h("td", h("kbd", key)), h("td", what))),
    ),
  ),
  h("form", { method: "dialog" }, h("button", "Close")),
);

addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const typing = /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName);
  if (event.key === "Escape" && typing) return event.target.blur();
  if (typing || shell.help.open) return;
  const act = KEYS.find(([key]) => key === event.key)?.[2];
  if (act) {
    event.preventDefault();
    act();
  }
});

function move(by) {
  const rows = [...shell.main.querySelectorAll("table.rows tbody a")].filter((link) => link.offsetParent);
  if (!rows.length) {
    const where = by > 0 ? view.after : view.before;
    return where && go(where);
  }
  const at = rows.indexOf(document.activeElement);
  rows[Math.max(0, Math.min(rows.length - 1, at < 0 ? (by > 0 ? 0 : rows.length - 1) : at + by))].focus();
}

function colourByNext() {
  const names = ["", ...view.colours];
  colourBy(names[(names.indexOf(view.colouring) + 1) % names.length]);
}

addEventListener("hashchange", draw);

async function start() {
  await load();
  document.body.append(
    h("header", shell.path, h("button.quiet", { onclick: () => shell.help.showModal(), title: "keys" }, "?")),
    shell.main,
    shell.help,
    h("footer", "rlskip " + data.version),
  );
  await draw();
  document.documentElement.dataset.ready = String(Math.round(performance.now()));
}
start();
