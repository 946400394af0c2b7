// Elements, numbers in words, and requests. Text is always set as text: nothing from a record is ever parsed as HTML.
export function h(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function s(tag, attributes = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || (value === false && !name.startsWith("aria-"))) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true && !name.startsWith("aria-") ? "" : String(value));
  }
  element.append(...children.flat(4).filter((c) => c !== null && c !== undefined && c !== false).map((c) => (c instanceof Node ? c : String(c))));
  return element;
}

// Put these children in the place of those that are there.
export function refill(element, ...children) {
  element.replaceChildren();
  return fill(element, {}, children);
}

export async function get(path) {
  const answer = await fetch(path, { headers: { Accept: "application/json" } });
  const body = await answer.json().catch(() => ({}));
  if (!answer.ok) throw new Error([body.error || `the server answered ${answer.status}`, body.remedy].filter(Boolean).join("; "));
  return body;
}

export const known = (v) => typeof v === "number" && Number.isFinite(v);
const whole = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });
export const count = (v) => (known(v) ? whole.format(v) : "–");
// At most three significant figures, thousands separated.
export function figure(v) {
  if (!known(v)) return "–";
  if (v === 0) return "0";
  const size = Math.abs(v);
  if (size >= 100) return whole.format(v);
  if (size < 1e-3) return v.toExponential(1);
  return String(Number(v.toPrecision(3)));
}
export const percent = (v, digits = 1) => (known(v) ? `${v === 1 || v === 0 ? 100 * v : (100 * v).toFixed(digits)} %` : "–");
export const money = (v) => (!known(v) ? "–" : v >= 1e4 ? `$${figure(v / 1e3)} k` : v >= 100 ? `$${count(Number(v.toPrecision(3)))}` : v >= 0.1 ? `$${v.toFixed(2)}` : `$${figure(v)}`);
export function seconds(v) {
  if (!known(v)) return "–";
  if (v <= 0) return "0 s";
  if (v < 1e-3) return `${figure(v * 1e6)} µs`;
  if (v < 1) return `${figure(v * 1e3)} ms`;
  if (v < 120) return `${figure(v)} s`;
  const minutes = Math.floor(v / 60), hours = Math.floor(minutes / 60);
  if (hours >= 48) return `${Math.floor(hours / 24)} d ${hours % 24} h`;
  return hours ? `${hours} h ${minutes % 60} min` : `${minutes} min ${Math.round(v % 60)} s`;
}
export const short = (v) => {
  const size = Math.abs(v);
  for (const [unit, by] of [["T", 1e12], ["G", 1e9], ["M", 1e6], ["k", 1e3]]) if (size >= by) return `${figure(v / by)} ${unit}`;
  return figure(v);
};
export const clock = (at) => new Date(at * 1e3).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" });
export const precise = (at) => `${clock(at)}.${String(Math.floor((at % 1) * 1e3)).padStart(3, "0")}`;
export const date = (at) => new Date(at * 1e3).toLocaleString([], { month: "short", day: "numeric", hour: "2-digit", minute: "2-digit", hourCycle: "h23" });

// States: the same colour, the same pattern and the same word everywhere.
export const STATES = {
  productive: "steps that count", start: "starting and loading", data: "waiting for samples", checkpoint: "waiting for a checkpoint",
  recovery: "standing still: something failed or changed", out: "ranks that take no part", rollback: "steps that were abandoned",
  between: "between steps", end: "saving and leaving",
};
const HATCHED = { start: "45", between: "0", end: "135", recovery: "45", out: "135", rollback: "90", gaps: "45", reduce: "135", vote: "90" };
const PLAIN = new Set([...Object.keys(STATES), "forward", "backward", "optimizer"]);
export function patterns() {
  return s("defs", {}, Object.entries(HATCHED).map(([state, angle]) =>
    s("pattern", { id: `p-${state}`, width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: `rotate(${angle})` },
      s("rect", { width: 6, height: 6, fill: `var(--${state})` }), s("line", { x1: 0, y1: 0, x2: 0, y2: 6, class: "pattern-lines" }))));
}
export const paint = (state) => (state in HATCHED ? `url(#p-${state})` : `var(--${PLAIN.has(state) ? state : "between"})`);
export const swatch = (state) => s("svg", { width: 12, height: 12, "aria-hidden": true }, patterns(), s("rect", { width: 12, height: 12, fill: paint(state) }));

// The state of a run: a shape and a word, not colour alone.
const RUN = { running: ["●", "productive"], done: ["✓", "checkpoint"], stopped: ["■", "start"], failed: ["✕", "recovery"], lost: ["?", "recovery"] };
export function runState(state) {
  const [mark, colour] = RUN[state] || ["·", "start"];
  const sign = h("span", { "aria-hidden": true }, mark);
  sign.style.color = `var(--${colour})`;
  return h("span", { class: "state" }, sign, state);
}

export function download(name, type, text) {
  const link = h("a", { href: URL.createObjectURL(new Blob([text], { type })), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}
