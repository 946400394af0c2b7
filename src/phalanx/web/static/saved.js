// Which step is safe where: in memory, at the buddy node, on disk or in the object store. The distance to the top line is
// what would be done again.
import { h, s, refill, figure, count, seconds, clock, known } from "./dom.js";
import { LEFT, RIGHT, TOP, BOTTOM, frame, show, axis, cursor, nearest, ticks } from "./chart.js";
import { lineKey, makeView, seriesOf } from "./parts.js";

const LINES = { trained: ["var(--productive)", null], memory: ["var(--data)", "1 3"], buddy: ["var(--out)", "6 3"], disk: ["var(--checkpoint)", "10 3"], store: ["var(--checkpoint)", "10 3"] };

// Newest step held by each tier over time: a staircase each.
function tierChart(view, { data, run, marks }) {
  const height = 240, parts = frame(view, { title: "Safe up to step", unit: "", height, note: "the distance to the top line is what would be done again" });
  let pointer = null;
  const lines = () => {
    const d = data(), out = { trained: d.time.map((t, i) => [t, d.step[i] + 1]) };
    for (const tier of ["memory", "buddy"]) { const held = d.series[`held_${tier}`]; if (held) out[tier] = d.time.map((t, i) => [t, held.max[i]]); }
    if (run().checkpoints.length) out[run().saved.place] = run().checkpoints.map((one) => [one.time, one.step]);
    return out;
  };
  function draw() {
    const width = parts.plot.clientWidth, all = lines();
    if (!width) return;
    const svg = s("svg", { height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": "Newest step in each tier over time" });
    const at = (list, t) => { let v = null; for (const [when, value] of list) { if (when > t) break; v = value; } return v; };
    const tops = all.trained.filter(([t]) => t >= view.begin && t <= view.end).map(([, v]) => v), low = Math.min(...Object.values(all).map((list) => at(list, view.begin) ?? 0)), high = Math.max(1, ...tops);
    const y = (v) => height - BOTTOM - ((v - low) / (high - low || 1)) * (height - BOTTOM - TOP);
    for (const v of ticks(low, high, 4)) if (Number.isInteger(v)) svg.append(s("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y(v), y2: y(v) }), s("text", { x: LEFT - 8, y: y(v) + 4, "text-anchor": "end" }, count(v)));
    for (const mark of marks()) if (mark.at >= view.begin && mark.at <= view.end) svg.append(s("line", { class: "mark", x1: view.x(mark.at, width), x2: view.x(mark.at, width), y1: TOP, y2: height - BOTTOM }));
    const clamp = (t) => Math.max(LEFT, Math.min(width - RIGHT, view.x(t, width)));
    for (const [tier, list] of Object.entries(all)) {
      let path = "", down = false;
      for (const [t, v] of list) { if (!known(v)) { down = false; continue; } path += down ? `H${clamp(t).toFixed(1)}V${y(v).toFixed(1)}` : `M${clamp(t).toFixed(1)},${y(v).toFixed(1)}`; down = true; }
      if (down && tier !== "trained") path += `H${clamp(view.max).toFixed(1)}`;
      const line = s("path", { class: "smooth", d: path, "stroke-dasharray": LINES[tier][1], "data-tier": tier });
      line.style.stroke = LINES[tier][0];
      svg.append(line);
    }
    pointer = cursor(parts, view, (t) => {
      const now = at(all.trained, t);
      return now === null ? null : `${clock(t)}: ${Object.entries(all).map(([tier, list]) => { const v = at(list, t); return `${tier} ${known(v) ? `step ${count(v)}${tier === "trained" ? "" : ` (${count(Math.max(0, now - v))} behind)`}` : "none"}`; }).join(" · ")}`;
    });
    svg.append(...axis(view, width, height), pointer.line);
    show(parts, svg);
  }
  view.on(draw, (t) => pointer?.move(t));
  new ResizeObserver(draw).observe(parts.plot);
  return { figure: parts.figure, draw, tiers: () => Object.keys(lines()) };
}

const key = (tiers) => lineKey(tiers.map((tier) => [tier, ...LINES[tier]]));

function tierTable(run) {
  if (!run.saved.tiers.length) return h("div", { class: "note" }, "Nothing is saved yet. How far apart checkpoints are is derived from what they cost and how often nodes fail; ", h("code", {}, "checkpoint.every_steps"), " overrides it.");
  return h("div", { class: "scroll" }, h("table", { "data-table": "tiers" }, h("thead", {}, h("tr", {}, ["where", "newest step", "since", "done again", "survives the loss of"].map((text, i) => h("th", { class: i && i < 4 ? "n" : "" }, text)))),
    h("tbody", {}, run.saved.tiers.map((one) => h("tr", { "data-tier": one.tier }, h("td", {}, one.tier), h("td", { class: "n" }, count(one.step)), h("td", { class: "n" }, clock(one.since)), h("td", { class: "n" }, one.behind ? `${count(one.behind)} steps, ${seconds(one.redo_s)}` : "nothing"), h("td", {}, one.survives))))));
}

function list(run) {
  if (!run.checkpoints.length) return null;
  return [h("h2", {}, "Durable checkpoints"), h("div", { class: "scroll" }, h("table", {}, h("thead", {}, h("tr", {}, ["step", "durable at", "size", "written in", "training waited", "name"].map((text, i) => h("th", { class: i < 5 ? "n" : "hide-narrow" }, text)))),
    h("tbody", {}, run.checkpoints.toReversed().map((one) => h("tr", {}, h("td", { class: "n" }, count(one.step)), h("td", { class: "n" }, clock(one.time)), h("td", { class: "n" }, `${figure(one.bytes / 1e6)} MB`), h("td", { class: "n" }, seconds(one.drain_s)), h("td", { class: "n" }, seconds(one.stall_s + one.slowdown_s)), h("td", { class: "hide-narrow" }, one.checkpoint))))))];
}

export async function checkpointsTab(name, run, query) {
  const view = makeView(run, query);
  const { load, data } = await seriesOf(name, view, () => chart.draw());
  const chart = tierChart(view, { data, run: () => run, marks: () => run.incident_list.filter((one) => one.stops) });
  const tiers = h("div", {}), names = h("div", {}), all = h("div", {});
  const fill = () => { refill(tiers, tierTable(run)); refill(names, key(chart.tiers())); refill(all, list(run)); };
  fill();
  return { view, says: () => run.saved.headline, element: [chart.figure, names, tiers, all, h("p", { class: "sub" }, "In the terminal: ", h("code", {}, `phalanx runs fleet ${name}`))],
    async heard(next) { run = next; view.grow(run.ended); await load(); chart.draw(); fill(); } };
}
