// Groups and sessions: turns, and tokens coloured by what was recorded of them.
"use strict";

async function groupView({ run, step, group, index }) {
  const members = run.members[group],
    s = run.sessions;
  const single = index !== undefined;
  view.up = single ? address(run, step, group) : address(run, step);
  const siblings = single ? members : run.groupsOf.get(step);
  const at = siblings.indexOf(single ? index : group);
  const beside = (k) =>
    k === undefined ? null : single ? address(run, step, group, s.number[k]) : address(run, step, k);
  view.before = beside(siblings[at - 1]);
  view.after = beside(siblings[at + 1]);
  const chosen = single ? [index] : members;
  const loaded = await Promise.all(chosen.map((k) => sessionOf(run, k)));
  setColours(loaded);
  const prompt = run.groups.prompt[group];
  const panes = chosen.map((k, n) => pane(run, k, loaded[n], !single && address(run, step, group, s.number[k])));
  const first = loaded.find(Boolean);
  const asked = first && !asMessages(first) ? first.parts[0] : null;
  const lead = asked?.kind === "prompt" ? asked : null;
  return [
    h("h1", single ? "Session " + s.number[index] : ["Group ", text(run.groups.name[group])]),
    facts(
      single
        ? [
            ["reward", s.reward[index]],
            ["length", s.length[index]],
            ["turns", s.turns[index]],
          ]
        : ["reward", "low", "high", "length", "sessions"].map((name) => [name, run.groups[name][group]]),
    ),
    toolbar(loaded),
    !single &&
      (lead || prompt) &&
      h(
        "details.lead",
        { open: true },
        h("summary", lead ? "Prompt, " + count(lead.ids.length, "token") : "Prompt"),
        lead ? body(lead) : h("div.body", { dir: "auto" }, prompt),
      ),
    h(single ? "div.session" : "div.panes", panes),
  ];
}

/** Note what tokens can be coloured by, and the value that has the strongest colour. */
function setColours(loaded) {
  const parts = loaded.flatMap((one) => one?.parts || []);
  view.colours = [...new Set(parts.flatMap((part) => Object.keys(part.values || {})))];
  view.messages = loaded.some((one) => one?.messages.length && asMessages(one));
  view.colouring = view.colours.includes(settings.colour) ? settings.colour : "";
  // The 98th percentile: single tokens may have values far from all others.
  const values = parts.flatMap((part) => part.values?.[view.colouring] || []).filter((v) => v !== null);
  const sizes = values.map(Math.abs).sort((a, b) => a - b);
  view.most = sizes.length ? sizes[Math.floor(0.98 * (sizes.length - 1))] || sizes[sizes.length - 1] : 0;
}

function toolbar(loaded) {
  const hasMessages = loaded.some((one) => one && one.messages.length && one.parts.length);
  const names = view.colours;
  if (!names.length && !hasMessages) return null;
  return h(
    "div.toolbar",
    names.length > 0 &&
      h(
        "label",
        "colour tokens by ",
        h(
          "select.colouring",
          {
            "aria-label": "colour tokens by",
            onchange: (event) => colourBy(event.target.value),
          },
          ["", ...names].map((name) =>
            h("option", { value: name, selected: name === view.colouring }, name || "nothing"),
          ),
        ),
      ),
    hasMessages &&
      h(
        "label",
        h("input", {
          type: "checkbox",
          checked: view.messages,
          onchange: (event) => {
            settings.messages = event.target.checked;
            draw();
          },
        }),
        "as messages",
      ),
    view.colouring && !view.messages && scale(view.colouring, view.most),
  );
}

/** Colour the tokens; messages have none. */
function colourBy(name) {
  settings.colour = name;
  if (name) settings.messages = false;
  draw();
}

// Values of one sign have one colour; of others those below 0 have another.
const signed = (name) => !/log.?probs?|entrop/.test(name);
function scale(name, most) {
  const low = signed(name) ? -most : 0;
  const high = /log.?probs?/.test(name) ? -most : most;
  return h("span.scale", number(low), h("i" + (signed(name) ? ".signed" : "")), number(high));
}
/** The colour of a value's background, the stronger the larger it is. */
function shade(value) {
  const part = view.most ? Math.min(1, Math.abs(value) / view.most) : 0;
  const ink = signed(view.colouring) && value < 0 ? "--low" : "--high";
  return `rgb(var(${ink}) / ${(72 * part).toFixed(0)}%)`;
}

/** Whether a session is shown by its messages: as chosen, else where its tokens have no text. */
const asMessages = (found) =>
  !found.parts.length || (settings.messages ?? !found.parts.some((part) => part.isText));

function pane(run, k, found, link) {
  const s = run.sessions;
  const title = h(
    "header",
    h("strong", link ? h("a", { href: link }, "session " + s.number[k]) : "session " + s.number[k]),
    h("span", s.reward[k] === null ? null : "reward " + number(s.reward[k])),
    h("span.dim", s.length[k] === null ? null : count(s.length[k], "token")),
    s.turns[k] > 1 ? h("span.dim", count(s.turns[k], "turn")) : null,
  );
  return h("article.pane", title, content(found, link, s.turns[k] > 1));
}

/** What a session says; where it is a `link`, without its prompt. */
function content(found, link, isOneOfSeveral) {
  if (!found) return h("p.dim", "This session did not fit into the page (--max-mb).");
  if (found.messages.length && asMessages(found))
    return found.messages
      .slice(link ? found.messages.findIndex((one) => one.role === "assistant") : 0)
      .map((one) =>
        h(
          "section.part." + ({ assistant: "sampled", tool: "observed" }[one.role] ?? "prompt"),
          h("h3", text(one.role)),
          h("div.body", { dir: "auto" }, marked(one.text)),
        ),
      );
  if (found.cells)
    return h(
      "dl.cells",
      found.cells.map(([name, value]) => [h("dt", text(name)), h("dd.body", { dir: "auto" }, value)]),
    );
  const shown = link ? found.parts.filter((part, n) => n || part.kind !== "prompt") : found.parts;
  return shown.map((part) => partView(part, isOneOfSeveral));
}

const NAMES = {
  prompt: "prompt",
  sampled: "policy",
  observed: "observation",
  unknown: "response, of which the mask does not fit",
};
function partView(part, isOneOfSeveral) {
  const all = part.texts.slice(0, 400).join("");
  const what =
    part.kind === "observed" && /<tool_response>|<\|im_start\|>tool/.test(all) ? "tool" : NAMES[part.kind];
  const title = h(
    "h3",
    (isOneOfSeveral ? "turn " + (part.turn + 1) + " · " : "") + what,
    h("small", count(part.ids.length, "token")),
  );
  const rewritten = part.turn > 0 && part.kind === "prompt";
  return h(
    "section.part." + part.kind,
    rewritten ? h("details", h("summary", title), body(part)) : [title, body(part)],
  );
}

const LIMIT = 20000;
const MARKS = /(<(tool_call|tool_response|think|function_call)>)[\s\S]*?(<\/\2>|$)|<\|[^|<>]{1,40}\|>/g;

/** The class of each stretch of a text: tool calls, thinking, special tokens of templates. */
function stretches(whole) {
  const found = [];
  for (const match of whole.matchAll(MARKS)) {
    const kind = !match[2] ? "special" : match[2] === "think" ? "think" : "tool";
    found.push([match.index, match.index + match[0].length, kind]);
  }
  return found;
}

function marked(whole) {
  const made = [];
  let at = 0;
  for (const [from, to, kind] of stretches(whole)) {
    made.push(whole.slice(at, from), h("span." + kind, whole.slice(from, to)));
    at = to;
  }
  return [...made, whole.slice(at)];
}

/** The class of each token of a text, or of none: that of the stretch in which it begins. */
function kindsOf(texts) {
  const found = stretches(texts.join(""));
  let at = 0;
  let next = 0;
  return texts.map((piece) => {
    while (next < found.length && found[next][1] <= at) next++;
    const kind = next < found.length && found[next][0] <= at ? found[next][2] : "";
    at += piece.length;
    return kind;
  });
}

/** The text of a part. Tokens with a value are elements of their own, others with what is like them. */
function body(part) {
  const values = part.values?.[view.colouring];
  const kinds = part.isText ? kindsOf(part.texts) : [];
  const made = h("div.body", { dir: part.isText ? "auto" : "ltr" });
  function add(from, to) {
    let run = null;
    for (let i = from; i <= to; i++) {
      const value = values?.[i] ?? null;
      if (run && (i === to || value !== null || run.value !== null || run.kind !== kinds[i])) {
        made.append(element(run));
        run = null;
      }
      if (i === to) break;
      run ??= { kind: kinds[i], value, at: i, pieces: [] };
      run.pieces.push(part.texts[i]);
    }
  }
  function element({ kind, value, at, pieces }) {
    const whole = visible(pieces.join(""));
    if (value === null) return kind ? h("span." + kind, whole) : whole;
    const title = `token ${at} (${part.ids[at]}): ${view.colouring} ${number(value)}`;
    const made = h("span.valued" + (kind ? "." + kind : ""), { title }, whole);
    made.style.background = shade(value);
    return made;
  }
  const end = part.texts.length;
  add(0, Math.min(LIMIT, end));
  if (end > LIMIT) {
    const show = () => (more.remove(), add(LIMIT, end));
    const more = h("button.more", { onclick: show }, "Show the other " + count(end - LIMIT, "token"));
    made.append(more);
  }
  return made;
}
