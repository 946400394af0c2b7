// Line charts and the ribbon of states on one shared time axis. Every chart of a run has the same View: hover, zoom and
// selection in one move all. The server sends at most a point or two per pixel, each with its smallest and largest value.
import { h, s, figure, short, count, percent, clock, date, known, patterns, paint, STATES, seconds, download } from "./dom.js";

const LEFT = 56, RIGHT = 16, TOP = 8, BOTTOM = 20;

export class View {
  constructor(begin, end) {
    Object.assign(this, { min: begin, max: end, begin, end, listeners: new Set(), hovers: new Set(), follows: true });
  }
  on(draw, hover) { this.listeners.add(draw); if (hover) this.hovers.add(hover); }
  set(begin, end) {
    const least = Math.max(1e-3, (this.max - this.min) / 1e6);
    begin = Math.max(this.min, begin); end = Math.min(this.max, end);
    if (end - begin < least) return;
    this.begin = begin; this.end = end;
    this.follows = begin <= this.min && end >= this.max;
    this.changed();
  }
  grow(max) {
    const whole = this.follows;
    this.max = max;
    if (whole) this.end = max;
  }
  reset() { this.set(this.min, this.max); }
  changed() { for (const draw of this.listeners) draw(); }
  hover(t) { for (const move of this.hovers) move(t); }
  x(t, width) { return LEFT + ((t - this.begin) / (this.end - this.begin)) * (width - LEFT - RIGHT); }
  t(x, width) { return this.begin + ((x - LEFT) / (width - LEFT - RIGHT)) * (this.end - this.begin); }
}

// Ticks at round values: at most `most` of them.
export function ticks(low, high, most) {
  const span = high - low || 1, raw = span / most, size = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((m) => m * size).find((m) => m >= raw);
  const out = [];
  for (let v = Math.ceil(low / step) * step; v <= high + step * 1e-9; v += step) out.push(Math.abs(v) < step * 1e-9 ? 0 : v);
  return out;
}

function timeTicks(view, most) {
  const span = view.end - view.begin;
  const steps = [0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400, 172800, 604800];
  const offset = new Date(view.begin * 1e3).getTimezoneOffset() * 60;
  const fitting = steps.findIndex((each) => span / each <= most);
  let step = steps[fitting] || 2592000, out = [];
  for (const each of [step, steps[fitting - 1]]) {  // one tick alone is no scale
    if (!each || out.length > 1) break;
    step = each; out = [];
    for (let t = Math.ceil((view.begin - offset) / step) * step + offset; t <= view.end; t += step) out.push(t);
  }
  return { at: out, text: (t) => (span > 172800 ? date(t) : step < 1 ? `${clock(t)}.${Math.round((t % 1) * 10)}` : clock(t)) };
}

// A frame with a time axis, drag to zoom, and a cursor that all frames share.
function frame(view, { title, unit, height, note, tools = [], csv }) {
  const plot = h("div", { class: "plot" }), tip = h("div", { class: "tip", hidden: true });
  const name = title.toLowerCase().replace(/[^a-z0-9]+/g, "-");
  const svgOut = () => {
    const copy = plot.querySelector("svg").cloneNode(true), style = getComputedStyle(document.documentElement);
    const css = [...document.styleSheets[0].cssRules].map((r) => r.cssText).filter((t) => t.startsWith(".plot") || t.startsWith(".pattern")).join("");
    copy.prepend(s("style", {}, css.replaceAll(".plot ", "").replace(/var\((--[a-z-]+)\)/g, (_, v) => style.getPropertyValue(v))));
    const text = new XMLSerializer().serializeToString(copy).replace(/var\((--[a-z-]+)\)/g, (_, v) => style.getPropertyValue(v).trim());
    download(`${name}.svg`, "image/svg+xml", text);
  };
  const figureElement = h("figure", { "data-chart": name },
    h("figcaption", {}, h("b", {}, title), unit ? h("span", {}, unit) : null, note ? h("span", { class: "hide-narrow" }, note) : null,
      h("span", { class: "tools hide-narrow" }, tools, csv ? h("button", { type: "button", onclick: () => download(`${name}.csv`, "text/csv", csv()) }, "CSV") : null,
        h("button", { type: "button", onclick: svgOut }, "SVG"))),
    plot, );
  plot.append(tip);
  let down = null, pick = null;
  const at = (event) => { const box = plot.getBoundingClientRect(); return view.t(event.clientX - box.left, box.width); };
  plot.addEventListener("pointermove", (event) => {
    view.hover(at(event));
    if (down !== null && pick) {
      const width = plot.clientWidth, a = view.x(Math.min(down, at(event)), width), b = view.x(Math.max(down, at(event)), width);
      pick.setAttribute("x", a); pick.setAttribute("width", Math.max(0, b - a));
    }
  });
  plot.addEventListener("pointerleave", () => view.hover(null));
  plot.addEventListener("pointerdown", (event) => {
    if (event.button || event.target.closest("a, .glyph")) return;
    down = at(event);
    plot.setPointerCapture(event.pointerId);  // the end of a drag is heard, wherever it is
    pick = s("rect", { class: "pick", y: 0, height: plot.clientHeight, x: 0, width: 0 });
    plot.querySelector("svg")?.append(pick);
  });
  plot.addEventListener("pointercancel", () => { down = null; pick?.remove(); });
  plot.addEventListener("pointerup", (event) => {
    if (down === null) return;
    const from = down, to = at(event), width = plot.clientWidth;
    down = null; pick?.remove();
    if (Math.abs(view.x(to, width) - view.x(from, width)) > 6) view.set(Math.min(from, to), Math.max(from, to));
  });
  plot.addEventListener("dblclick", () => view.reset());
  return { figure: figureElement, plot, tip, height };
}

function show(parts, svg) {
  parts.plot.querySelector("svg")?.remove();
  parts.plot.prepend(svg);
}

function axis(view, width, height) {
  const { at, text } = timeTicks(view, Math.max(2, Math.floor(width / 140)));
  const half = 28;  // of a label, which stays inside
  return at.map((t) => s("text", { x: Math.max(LEFT + half - 4, Math.min(view.x(t, width), width - half)), y: height - 4, "text-anchor": "middle" }, text(t)));
}

function cursor(parts, view, tell) {
  const line = s("line", { class: "cursor", y1: TOP, y2: parts.height - BOTTOM, visibility: "hidden" });
  return {
    line,
    move(t) {
      const inside = t !== null && t >= view.begin && t <= view.end;
      line.setAttribute("visibility", inside ? "visible" : "hidden");
      const text = inside ? tell(t) : null;
      parts.tip.hidden = !text;
      if (!inside || !text) return;
      const width = parts.plot.clientWidth, x = view.x(t, width);
      line.setAttribute("x1", x); line.setAttribute("x2", x);
      parts.tip.textContent = text;
      const room = parts.tip.offsetWidth;
      parts.tip.style.left = `${x + 8 + room < width ? x + 8 : Math.max(0, x - 8 - room)}px`;
    },
  };
}

// `data()`: {time, step, breaks, series: {name: {min, max, mean}}}. `band()`: [low, high] that was predicted, or null.
// `dots`: another series, of which each value is a dot of its own.
export function lineChart(view, { title, unit, name, dots = "", data, marks = () => [], band = () => null, range = null, smooth = false, log = false, height = 160, note = "", format = figure }) {
  const options = { log };
  const logButton = log === null ? null : h("button", { type: "button", "aria-pressed": false, title: "Logarithmic scale (l)", "data-log": true,
    onclick: () => { options.log = !options.log; logButton.setAttribute("aria-pressed", options.log); draw(); } }, "log");
  const csv = () => {
    const d = data(), one = d.series[name] || { min: [], max: [], mean: [] };
    return ["time,step,min,mean,max", ...d.time.map((t, i) => [t, d.step[i], one.min[i], one.mean[i], one.max[i]].join(","))].join("\n");
  };
  const parts = frame(view, { title, unit, height, note, csv, tools: [logButton] });
  let pointer = null;
  function draw() {
    const width = parts.plot.clientWidth, d = data(), one = d?.series?.[name];
    if (!width) return;
    const svg = s("svg", { height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${title} over time` });
    if (!one) {
      svg.append(s("text", { x: LEFT, y: height / 2 }, "No step has reported this yet."), ...axis(view, width, height));
      show(parts, svg);
      return;
    }
    const inside = d.time.map((t, i) => i).filter((i) => d.time[i] >= view.begin && d.time[i] <= view.end);
    const predicted = band();
    let low = Infinity, high = -Infinity;
    for (const i of inside) if (known(one.min[i])) { low = Math.min(low, one.min[i]); high = Math.max(high, one.max[i]); }
    if (!known(low)) { low = 0; high = 1; }
    if (predicted) { low = Math.min(low, predicted[0]); high = Math.max(high, predicted[1]); }
    if (range) [low, high] = range;
    const isLog = options.log && low > 0;
    if (!isLog && !range) {
      if (!high && !low) high = 1;
      const pad = 0.06 * (high - low || Math.abs(high));
      low = low >= 0 ? Math.max(0, low - pad) : low - pad; high += pad;
    }
    const scale = isLog ? Math.log : (v) => v;
    const y = (v) => height - BOTTOM - ((scale(v) - scale(low)) / (scale(high) - scale(low) || 1)) * (height - BOTTOM - TOP);
    const levels = isLog ? [low, Math.sqrt(low * high), high] : ticks(low, high, height < 150 ? 3 : 5);
    for (const v of levels) {
      svg.append(s("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y(v), y2: y(v) }),
        s("text", { x: LEFT - 8, y: y(v) + 4, "text-anchor": "end" }, format === percent ? percent(v, 0) : short(v)));
    }
    if (predicted) svg.append(s("rect", { class: "band", x: LEFT, width: width - LEFT - RIGHT, y: y(predicted[1]), height: Math.max(1, y(predicted[0]) - y(predicted[1])) }));
    for (const mark of marks()) if (mark.at >= view.begin && mark.at <= view.end) svg.append(s("line", { class: "mark", x1: view.x(mark.at, width), x2: view.x(mark.at, width), y1: TOP, y2: height - BOTTOM }));
    const x = d.time.map((t) => view.x(t, width)), gaps = new Set(d.breaks);
    const clip = `clip-${name}-${Math.random().toString(36).slice(2)}`;
    svg.append(s("clipPath", { id: clip }, s("rect", { x: LEFT, y: 0, width: Math.max(0, width - LEFT - RIGHT), height: height - BOTTOM + 2 })));
    const lines = s("g", { "clip-path": `url(#${clip})` });
    let envelope = "", raw = "", strong = "", run = [];
    const average = smooth ? smoothed(one.mean) : one.mean;
    const flush = () => {
      if (run.length > 1) envelope += `M${run.map((i) => `${x[i].toFixed(1)},${y(one.max[i]).toFixed(1)}`).join("L")}L${run.toReversed().map((i) => `${x[i].toFixed(1)},${y(one.min[i]).toFixed(1)}`).join("L")}Z`;
      run = [];
    };
    d.time.forEach((_, i) => {
      if (!known(one.mean[i]) || gaps.has(i)) flush();
      if (!known(one.mean[i])) return;
      const move = run.length ? "L" : "M", px = x[i].toFixed(1);
      raw += `${move}${px},${y(one.mean[i]).toFixed(1)}`;
      strong += `${move}${px},${y(average[i]).toFixed(1)}`;
      run.push(i);
    });
    flush();
    if (one.min !== one.mean) lines.append(s("path", { class: "envelope", d: envelope }));  // else each point is one step
    if (smooth) lines.append(s("path", { class: "raw", d: raw }));
    lines.append(s("path", { class: "smooth", d: strong }));
    if (d.time.length < 3) for (const i of inside) if (known(one.mean[i])) lines.append(s("circle", { cx: x[i], cy: y(one.mean[i]), r: 2.5, fill: "var(--productive)" }));
    for (const i of inside) if (known(d.series[dots]?.mean[i])) lines.append(s("circle", { cx: x[i], cy: y(d.series[dots].mean[i]), r: 3.5, fill: "var(--checkpoint)" }, s("title", {}, `${dots.replace("_", " ")} ${figure(d.series[dots].mean[i])}`)));
    pointer = cursor(parts, view, (t) => {
      const i = nearest(d.time, t);
      if (i < 0 || !known(one.mean[i])) return null;
      const span = one.max[i] !== one.min[i] ? ` (${format(one.min[i])} to ${format(one.max[i])})` : "";
      return `step ${d.step[i].toLocaleString("en-US")}, ${clock(d.time[i])}: ${format === figure ? `${Number(one.mean[i].toPrecision(6))}${unit ? ` ${unit}` : ""}` : format(one.mean[i])}${span}`;
    });
    svg.append(lines, ...axis(view, width, height), pointer.line);
    svg.dataset.last = one.mean[one.mean.length - 1];
    show(parts, svg);
  }
  view.on(draw, (t) => pointer?.move(t));
  new ResizeObserver(draw).observe(parts.plot);
  return { figure: parts.figure, draw };
}

// The mean of the neighbours on both sides, a fortieth of the points: it does not lag behind the line.
function smoothed(values) {
  const half = Math.max(1, Math.round(values.length / 80)), sums = [0], counts = [0];
  for (const v of values) { sums.push(sums.at(-1) + (known(v) ? v : 0)); counts.push(counts.at(-1) + (known(v) ? 1 : 0)); }
  return values.map((v, i) => {
    const reach = Math.min(half, i, values.length - 1 - i), a = i - reach, b = i + reach + 1;
    return (sums[b] - sums[a]) / (counts[b] - counts[a] || 1);
  });
}

export function nearest(times, t) {
  let low = 0, high = times.length - 1;
  if (high < 0) return -1;
  while (low < high) { const middle = (low + high) >> 1; if (times[middle] < t) low = middle + 1; else high = middle; }
  return low > 0 && t - times[low - 1] < times[low] - t ? low - 1 : low;
}

// What the gang did, second by second, with incidents above and checkpoints below.
export function ribbon(view, { segments, incidents, checkpoints, spikes, stages = () => [], href }) {
  const height = stages().length ? 112 : 96, parts = frame(view, { title: "What it did", unit: "", height, note: "drag to zoom, double-click for all" });
  let pointer = null;
  function draw() {
    const width = parts.plot.clientWidth;
    if (!width) return;
    const svg = s("svg", { height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": "States of the run over time" }, patterns());
    const clamp = (t) => Math.max(LEFT, Math.min(width - RIGHT, view.x(t, width)));
    for (const [begin, end, state, present, ranks] of segments()) {
      if (end < view.begin || begin > view.end) continue;
      const a = clamp(begin), b = clamp(end), share = ranks ? present / ranks : 1;
      svg.append(s("rect", { x: a, width: Math.max(0.5, b - a), y: 32, height: 24 * share, fill: paint(state), "data-state": state }));
      if (share < 1) svg.append(s("rect", { x: a, width: Math.max(0.5, b - a), y: 32 + 24 * share, height: 24 * (1 - share), fill: paint("out"), "data-state": "out" }));
    }
    let named = -Infinity;  // where the last number stands: they do not run into each other
    for (const one of incidents()) {
      if (one.at < view.begin || one.at > view.end) continue;
      const x = clamp(one.at), colour = one.stops ? "var(--recovery)" : "var(--soft)";
      svg.append(s("a", { class: "glyph", href: href(one.number), "aria-label": one.verdict },
        s("title", {}, one.verdict), s("path", { d: `M${x},30l-6,-8h12Z`, fill: colour }),
        x - named >= 18 ? s("text", { x, y: 16, "text-anchor": "middle" }, one.number) : null));
      if (x - named >= 18) named = x;
    }
    for (const one of checkpoints()) {
      if (one.time < view.begin || one.time > view.end) continue;
      const x = clamp(one.time);
      svg.append(s("path", { d: `M${x},60l4,5l-4,5l-4,-5Z`, fill: "var(--checkpoint)" }, s("title", {}, `checkpoint of step ${one.step}`)));
    }
    for (const one of stages()) {
      if (one.at < view.begin || one.at > view.end) continue;
      const x = clamp(one.at), shares = Object.entries(one.shares).map(([source, share]) => `${source} ${(100 * share).toFixed(0)} %`).join(", ");
      svg.append(s("line", { class: "stage", x1: x, x2: x, y1: 28, y2: 86 }), s("text", { x: x + 4, y: 86, "data-stage": one.number }, s("title", {}, `data stage ${one.number} from step ${one.step.toLocaleString("en-US")}: ${shares}`), `stage ${one.number}`));
    }
    for (const one of spikes()) if (one.time >= view.begin && one.time <= view.end) svg.append(s("text", { x: clamp(one.time), y: 72, "text-anchor": "middle", "data-spike": one.step }, s("title", {}, `loss spike at step ${one.step}: ${figure(one.loss)}`), "✶"));
    pointer = cursor(parts, view, (t) => {
      const found = segments().find(([begin, end]) => begin <= t && t < end);
      if (!found) return null;
      const [begin, end, state, present, ranks] = found;
      return `${clock(t)}: ${state}, ${STATES[state] || ""} for ${seconds(end - begin)}${present < ranks ? `; ${count(ranks - present)} of ${count(ranks)} ranks out` : ""}`;
    });
    svg.append(...axis(view, width, height), pointer.line);
    show(parts, svg);
  }
  view.on(draw, (t) => pointer?.move(t));
  new ResizeObserver(draw).observe(parts.plot);
  return { figure: parts.figure, draw };
}

export { LEFT, RIGHT, TOP, BOTTOM, frame, show, axis, cursor };
