// Where the time of a step goes: its phases over time, stacked, and beside what the plan predicted.
import { h, s, get, refill, figure, short, seconds, percent, count, clock, known, patterns, paint, swatch } from "./dom.js";
import { LEFT, RIGHT, TOP, BOTTOM, frame, show, axis, cursor, nearest, ticks, lineChart } from "./chart.js";
import { at, makeView, seriesOf } from "./parts.js";

export const PHASES = {
  data: "waits for samples", forward: "computes forward", backward: "computes backward", gaps: "between passes: copies inputs, waits for pipeline neighbours",
  reduce: "sums gradients, as far as the passes do not hide it; waits for slower ranks", vote: "exchanges losses and agrees that the step counts",
  optimizer: "updates the weights", checkpoint: "takes a snapshot, or waits for one",
};
const TERMS = { passes: ["forward", "backward", "gaps"], reduce: ["reduce"], optimizer: ["optimizer"], between: ["vote"] };

// Phases on top of each other, in the order of a step.
export function stackChart(view, { title, unit, data, names, marks = () => [] }) {
  const height = 240, csv = () => { const d = data(); return [["time", "step", ...names].join(","), ...d.time.map((t, i) => [t, d.step[i], ...names.map((n) => d.series[`phase_${n}`]?.mean[i])].join(","))].join("\n"); };
  const parts = frame(view, { title, unit, height, csv, note: "the longest work of a rank and the shortest wait, of the step before" });
  let pointer = null;
  function draw() {
    const width = parts.plot.clientWidth, d = data();
    if (!width) return;
    const svg = s("svg", { height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${title} over time` }, patterns());
    const used = names.filter((name) => d.series[`phase_${name}`]), value = (name, i) => d.series[`phase_${name}`].mean[i] || 0;
    const inside = d.time.map((t, i) => i).filter((i) => d.time[i] >= view.begin && d.time[i] <= view.end && used.some((name) => known(d.series[`phase_${name}`].mean[i])));
    if (!inside.length) { svg.append(s("text", { x: LEFT, y: height / 2 }, "No step has reported its phases yet."), ...axis(view, width, height)); show(parts, svg); return; }
    const sums = inside.map((i) => used.reduce((sum, name) => sum + value(name, i), 0)).sort((a, b) => a - b);
    const most = Math.min(sums.at(-1), 3 * sums[Math.floor(sums.length / 2)]) * 1.06;  // one stall must not flatten all others
    const y = (v) => height - BOTTOM - (Math.min(v, most) / most) * (height - BOTTOM - TOP);
    for (const v of ticks(0, most, 4)) svg.append(s("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y(v), y2: y(v) }), s("text", { x: LEFT - 8, y: y(v) + 4, "text-anchor": "end" }, short(v)));
    const x = (i) => view.x(d.time[i], width).toFixed(1), runs = [];
    let last = -1;
    for (const i of inside) { if (last < 0 || d.breaks.some((b) => last < b && b <= i)) runs.push([]); runs.at(-1).push(i); last = i; }
    const floor = d.time.map(() => 0);
    for (const name of used) {
      let path = "";
      for (const run of runs) {
        const top = run.map((i) => `${x(i)},${y(floor[i] + value(name, i)).toFixed(1)}`), base = run.toReversed().map((i) => `${x(i)},${y(floor[i]).toFixed(1)}`);
        path += run.length > 1 ? `M${[...top, ...base].join("L")}Z` : `M${x(run[0])},${y(floor[run[0]])}v${y(floor[run[0]] + value(name, run[0])) - y(floor[run[0]])}h2V${y(floor[run[0]])}Z`;
      }
      for (const i of inside) floor[i] += value(name, i);
      svg.append(s("path", { d: path, fill: paint(name), "data-phase": name }));
    }
    for (const mark of marks()) if (mark.at >= view.begin && mark.at <= view.end) svg.append(s("line", { class: "mark", x1: view.x(mark.at, width), x2: view.x(mark.at, width), y1: TOP, y2: height - BOTTOM }));
    pointer = cursor(parts, view, (t) => {
      const i = nearest(d.time, t);
      return i < 0 ? null : `step ${count(d.step[i])}, ${clock(d.time[i])}: ${used.filter((n) => value(n, i) > 0).map((n) => `${n} ${seconds(value(n, i))}`).join(" · ")}`;
    });
    svg.append(...axis(view, width, height), pointer.line);
    show(parts, svg);
  }
  view.on(draw, (t) => pointer?.move(t));
  new ResizeObserver(draw).observe(parts.plot);
  return { figure: parts.figure, draw };
}

function table(run) {
  const measured = run.phases || {}, total = Object.values(measured).reduce((a, b) => a + b, 0) || 1, longest = Math.max(...Object.values(measured));
  return h("div", { class: "bars", "data-chart": "phases" }, Object.entries(measured).map(([name, took]) => [
    h("div", {}, h("span", { class: "state" }, swatch(name), name), h("span", { class: "what" }, PHASES[name])),
    s("svg", { viewBox: "0 0 1000 16", preserveAspectRatio: "none", role: "img", "aria-label": `${name} ${seconds(took)}` }, patterns(), s("rect", { width: 1000, height: 16, fill: "var(--raised)" }), s("rect", { width: Math.max(1.5, (1000 * took) / longest), height: 16, fill: paint(name) })),
    h("div", { class: "n", "data-phase": name, "data-seconds": took }, seconds(took), h("span", { class: "what" }, percent(took / total)))]));
}

// Predicted beside measured, by the terms of the plan.
function planned(run) {
  const plan = run.plan?.phases, got = run.phases || {};
  if (!plan) return h("p", { class: "sub" }, "No plan predicted this run's steps: ", h("code", {}, "phalanx plan"), " does, on hardware that it knows.");
  const rows = Object.entries(TERMS).filter(([term, names]) => plan[term] || names.some((n) => known(got[n])));
  return h("div", { class: "scroll" }, h("table", { "data-table": "planned" }, h("thead", {}, h("tr", {}, ["term", "predicted", "measured", "off by"].map((text, i) => h("th", { class: i ? "n" : "" }, text)))),
    h("tbody", {}, rows.map(([term, names]) => { const took = names.reduce((sum, n) => sum + (got[n] || 0), 0), want = plan[term];
      return h("tr", {}, h("td", {}, term, h("div", { class: "why" }, names.join(" + "))), h("td", { class: "n" }, seconds(want)), h("td", { class: "n" }, seconds(took)), h("td", { class: "n" }, known(want) ? `${took > want ? "+" : "−"}${seconds(Math.abs(took - want))}` : "–")); }))));
}

function slowest(name, run) {
  if (!run.slowest?.length) return null;
  return h("p", { class: "sub" }, "Most work of its own in the last step: ", run.slowest.map(([took, rank], i) => [i ? ", " : "", h("a", { href: `${at(name, "ranks")}?rank=${rank}` }, `rank ${count(rank)}`), ` ${seconds(took)}`]), ".");
}

function traceList(name, found) {
  if (!found.length) return h("p", { class: "sub" }, "No trace was recorded. A running job records one with ", h("code", {}, `phalanx trace ${name} --steps FIRST:LAST`), ": operations, collectives and the control plane, for Perfetto.");
  return h("ul", { "data-list": "traces" }, found.map((one) => h("li", {}, h("a", { href: `/api/runs/${encodeURIComponent(name)}/traces/${one.name}`, download: true }, `steps ${one.name.replace(".json.gz", "")}`), ` ${figure(one.bytes / 1e6)} MB, open it in Perfetto or chrome://tracing`)));
}

// Which phases take the time, the three longest of them.
function answer(run) {
  const all = Object.entries(run.phases || {}).sort(([, a], [, b]) => b - a), total = all.reduce((sum, [, took]) => sum + took, 0);
  if (!known(run.step_s)) return "No step is done yet.";
  const plan = known(run.off_plan) ? `, ${run.off_plan > 0 ? "+" : "−"}${percent(Math.abs(run.off_plan), 0)} against the plan` : "";
  return `A step takes ${seconds(run.step_s)}${plan}${total ? `: ${all.slice(0, 3).map(([name, took]) => `${name} ${percent(took / total, 0)}`).join(", ")}` : ""}.`;
}

export async function stepsTab(name, run, query) {
  const view = makeView(run, query), { traces } = await get(`/api/runs/${encodeURIComponent(name)}/traces`);
  const { load, data } = await seriesOf(name, view, () => charts.forEach((c) => c.draw()));
  const marks = () => run.incident_list.filter((one) => one.stops), names = Object.keys(PHASES);
  const charts = [stackChart(view, { title: "Phases of a step", unit: "s", data, names, marks }),
    lineChart(view, { data, marks, title: "Step time", unit: "s", name: "time_s", band: () => (run.plan?.step_high_s ? [run.plan.step_low_s, run.plan.step_high_s] : null), note: `of the slowest rank${run.plan ? "; green: what the plan predicts" : ""}` }),
    lineChart(view, { data, marks, title: "Prefetched", unit: "steps of samples that are ready", name: "data_ready", height: 128, format: figure })];
  const bars = h("div", {}), plan = h("div", {}), who = h("div", {}), none = h("div", { class: "note" }, "No step has reported its phases yet: each reports those of the step before it.");
  const fill = () => { none.hidden = Object.keys(run.phases || {}).length > 0; refill(bars, table(run)); refill(plan, planned(run)); refill(who, slowest(name, run)); };
  fill();
  return { view, says: () => answer(run), element: [none, charts[0].figure, who, charts.slice(1).map((c) => c.figure), h("h2", {}, "In the median of the last steps"), bars, h("h2", {}, "Predicted and measured"), plan,
    h("h2", {}, "Traces"), traceList(name, traces), h("p", { class: "sub" }, "In the terminal: ", h("code", {}, `phalanx top ${name}`))],
    async heard(next) { run = next; view.grow(run.ended); await load(); charts.forEach((c) => c.draw()); fill(); } };
}
