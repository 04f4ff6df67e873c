// Elements, and tables that sort and draw rows as they are needed. Text from the data becomes text nodes only.
"use strict";

/** h("td.num", {title: "..."}, "text", child, ...): texts become text nodes; the attributes may be left out. */
function h(name, ...children) {
  const given = children[0]?.constructor === Object ? children.shift() : {};
  const [tag, ...classes] = name.split(".");
  const made = document.createElement(tag);
  if (classes.length) made.className = classes.join(" ");
  for (const [key, value] of Object.entries(given)) {
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (value === true) made.setAttribute(key, "");
    else if (value !== false && value !== null && value !== undefined) made.setAttribute(key, value);
  }
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    made.append(child instanceof Node ? child : visible(child));
  }
  return made;
}
/** Text from the data, kept apart from the direction of the text around it. */
const text = (value) => h("bdi", { dir: "auto" }, value);

/** Names and values, without those that are not known. */
const facts = (pairs) => {
  const known = pairs.filter(([, v]) => v !== false && !absent(v));
  const shown = (v) => (typeof v === "number" ? number(v) : text(v));
  return h(
    "dl.facts",
    known.map(([name, v]) => h("div", h("dt", name), h("dd", shown(v)))),
  );
};
const badge = (run) => run.label && h("span.badge.c" + run.id, run.label);

/** A name that may be broken after its separators. */
const broken = (name) =>
  h(
    "bdi",
    { dir: "auto" },
    name.split(/(?<=[_/])/).flatMap((part) => [part, h("wbr")]),
  );

const BATCH = 200;
const classes = (column) =>
  (column.right ? ".num" : "") + (column.wide ? ".wide" : "") + (column.minor ? ".minor" : "");

/**
 * A table that sorts by its heads and draws rows as they are needed. A column of numbers of which no row has one is
 * left out.
 *
 * columns: {name, value(row), shown(row), right, title, wide, minor: hidden on a phone}; open(row): the address of a row.
 */
function table(columns, rows, { open, sort = null, label, note } = {}) {
  columns = columns.filter((one) => !one.numeric || !rows.length || rows.some((row) => !absent(one.value(row))));
  let order = sort || { column: -1, down: false };
  let drawn = 0,
    sorted = rows;
  const body = h("tbody");
  const more = h("button.more", { onclick: () => draw() });
  const heads = columns.map((column, i) =>
    h(
      "th" + classes(column),
      { scope: "col", title: column.title },
      h("button.head", { onclick: () => by(i) }, column.name),
    ),
  );
  function by(i) {
    order = { column: i, down: order.column === i ? !order.down : Boolean(columns[i].right) };
    start(rows);
  }
  function start(given) {
    rows = given;
    const column = columns[order.column];
    sorted = column
      ? rows.slice().sort((a, b) => compare(column.value(a), column.value(b)) * (order.down ? -1 : 1))
      : rows;
    heads.forEach((head, i) => {
      const state = i === order.column ? (order.down ? "descending" : "ascending") : null;
      state ? head.setAttribute("aria-sort", state) : head.removeAttribute("aria-sort");
    });
    for (const one of columns) if (one.numeric) one.write = decimals(rows.map(one.value));
    body.replaceChildren();
    drawn = 0;
    draw();
  }
  const write = (column, row) =>
    column.shown
      ? column.shown(row)
      : column.write
        ? column.write(column.value(row))
        : text(column.value(row) ?? "");
  function draw() {
    for (const row of sorted.slice(drawn, drawn + BATCH)) {
      const where = open && open(row);
      const cells = columns.map((column, i) => {
        const inner = write(column, row);
        return h("td" + classes(column), where && i === 0 ? h("a", { href: where }, inner) : inner);
      });
      body.append(h("tr", where ? { onclick: (event) => event.target.closest("a") || go(where) } : null, cells));
    }
    drawn = Math.min(sorted.length, drawn + BATCH);
    more.textContent = "Show more (" + (sorted.length - drawn).toLocaleString("en") + ")";
    more.hidden = drawn >= sorted.length;
    empty.hidden = sorted.length > 0;
  }
  const empty = h("p.dim", note || "None.");
  const made = h(
    "div.scroll",
    h("table" + (open ? ".rows" : ""), { "aria-label": label }, h("thead", h("tr", heads)), body),
    empty,
    more,
  );
  made.show = start;
  start(rows);
  return made;
}

function compare(a, b) {
  if (absent(a) || absent(b)) return absent(a) - absent(b);
  return typeof a === "number" && typeof b === "number"
    ? a - b
    : String(a).localeCompare(String(b), "en", { numeric: true });
}

const column = (name, value, more) => ({ name, value, numeric: true, right: true, ...more });
