// What the file holds, unpacked, and numbers and texts as the page writes them. Scripts share their names.
"use strict";

const unpacked = new Map();

async function unpack(name) {
  if (!unpacked.has(name)) unpacked.set(name, read(name));
  return unpacked.get(name);
}

async function read(name) {
  const packed = atob(document.getElementById(name).textContent);
  const bytes = new Uint8Array(packed.length);
  for (let i = 0; i < packed.length; i++) bytes[i] = packed.charCodeAt(i);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

let data, runs;

/** Read the index, and note in each run what finds its steps, groups and sessions. */
async function load() {
  data = await unpack("index");
  runs = data.runs;
  runs.forEach((run, r) => {
    run.id = r;
    run.label = runs.length > 1 ? "AB"[r] : "";
    const placed = (steps) => new Map(steps.map((step, i) => [step, i]));
    run.at = { steps: placed((run.steps.step ??= [])), curves: placed(run.recorded) };
    run.members = (run.groups.step ??= []).map(() => []);
    run.sessions.group.forEach((g, i) => run.members[g].push(i));
    run.groupsOf = new Map(run.steps.step.map((step) => [step, []]));
    run.groups.step.forEach((step, g) => run.groupsOf.get(step).push(g));
  });
}

/** A figure of a step: of those in a run's `steps`, or in its `curves`, which a job recorded. */
const figure = (run, name, step, from = "steps") => run[from][name]?.[run.at[from].get(step)] ?? null;
/** The steps of which any of some runs has figures. */
const stepsOf = (some, from) =>
  [...new Set(some.flatMap((run) => [...run.at[from].keys()]))].sort((a, b) => a - b);

/** A session as its chunk has it; null where it did not fit into the page. */
async function sessionOf(run, i) {
  const chunk = run.sessions.chunk[i];
  if (chunk < 0) return null;
  const all = await unpack("chunk-" + chunk);
  const found = all.sessions[run.sessions.place[i]];
  for (const part of found.parts) {
    part.isText ??= Boolean(part.texts) || Object.keys(all.texts).length > 0;
    part.texts ??= part.ids.map((id) => (part.isText ? (all.texts[id] ?? "") : id + " "));
  }
  return found;
}

// Control characters, and those that turn the direction of what follows, are shown as escapes.
const CONTROL =
  /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]/g;
const visible = (text) =>
  String(text).replace(CONTROL, (c) => "\\u" + c.charCodeAt(0).toString(16).padStart(4, "0"));

const absent = (v) => v === null || v === undefined || v === "";
/** A number with four digits, as `rlskip show` writes it. */
function number(value) {
  if (absent(value)) return "";
  if (Number.isInteger(value)) return String(value);
  const [digits, power] = value.toExponential(3).split("e");
  if (power < -5 || power >= 4) {
    const sign = power < 0 ? "-" : "+";
    return Number(digits) + "e" + sign + String(Math.abs(power)).padStart(2, "0");
  }
  return String(Number(value.toPrecision(4)));
}
const count = (n, what) => n.toLocaleString("en") + " " + what + (n === 1 ? "" : "s");
const percent = (value) => (absent(value) ? "" : (100 * value).toFixed(1) + " %");
/** Writes the numbers of a column with as many decimals as its largest needs for four digits. */
function decimals(values) {
  const known = values.filter((v) => !absent(v));
  const most = known.reduce((size, v) => Math.max(size, Math.abs(v)), 0);
  const digits = known.every(Number.isInteger) ? 0 : Math.max(0, 3 - Math.floor(Math.log10(most || 1)));
  return (v) => (absent(v) || digits > 7 ? number(v) : v.toFixed(digits));
}
