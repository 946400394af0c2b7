// From which sources the samples came, beside what the order of the data plans.
import { h, s, get, refill, count, figure, percent } from "./dom.js";
import { at } from "./parts.js";

const COLOURS = ["var(--productive)", "var(--recovery)", "var(--checkpoint)", "var(--out)", "var(--data)"], DASHES = ["", "6 3", "2 3", "10 3"];
const NAMED = 8;  // sources that have their name beside their line

// The served shares, and faintly behind them those that were planned: [step, shares] of each stage.
function shares(found, planned, width) {
  const height = 200, named = found.sources.slice(0, NAMED), left = 56, right = 16 + 7 * Math.min(14, Math.max(...named.map((name) => name.length)));
  const [first, last] = [found.steps[0], found.steps.at(-1)], x = (step) => left + ((Math.max(first, step) - first) / (last - first || 1)) * (width - left - right), y = (v) => height - 24 - v * (height - 40);
  const svg = s("svg", { height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": "Share of each source over the steps" }), labels = [];
  for (const v of [0, 0.5, 1]) svg.append(s("line", { class: "grid", x1: left, x2: width - right, y1: y(v), y2: y(v) }), s("text", { x: left - 8, y: y(v) + 4, "text-anchor": "end" }, percent(v, 0)));
  found.sources.forEach((name, k) => {
    const list = found.shares[name], goal = planned.map(([step, of], i) => `${i ? "H" : "M"}${x(step).toFixed(1)}${i ? "V" : ","}${y(of[name] || 0).toFixed(1)}`).join("");
    const lines = [["planned", goal ? `${goal}H${width - right}` : "", null], ["smooth", `M${list.map((v, i) => `${x(found.steps[i]).toFixed(1)},${y(v).toFixed(1)}`).join("L")}`, DASHES[k % DASHES.length] || null]];
    for (const [kind, d, dashes] of lines) { const line = s("path", { class: kind, d, "stroke-dasharray": dashes }); line.style.stroke = COLOURS[k % COLOURS.length]; svg.append(line); }
    if (k < NAMED) labels.push([y(list.at(-1)) + 4, name]);
  });
  let below = -Infinity;
  for (const [at, name] of labels.sort(([a], [b]) => a - b)) { below = Math.max(at, below + 14); svg.append(s("text", { x: width - right + 8, y: below }, s("title", {}, name), name.length > 14 ? `${name.slice(0, 13)}…` : name)); }
  for (const [step, where] of [[first, "start"], [found.steps[Math.floor(found.steps.length / 2)], "middle"], [last, "end"]]) svg.append(s("text", { x: x(step), y: height - 4, "text-anchor": where }, `step ${count(step)}`));
  return svg;
}

function spikeTable(run) {
  return [h("h2", {}, "Loss spikes and their samples"), h("div", { class: "scroll" }, h("table", { "data-table": "spikes" }, h("thead", {}, h("tr", {}, ["step", "loss", "usually", "samples"].map((text) => h("th", { class: "n" }, text)))),
    h("tbody", {}, run.spikes.slice(-100).toReversed().map((one) => h("tr", {}, h("td", { class: "n" }, count(one.step)), h("td", { class: "n" }, figure(one.loss)), h("td", { class: "n" }, figure(one.usual)), h("td", { class: "n" }, `${count(one.samples[0])} to ${count(one.samples[1])}`)))))), h("p", { class: "sub" }, "The text of a sample: ", h("code", {}, "phalanx data where --step N"))];
}

export async function dataTab(name, run) {
  let found = await get(`/api/runs/${encodeURIComponent(name)}/mixture`);
  const plot = h("div", { class: "plot" }), rows = h("div", {}), stages = h("div", {}), spikes = h("div", {});
  const served = () => Object.values(found.samples).reduce((a, b) => a + b, 0);
  const says = () => {
    const total = served(), most = found.sources.toSorted((a, b) => found.samples[b] - found.samples[a]).slice(0, 3).map((source) => `${source} ${percent(found.samples[source] / total)}`).join(", ");
    return total ? `${count(total)} samples of ${count(found.sources.length)} ${found.sources.length === 1 ? "source" : "sources"} were served${found.sources.length > 1 ? `: ${most}` : ""}${total < found.done ? `; the reports of ${count(found.done - total)} more were lost with their ranks` : ""}${found.substituted ? `; ${count(found.substituted)} damaged ones were replaced` : ""}.` : "No sample was served yet.";
  };
  function draw() {
    const total = served(), planned = found.stages.length ? [[found.steps[0], found.stages[0].shares], ...run.stages.map((stage) => [stage.step, stage.shares])] : [], now = found.stages.findLast((stage) => stage.first <= total) || found.stages.at(-1);
    if (plot.clientWidth && total) plot.replaceChildren(shares(found, planned, plot.clientWidth));
    rows.replaceChildren(h("div", { class: "scroll" }, h("table", { "data-table": "mixture" }, h("thead", {}, h("tr", {}, ["source", "samples", "share", "planned now"].map((text, i) => h("th", { class: i ? "n" : "" }, text)))),
      h("tbody", {}, found.sources.map((source) => h("tr", {}, h("td", {}, source), h("td", { class: "n" }, count(found.samples[source])), h("td", { class: "n" }, percent(found.samples[source] / (total || 1))), h("td", { class: "n" }, percent(now?.shares[source]))))))));
    refill(stages, found.stages.length > 1 ? h("p", { class: "sub" }, "Stages begin at samples ", found.stages.map((stage) => count(stage.first)).join(", "), ".") : null);
    refill(spikes, run.spikes.length ? spikeTable(run) : null);
  }
  new ResizeObserver(draw).observe(plot);
  draw();
  return { says, element: [h("figure", { "data-chart": "mixture" }, h("figcaption", {}, h("b", {}, "Share of each source"), found.stages.length ? "of the samples; faint: as planned" : "of the samples"), plot), rows, stages, spikes, found.version ? h("p", { class: "sub" }, "Data version ", h("code", {}, found.version)) : null, h("p", { class: "sub" }, h("a", { href: at(name, "record") }, "The order of the data is in the record"), ". In the terminal: ", h("code", {}, `phalanx data mix ${name}`))],
    async heard(next) { run = next; found = await get(`/api/runs/${encodeURIComponent(name)}/mixture`); draw(); } };
}
