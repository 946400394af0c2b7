// From which sources the samples came, beside what the order of the data plans.
import { h, s, get, refill, count, figure, percent, known } from "./dom.js";
import { at } from "./parts.js";

function shares(found, width) {
  const height = 200, left = 56, right = 16, x = (i) => left + (i / Math.max(1, found.steps.length - 1)) * (width - left - right), y = (v) => height - 24 - v * (height - 40);
  const svg = s("svg", { height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": "Share of each source over the steps" });
  for (const v of [0, 0.5, 1]) svg.append(s("line", { class: "grid", x1: left, x2: width - right, y1: y(v), y2: y(v) }), s("text", { x: left - 8, y: y(v) + 4, "text-anchor": "end" }, percent(v, 0)));
  found.sources.forEach((name, k) => {
    const list = found.shares[name], line = s("path", { class: "smooth", d: `M${list.map((v, i) => `${x(i).toFixed(1)},${y(v).toFixed(1)}`).join("L")}`, "stroke-dasharray": ["", "6 3", "2 3", "10 3"][k % 4] || null });
    line.style.stroke = ["var(--productive)", "var(--recovery)", "var(--checkpoint)", "var(--out)", "var(--data)"][k % 5];
    svg.append(line);
    if (k < 8) svg.append(s("text", { x: width - right, y: Math.max(12, Math.min(height - 28, y(list.at(-1)) - 4 - (k % 2) * 14)), "text-anchor": "end" }, name));
  });
  for (const i of [0, Math.floor(found.steps.length / 2), found.steps.length - 1]) if (known(found.steps[i])) svg.append(s("text", { x: Math.max(left, Math.min(width - 40, x(i))), y: height - 4, "text-anchor": "middle" }, `step ${count(found.steps[i])}`));
  return svg;
}

function spikeTable(run) {
  return [h("h2", {}, "Loss spikes and their samples"), h("div", { class: "scroll" }, h("table", { "data-table": "spikes" }, h("thead", {}, h("tr", {}, ["step", "loss", "usually", "samples"].map((text) => h("th", { class: "n" }, text)))),
    h("tbody", {}, run.spikes.slice(-100).toReversed().map((one) => h("tr", {}, h("td", { class: "n" }, count(one.step)), h("td", { class: "n" }, figure(one.loss)), h("td", { class: "n" }, figure(one.usual)), h("td", { class: "n" }, `${count(one.samples[0])} to ${count(one.samples[1])}`)))))), h("p", { class: "sub" }, "The text of a sample: ", h("code", {}, "phalanx data where"))];
}

export async function dataTab(name, run) {
  let found = await get(`/api/runs/${encodeURIComponent(name)}/mixture`);
  const plot = h("div", { class: "plot" }), rows = h("div", {}), first = h("h2", {}), stages = h("div", {}), spikes = h("div", {});
  function draw() {
    const total = Object.values(found.samples).reduce((a, b) => a + b, 0), now = found.stages.findLast((stage) => stage.first <= total) || found.stages.at(-1);
    first.textContent = total ? `${count(total)} samples of ${count(found.sources.length)} ${found.sources.length === 1 ? "source" : "sources"} were served${found.substituted ? `; ${count(found.substituted)} damaged ones were replaced` : ""}.` : "No sample was served yet.";
    if (plot.clientWidth && total) plot.replaceChildren(shares(found, plot.clientWidth));
    rows.replaceChildren(h("div", { class: "scroll" }, h("table", { "data-table": "mixture" }, h("thead", {}, h("tr", {}, ["source", "samples", "share", "planned now"].map((text, i) => h("th", { class: i ? "n" : "" }, text)))),
      h("tbody", {}, found.sources.map((source) => h("tr", {}, h("td", {}, source), h("td", { class: "n" }, count(found.samples[source])), h("td", { class: "n" }, percent(found.samples[source] / (total || 1))), h("td", { class: "n" }, percent(now?.shares[source]))))))));
    refill(stages, found.stages.length > 1 ? h("p", { class: "sub" }, "Stages begin at samples ", found.stages.map((stage) => count(stage.first)).join(", "), ".") : null);
    refill(spikes, run.spikes.length ? spikeTable(run) : null);
  }
  new ResizeObserver(draw).observe(plot);
  draw();
  return { element: [first, h("figure", { "data-chart": "mixture" }, h("figcaption", {}, h("b", {}, "Share of each source"), "of the samples of a step"), plot), rows, stages, spikes, found.version ? h("p", { class: "sub" }, "Data version ", h("code", {}, found.version)) : null, h("p", { class: "sub" }, h("a", { href: at(name, "record") }, "The order of the data is in the record"))],
    async heard(next) { run = next; found = await get(`/api/runs/${encodeURIComponent(name)}/mixture`); draw(); } };
}
