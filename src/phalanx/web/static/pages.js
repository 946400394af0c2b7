// One question per page, answered in its first line; the evidence is below. A page returns its element, and perhaps what
// to do when the run goes on.
import { h, s, get, refill, figure, short, count, percent, money, seconds, clock, precise, date, known, STATES, swatch, runState, paint, patterns } from "./dom.js";
import { lineChart, ribbon, ticks } from "./chart.js";
import { heatMap } from "./heat.js";
import { at, lineKey, makeView, seriesOf } from "./parts.js";
import { stepsTab } from "./steps.js";
import { mapTab } from "./map.js";
import { checkpointsTab } from "./saved.js";
import { dataTab } from "./mixture.js";

// -- the list

export async function runsPage() {
  const { folder, runs } = await get("/api/runs");
  if (!runs.length) {
    return { title: "Runs", crumbs: [], element: h("div", {}, h("h1", {}, "No runs yet."),
      h("p", { class: "sub" }, "The records of runs in ", h("code", {}, folder), " appear here while they train."),
      h("div", { class: "note" }, "Start one with ", h("code", {}, "phalanx train"), ": with no arguments it trains a small model on this machine.")) };
  }
  const by = {};
  for (const run of runs) by[run.state] = (by[run.state] || 0) + 1;
  const words = { running: "training", done: "done", stopped: "stopped", failed: "failed", lost: "lost" };
  const head = `${count(runs.length)} ${runs.length === 1 ? "run" : "runs"}: ${Object.entries(by).map(([state, n]) => `${n} ${words[state] || state}`).join(", ")}.`;
  const picked = new Set();
  const compare = h("button", { type: "button", hidden: true, onclick: () => go() }, "Compare the two");
  const go = () => { const [a, b] = picked; history.pushState(null, "", `/compare?a=${encodeURIComponent(a)}&b=${encodeURIComponent(b)}`); dispatchEvent(new PopStateEvent("popstate")); };
  const rows = runs.map((run) => h("tr", { "data-run": run.run, tabindex: -1 },
    h("td", {}, h("input", { type: "checkbox", "aria-label": `compare ${run.run}`, onchange: (e) => {
      if (e.target.checked) picked.add(run.run); else picked.delete(run.run);
      compare.hidden = picked.size !== 2;
    } })),
    h("td", {}, h("a", { href: at(run.run) }, run.run), h("div", { class: "why" }, run.headline)),
    h("td", {}, runState(run.state)),
    h("td", { class: "n hide-narrow" }, `${count(run.step)} / ${count(run.steps)}`),
    h("td", { class: "n hide-narrow" }, figure(run.loss)),
    h("td", { class: "n" }, percent(run.goodput)),
    h("td", { class: "n hide-narrow" }, count(run.incidents)),
    h("td", { class: "n hide-narrow" }, count(run.ranks)),
    h("td", { class: "n hide-narrow" }, known(run.dollars) ? money(run.dollars) : `${figure(run.gpu_s / 3600)} h`),
    h("td", { class: "n hide-narrow" }, date(run.began))));
  const filter = h("input", { class: "filter", type: "search", placeholder: "Filter ( / )", "aria-label": "Filter the runs", id: "filter",
    oninput: () => rows.forEach((row) => { row.hidden = !row.textContent.toLowerCase().includes(filter.value.toLowerCase()); }) });
  const names = ["", "run", "state", "step", "loss", "goodput", "incidents", "ranks", runs.some((run) => known(run.dollars)) ? "cost" : "GPU-hours", "began"];
  const element = h("div", {}, h("h1", {}, head), h("p", { class: "sub" }, "in ", h("code", {}, folder), ", the newest first", h("span", { class: "only-narrow" }, ". ", h("a", { href: "/compare" }, "Compare two"), ", ", h("a", { href: "/reports" }, "plans and simulations"))), filter, " ", compare,
    h("div", { class: "scroll" }, h("table", {}, h("thead", {}, h("tr", {}, names.map((name, i) => h("th", { class: `${i > 2 ? "n" : ""} ${[3, 4, 6, 7, 8, 9].includes(i) ? "hide-narrow" : ""}` }, name)))), h("tbody", {}, rows))));
  return { title: "Runs", crumbs: [], element, poll: 3000 };
}

// -- a run

const TABS = { "": "Overview", steps: "Steps", goodput: "Goodput", ranks: "Ranks", map: "Map", hosts: "Hosts", incidents: "Incidents", checkpoints: "Checkpoints", data: "Data", logs: "Logs", record: "Record" };

function figures(run) {
  const good = run.goodput, saved = run.durable;
  const rows = [
    ["loss", figure(run.loss), "nats per token"],
    ["tokens per second", count(run.tokens_per_s), `${count(run.ranks)} ranks`],
    ["MFU", percent(run.mfu, run.mfu < 0.01 ? 3 : 1), "of the last step"],
    ["step", known(run.step_s) ? seconds(run.step_s) : "–", known(run.off_plan) ? `${run.off_plan > 0 ? "+" : ""}${percent(run.off_plan, 0)} of the plan` : "in the median"],
    ["goodput", percent(good.ratio), `${figure(good.gpu_s / 3600)} GPU-hours`],
    ["incidents", count(run.incidents), known(good.mtbf_s) ? `MTBF ${seconds(good.mtbf_s)}` : "no failure"],
    ["durable", saved ? `step ${count(saved.step)}` : "none", saved ? clock(saved.time) : "no checkpoint yet"],
    ["cost", known(good.dollars) ? money(good.dollars) : "–", known(good.dollars) ? (known(good.kwh) ? `${figure(good.kwh)} kWh` : "") : "no price: --price"],
  ];
  return h("dl", { class: "figures" }, rows.map(([name, value, small]) => h("div", {}, h("dt", {}, name), h("dd", {}, value, small ? h("small", {}, small) : null))));
}

function story(run, whole) {
  const out = [];
  if (whole && run.parts.length > 1) out.push(h("p", { class: "sub" }, "Continues ", run.parts.slice(0, -1).map((name, i) => [i ? ", then " : "", h("a", { href: at(name) }, name)]), ". Time between the parts is not counted."));
  for (const branch of whole ? run.branches : []) out.push(h("p", { class: "sub" }, `Branch: ${count(branch.steps)} steps from step ${count(branch.step)} on were abandoned and done again.`));
  if (run.damaged_lines) out.push(h("div", { class: "note bad" }, `${count(run.damaged_lines)} damaged lines of the record were passed over.`));
  if (run.dropped) out.push(h("div", { class: "note bad" }, `${count(run.dropped)} lines of the record were lost: its disk was full.`));
  return out;
}

export async function runPage(name, tab, query) {
  let run = await get(`/api/runs/${encodeURIComponent(name)}`);
  const answer = h("h1", { id: "headline" }), about = h("p", { class: "sub", id: "about" }), strip = h("div", {});
  const links = Object.fromEntries(Object.entries(TABS).map(([key, text]) => [key, h("a", { href: at(name, key), "aria-current": key === tab ? "page" : null }, text)]));
  const tabs = h("nav", { class: "tabs", "aria-label": "Pages of this run" }, Object.values(links));
  const body = h("div", {}), notes = h("div", {});
  const fill = () => {
    answer.textContent = part.says ? part.says() : run.headline;
    about.textContent = part.says ? run.headline : [run.layout, `began ${date(run.began)}`, run.promise].filter(Boolean).join(" · ");
    refill(strip, part.says ? null : figures(run)); refill(notes, story(run, !part.says)); links.incidents.textContent = run.incidents ? `Incidents (${count(run.incidents)})` : "Incidents";
  };
  const makers = { "": overview, steps: stepsTab, goodput: goodputTab, ranks: ranksTab, map: mapTab, hosts: hostsTab, incidents: incidentsTab, checkpoints: checkpointsTab, data: dataTab, logs: logsTab, record: recordTab };
  const part = await (makers[tab] || overview)(name, run, query, () => fill());
  refill(body, part.element);
  fill();
  return {
    title: name, crumbs: [[name, at(name)]],
    element: h("div", {}, tabs, answer, about, strip, notes, body),
    live: run.state === "running" ? name : null,
    async heard() {
      run = await get(`/api/runs/${encodeURIComponent(name)}`);
      await part.heard?.(run);
      fill();
    },
    view: part.view,
  };
}

// A mixture of experts, also before its first step.
const hasExperts = (run) => Object.keys(run.experts || {}).length > 0 || run.family === "moe";

const legend = (states) => h("div", { class: "legend" }, states.map((state) => h("span", { class: "state" }, swatch(state), `${state}: ${STATES[state]}`)));

async function overview(name, run, query) {
  const view = makeView(run, query);
  const { load, data } = await seriesOf(name, view, () => charts.forEach((c) => c.draw()));
  const marks = () => run.incident_list.filter((one) => one.stops);
  const plan = run.plan, shared = { data, marks };
  const charts = [
    ribbon(view, { segments: () => run.segments, incidents: () => run.incident_list, checkpoints: () => run.checkpoints, spikes: () => run.spikes, stages: () => run.stages, href: (n) => at(name, `incidents/${n}`) }),
    lineChart(view, { ...shared, title: "Loss", unit: "nats per token", name: "loss", dots: "validation_loss", smooth: true, height: 224, note: "faint: every step, with its smallest and largest; strong: smoothed; dots: validation" }),
    lineChart(view, { ...shared, title: "Throughput", unit: "tokens/s", name: "tokens_per_s", log: false, band: () => (plan?.step_high_s && run.step_s && run.tokens_per_s ? [plan.step_s * plan.tokens_per_s / plan.step_high_s, plan.step_s * plan.tokens_per_s / plan.step_low_s] : null), note: plan ? "green: what the plan predicts" : "" }),
    lineChart(view, { ...shared, title: "Step time", unit: "s", name: "time_s", band: () => (plan?.step_high_s ? [plan.step_low_s, plan.step_high_s] : null), note: "of the slowest rank" }),
    lineChart(view, { ...shared, title: "Gradient norm", unit: "", name: "grad_norm" }),
    ...(hasExperts(run) ? [lineChart(view, { ...shared, title: "Expert load", unit: "x the mean", name: "expert_load", note: "of the busiest expert of all layers; 1 is even" })] : []),
  ];
  const empty = h("div", {}), states = h("div", {}), bars = h("div", {}), broke = h("div", {});
  const fill = () => {
    refill(empty, run.step ? null : h("div", { class: "note" }, run.state === "running" ? "The ranks are starting. Charts fill with the first step." : ["This run ended before its first step. Its log says why: ", h("a", { href: at(name, "logs") }, "logs")]));
    refill(states, legend(Object.keys(STATES).filter((state) => run.goodput.states.some((row) => row.state === state && row.gpu_s > 0))));
    refill(bars, waterfall(run));
    refill(broke, run.incident_list.length ? [h("h2", {}, "What broke"), incidentTable(name, run)] : null);
  };
  fill();
  return {
    view, element: [empty, charts[0].figure, states, charts.slice(1).map((c) => c.figure), h("h2", {}, "Where the GPU-seconds went"), bars, broke],
    async heard(next) { run = next; view.grow(run.ended); await load(); charts.forEach((c) => c.draw()); fill(); },
  };
}

function waterfall(run) {
  const rows = run.goodput.states.filter((row) => row.gpu_s > 0);
  let from = 0;
  return h("div", { class: "bars", "data-chart": "goodput" }, rows.map((row) => {
    const bar = s("svg", { viewBox: "0 0 1000 16", preserveAspectRatio: "none", role: "img", "aria-label": `${row.state} ${percent(row.share, 2)}` }, patterns(),
      s("rect", { width: 1000, height: 16, fill: "var(--raised)" }), s("rect", { x: 1000 * from, width: Math.max(1.5, 1000 * row.share), height: 16, fill: paint(row.state) }));
    from += row.share;
    return [h("div", {}, h("span", { class: "state" }, swatch(row.state), row.state), h("span", { class: "what" }, STATES[row.state])), bar,
      h("div", { class: "n", "data-state": row.state, "data-gpu-s": row.gpu_s }, percent(row.share, 2), h("span", { class: "what" }, `${figure(row.gpu_s)} GPU-s${known(row.dollars) ? `, ${money(row.dollars)}` : ""}${known(row.kwh) ? `, ${figure(row.kwh)} kWh` : ""}`))];
  }));
}

function goodputTab(name, run) {
  const bars = h("div", { class: "bars-box" }, waterfall(run)), beside = h("div", {}, ...kept(run));
  return {
    says() {
      const good = run.goodput, worst = good.states.filter((row) => row.state !== "productive" && row.gpu_s > 0).sort((a, b) => b.gpu_s - a.gpu_s)[0];
      return `${percent(good.ratio)} goodput${worst ? `; most of the rest, ${percent(worst.share)}, is ${worst.state}: ${STATES[worst.state]}` : ", and nothing is lost"}.`;
    },
    element: [beside, bars,
      h("p", { class: "sub" }, "In the terminal: ", h("code", {}, `phalanx runs show ${name}`))],
    heard: (next) => { run = next; bars.replaceChildren(waterfall(next)); beside.replaceChildren(...kept(next)); },
  };
}

// Goodput with the other two figures that people mean by it.
function kept(run) {
  const good = run.goodput;
  const rows = [
    ["goodput", percent(good.ratio), "GPU-seconds in steps that count"], ["effective training time", percent(good.effective), "of the wall clock, by however many ranks"],
    ["time between failures", known(good.mtbf_s) ? seconds(good.mtbf_s) : "–", good.failures ? `${count(good.failures)} ${good.failures > 1 ? "failures" : "failure"} in ${seconds(good.wall_s)}` : `no failure in ${seconds(good.wall_s)}`],
    ["energy", known(good.kwh) ? `${figure(good.kwh)} kWh` : "–", known(good.kwh) ? "at the GPU's rated power" : "no power is known"],
  ];
  return [h("dl", { class: "figures" }, rows.map(([name, value, small]) => h("div", {}, h("dt", {}, name), h("dd", {}, value, h("small", {}, small))))),
    h("p", { class: "sub" }, `Every GPU-second is in exactly one state: ${figure(good.gpu_s)} GPU-seconds, ${count(good.ranks)} ranks for ${seconds(good.wall_s)}. The shares add up to 100 %.`)];
}

async function ranksTab(name, run, query, told) {
  const view = makeView(run, query), rank = query.has("rank") ? Number(query.get("rank")) : null;
  let data = await get(`/api/runs/${encodeURIComponent(name)}/series?points=4000`);
  view.steps = (begin, end) => {
    if (!data.time.length) return [0, 1e12];
    const first = data.time.findIndex((t) => t >= begin), last = data.time.findLastIndex((t) => t <= end);
    return [Math.max(0, data.step[Math.max(0, first < 0 ? data.step.length - 1 : first)] - 1), last < 0 ? 1 : data.step[Math.min(data.step.length - 1, last + 1)] + 1];
  };
  let slowest = "";
  const says = () => (run.has_ranks ? slowest || "Reading the step times of the ranks …" : "No rank has told its step times yet.");
  const none = h("div", { class: "note" }, "This record has no step times of single ranks. Runs keep them from their first step on.");
  const open = (one) => { const url = new URL(location.href); url.searchParams.set("rank", one); history.pushState(null, "", url); dispatchEvent(new PopStateEvent("popstate")); };
  const many = rank === null && run.ranks > 1, first = Number(query.get("r0")), end = Number(query.get("r1"));
  const shown = (a, b) => {
    const url = new URL(location.href);
    for (const [key, value] of [["r0", a], ["r1", b]]) if (Number.isFinite(b)) url.searchParams.set(key, value); else url.searchParams.delete(key);
    history.replaceState(null, "", url);
  };
  const map = heatMap(view, { run: name, ranks: rank !== null ? [rank, rank + 1] : many && end > first ? [first, end] : [0, Infinity], height: rank === null ? 256 : 64, onRank: many ? open : null, onRanks: many ? shown : null, onDrawn: (words) => { slowest = words; told(); } });
  const band = ribbon(view, { segments: () => run.segments, incidents: () => run.incident_list, checkpoints: () => run.checkpoints, spikes: () => [], href: (n) => at(name, `incidents/${n}`) });
  const where = rank === null ? null : h("p", { class: "sub" }, `Rank ${count(rank)} alone. `, h("a", { href: at(name, "ranks") }, "All ranks"));
  const fill = () => { none.hidden = run.has_ranks; map.figure.hidden = !run.has_ranks; };
  fill();
  return { view, says, element: [where, band.figure, none, map.figure, h("p", { class: "sub" }, "In the terminal: ", h("code", {}, `phalanx runs ranks ${name}`))], async heard(next) { run = next; view.grow(run.ended); data = await get(`/api/runs/${encodeURIComponent(name)}/series?points=4000`); fill(); band.draw(); map.load(); } };
}

// What nodes have read of their hosts and devices. Charts show the end at which trouble shows first.
const per = (unit) => (v) => { const text = known(v) ? short(v) : "–"; return text.includes(" ") ? text + unit : `${text} ${unit}`; };
const READINGS = {  // title, format, unit of the axis
  host_cpu: ["Cores of the busiest host", percent], host_memory: ["Memory of the fullest host", percent], host_network: ["Network of the busiest host", per("B/s"), "B/s"],
  device_busy: ["The least busy device", percent], device_tensor: ["Tensor cores of the least busy device", percent], device_memory: ["Memory of the fullest device", percent],
  device_power: ["Power of the hungriest device", per("W"), "W"], device_heat: ["The hottest device", per("°C"), "°C"], device_clock: ["Clock of the slowest device", per("Hz"), "Hz"],
  device_throttle: ["Times slowed down, the most on a node", count], device_ecc: ["ECC errors, the most on a node", count], device_link_errors: ["Link errors, the most on a node", count],
};

const ANSWERS = {  // what is said first, of devices or else of hosts: of which reading, which end of it, in which words
  Devices: [["device_busy", "min", (v) => `the least busy works ${v} of the time`], ["device_heat", "max", (v) => `the hottest is at ${v}`], ["device_memory", "max", (v) => `the fullest is ${v} full`]],
  Hosts: [["host_cpu", "max", (v) => `the busiest uses ${v} of its cores`], ["host_memory", "max", (v) => `the fullest uses ${v} of its memory`]],
};

function readingsInWords(readings) {
  for (const [what, list] of Object.entries(ANSWERS)) {
    const known = list.filter(([key]) => readings[key]).map(([key, end, words]) => words(READINGS[key][1](readings[key][end])));
    if (known.length) return `${what}: ${known.join(", ")}.`;
  }
  return "Nothing is known of the hosts yet.";
}

async function hostsTab(name, run, query) {
  const view = makeView(run, query);
  const { load, data } = await seriesOf(name, view, () => charts.forEach((c) => c.draw()));
  const marks = () => run.incident_list.filter((one) => one.stops);
  const charts = Object.entries(READINGS).map(([key, [title, format, unit = ""]]) => ({ key, ...lineChart(view, { data, marks, title, unit, format, range: format === percent ? [0, 1] : null, name: key, height: 128 }) }));
  const table = () => h("div", { class: "scroll" }, h("table", { "data-table": "readings" },
    h("thead", {}, h("tr", {}, ["last step", "mean", "least", "of rank", "most", "of rank"].map((text, i) => h("th", { class: i ? "n" : "" }, text)))),
    h("tbody", {}, Object.keys(READINGS).filter((key) => run.readings[key]).map((key) => { const one = run.readings[key], text = READINGS[key][1]; return h("tr", {}, h("td", {}, key.replaceAll("_", " ").replace("cpu", "cores")),
      [text(one.mean), text(one.min), count(one.min_rank), text(one.max), count(one.max_rank)].map((text) => h("td", { class: "n" }, text))); }))));
  const none = h("div", { class: "note" }, "No node has read anything yet: the first readings come with the first steps after a heartbeat.");
  const last = h("div", {}), some = h("div", {}, last, h("h2", {}, "Over time"), h("div", { class: "two" }, charts.map((c) => c.figure)));
  const fill = () => {
    for (const one of charts) one.figure.hidden = !data().series[one.key];
    none.hidden = charts.some((one) => !one.figure.hidden);
    some.hidden = !none.hidden;
    refill(last, table());
  };
  fill();
  return { view, says: () => readingsInWords(run.readings), element: [none, some, h("p", { class: "sub" }, "In the terminal: ", h("code", {}, `phalanx runs show ${name} --json`), " (readings)")], async heard(next) { run = next; view.grow(run.ended); await load(); fill(); charts.forEach((c) => c.draw()); } };
}

function phasesBar(one) {
  const all = Object.entries(one.phases), total = all.reduce((sum, [, v]) => sum + v, 0);
  return h("div", { class: "why" }, all.map(([phase, v]) => `${phase} ${seconds(v)}`).join(" · "), total ? "" : "");
}

function incidentTable(name, run) {
  return h("div", { class: "scroll" }, h("table", { "data-table": "incidents" }, h("thead", {}, h("tr", {}, ["", "what happened", "lost"].map((text, i) => h("th", { class: i === 2 ? "n" : "" }, text)))),
    h("tbody", {}, run.incident_list.map((one) => h("tr", { tabindex: -1 }, h("td", {}, h("a", { href: at(name, `incidents/${one.number}`) }, `${one.number} ${one.kind}`)),
      h("td", {}, one.verdict, phasesBar(one)), h("td", { class: "n" }, one.stops ? `${figure(one.lost_gpu_s)} GPU-s` : "–", known(one.dollars) ? h("div", { class: "why" }, money(one.dollars)) : null))))));
}

function incidentsTab(name, run) {
  const none = () => h("div", { class: "note" }, "Deaths of workers and nodes, hangs, failed checkpoints and damaged data appear here, with what they cost. To see one: ", h("code", {}, "phalanx chaos run"), ".");
  const box = h("div", {}), fill = (now) => refill(box, now.incident_list.length ? incidentTable(name, now) : none());
  fill(run);
  const says = () => {
    const stops = run.incident_list.filter((one) => one.stops), lost = stops.reduce((sum, one) => sum + one.lost_gpu_s, 0);
    return run.incident_list.length ? `${count(run.incidents)} ${run.incidents === 1 ? "incident" : "incidents"}${stops.length ? `: ${count(stops.length)} stopped training and lost ${figure(lost)} GPU-seconds` : ", and none stopped training"}.` : "Nothing has broken.";
  };
  return { says, element: [box, h("p", { class: "sub" }, "In the terminal: ", h("code", {}, `phalanx runs show ${name}`))], heard: (next) => { run = next; fill(run); } };
}

export async function incidentPage(name, number) {
  const path = `/api/runs/${encodeURIComponent(name)}`, box = h("div", {});
  let shown = "";
  const load = async () => {
    const one = await get(`${path}/incidents/${number}`), text = JSON.stringify(one);
    if (text !== shown) refill(box, incident(name, one));  // what was unfolded or selected stays so
    shown = text;
  };
  const [run] = await Promise.all([get(path), load()]);
  return { title: `Incident ${number}`, crumbs: [[name, at(name)], ["incidents", at(name, "incidents")], [String(number), location.pathname]],
    element: box, live: run.state === "running" ? name : null, heard: load };
}

function incident(name, one) {
  const phases = Object.entries(one.phases), total = phases.reduce((sum, [, v]) => sum + v, 0) || 1;
  const meaning = { detect: "from the last finished step to the first sign", decide: "until the controller had a plan", "re-form": "until the ranks had joined their new groups", "first step": "until a step was committed again", heal: "until all replicas were there again", join: "until all had committed a step together" };
  let from = 0;
  const bars = h("div", { class: "bars" }, phases.map(([phase, v]) => {
    const bar = s("svg", { viewBox: "0 0 1000 16", preserveAspectRatio: "none" }, patterns(), s("rect", { width: 1000, height: 16, fill: "var(--raised)" }), s("rect", { x: (1000 * from) / total, width: Math.max(2, (1000 * v) / total), height: 16, fill: paint(phase === "heal" ? "out" : "recovery") }));
    from += v;
    return [h("div", {}, phase, h("span", { class: "what" }, meaning[phase] || "")), bar, h("div", { class: "n" }, seconds(v))];
  }));
  return [h("h1", { id: "headline" }, `${one.subject} ${one.what}.`), h("p", {}, one.verdict), h("p", { class: "sub" }, `${one.kind}, at step ${count(one.step)}${one.rung >= 0 ? `, rung ${one.rung} of the recovery ladder` : ""}, noticed ${date(one.at)}. `, h("a", { href: `${at(name)}?from=${Math.floor((one.since || one.at) - 10)}&to=${Math.ceil(Math.max(one.healed, one.committed, one.at) + 10)}` }, "On the axis of the run")),
    phases.length ? [h("h2", {}, "Where the time went"), bars] : null, h("h2", {}, "Evidence"), evidence(one.evidence),
    h("p", { class: "sub" }, "In the terminal: ", h("code", {}, `phalanx runs show ${name}`))];
}

// The events that an incident was folded from: when, what, of whom, and everything else that was said.
function evidence(events) {
  const about = ({ time, type, rank, node, service, worker, at_ns, ...rest }) => flat(rest).filter(([, v]) => v !== null && v !== "").map(([key, v]) => [h("span", { class: "why" }, `${key} `), asText(v), "  "]);
  const who = (event) => [event.service || (event.rank >= 0 ? `rank ${count(event.rank)}` : ""), event.node].filter(Boolean).join(" on ");
  return [h("div", { class: "scroll" }, h("table", { "data-table": "evidence" }, h("thead", {}, h("tr", {}, ["at", "event", "of", ""].map((text, i) => h("th", { class: i > 2 ? "hide-narrow" : "" }, text)))),
    h("tbody", {}, events.map((event) => h("tr", {}, h("td", { class: "key" }, precise(event.time)), h("td", {}, event.type), h("td", {}, who(event) || "–"), h("td", { class: "hide-narrow value" }, about(event))))))),
    h("details", {}, h("summary", {}, "as written in events.jsonl"), h("pre", {}, events.map((event) => `${JSON.stringify(event)}\n`)))];
}

const LOGS_MS = 4000;  // between two looks at the logs of a live run: the server reads all of them each time

async function logsTab(name, run, query, told) {
  const box = h("div", {});
  let waits = null, logs = null;
  const load = async () => { logs = await get(`/api/runs/${encodeURIComponent(name)}/logs`); refill(box, logLines(name, logs)); };
  await load();
  const says = () => { const odd = logs.lines.filter((line) => line.on < logs.ranks).length; return logs.lines.length ? `${count(logs.ranks)} ${logs.ranks === 1 ? "rank" : "ranks"} wrote ${count(logs.lines.length)} different ${logs.lines.length === 1 ? "line" : "lines"}, ${odd === logs.lines.length ? "none" : odd ? count(logs.lines.length - odd) : "all"} of them on all ranks.` : "No rank has written a line."; };
  return { says, element: box, heard: () => { waits ||= setTimeout(() => { waits = null; load().then(told).catch(() => {}); }, LOGS_MS); } };
}

function logLines(name, logs) {
  if (!logs.lines.length) return h("div", { class: "note" }, `The ${count(logs.ranks)} ranks have written nothing to their logs.`);
  const groups = [];  // lines that follow each other on the same ranks
  for (const line of logs.lines) {
    const text = line.count > line.on ? `${line.text}   (${count(line.count)} times)` : line.text;
    if (groups.at(-1)?.who === line.who) groups.at(-1).lines.push(text); else groups.push({ who: line.who, lines: [text] });
  }
  return [h("p", { class: "sub" }, `Lines of ${count(logs.ranks)} ranks; equal ones are shown once, numbers aside. In the terminal: `, h("code", {}, `phalanx logs ${name}`)),
    h("div", { class: "scroll" }, h("table", {}, h("thead", {}, h("tr", {}, h("th", {}, "on"), h("th", {}, "line"))), h("tbody", {}, groups.map((group) => h("tr", {}, h("td", {}, group.who), h("td", {}, h("pre", {}, group.lines.join("\n"))))))))];
}

// Name and value of everything in an object, the nested ones as a.b.
function flat(value, path = "") {
  return Object.entries(value || {}).flatMap(([key, v]) => (v && typeof v === "object" && !Array.isArray(v) && Object.keys(v).length ? flat(v, `${path}${key}.`) : [[path + key, v]]));
}
const asText = (v) => (v === null || v === "" || JSON.stringify(v) === "{}" ? "–" : typeof v === "string" ? v : known(v) && !Number.isInteger(v) ? String(Number(v.toPrecision(6))) : JSON.stringify(v));
const facts = (rows, name) => h("div", { class: "scroll" }, h("table", { "data-table": name }, h("tbody", {}, rows.map(([key, v]) => h("tr", {}, h("td", { class: "key" }, key), h("td", { class: "value", title: known(v) ? v : null }, key === "started" ? date(v) : key === "command" && Array.isArray(v) ? v.join(" ") : asText(v)))))));

async function recordTab(name) {
  const { job, meta, summary } = await get(`/api/runs/${encodeURIComponent(name)}/record`), { code, ...rest } = meta, { diff, untracked, ...version } = code || {};
  const rows = flat(job.job).map(([key, v]) => [key, v, job.origins?.[key] || ""]), chosen = rows.filter(([, , from]) => from !== "default" && !from.startsWith("preset "));
  const table = (list) => h("table", { "data-table": "job" }, h("thead", {}, h("tr", {}, h("th", {}, "field"), h("th", {}, "value"), h("th", { class: "hide-narrow" }, "from"))), h("tbody", {}, list.map(([key, v, from]) => h("tr", {}, h("td", { class: "key" }, key), h("td", { class: "value" }, asText(v)), h("td", { class: "hide-narrow key" }, from)))));
  const box = h("div", { class: "scroll" }, table(chosen)), more = rows.length - chosen.length;
  const all = h("button", { type: "button", "aria-pressed": false, onclick: () => { const now = all.getAttribute("aria-pressed") !== "true"; all.setAttribute("aria-pressed", now); box.replaceChildren(table(now ? rows : chosen)); all.textContent = now ? "only what was chosen" : `and ${count(more)} of presets and defaults`; } }, `and ${count(more)} of presets and defaults`);
  const says = () => `Phalanx ${asText(meta.phalanx ?? null)}, torch ${asText(meta.libraries?.torch ?? null)}, Python ${asText(meta.python ?? null)}${code?.commit ? `, commit ${code.commit.slice(0, 12)}${diff ? " with changes" : ""}` : ""}.`;
  return { says, element: [h("h2", {}, "The job, as it was chosen"), box, more ? h("p", {}, all) : null,
    h("h2", {}, "Code, libraries, machine"), facts([...flat(version, "code."), ...flat(rest)], "meta"),
    untracked?.length ? [h("h2", {}, "Files that were not in the repository"), h("pre", {}, untracked.join("\n"))] : null,
    diff ? [h("h2", {}, "Changes that were not committed"), h("pre", {}, diff)] : null, summary ? [h("h2", {}, "Summary"), facts(flat(summary), "summary")] : null,
    h("p", { class: "sub" }, "In the terminal: ", h("code", {}, `phalanx runs show ${name} --json`))] };
}

// -- two runs

export async function comparePage(query) {
  const a = query.get("a") || "", b = query.get("b") || "";
  if (!a || !b) return pickTwo(a);
  const found = await get(`/api/diff?a=${encodeURIComponent(a)}&b=${encodeURIComponent(b)}`);
  const [one, other] = await Promise.all([a, b].map((name) => get(`/api/runs/${encodeURIComponent(name)}/series?points=1200`)));
  const overlay = stepChart([[a, one], [b, other]], found.part?.step);
  const table = (rows, title) => (rows.length ? [h("h2", {}, title), h("div", { class: "scroll" }, h("table", {}, h("thead", {}, h("tr", {}, h("th", {}, "field"), h("th", {}, a), h("th", {}, b))), h("tbody", {}, rows.map((row) => h("tr", {}, h("td", {}, row.field), row.values.map((v) => h("td", {}, typeof v === "string" ? v : JSON.stringify(v))))))))] : null);
  return { title: "Compare", crumbs: [["compare", location.pathname + location.search]], element: h("div", {}, h("h1", { id: "headline" }, found.verdict), h("p", { class: "sub" }, h("a", { href: at(a) }, a), " and ", h("a", { href: at(b) }, b), `; ${count(found.compared)} steps in common`), overlay, table(found.job, "The job"), table(found.meta, "Code, libraries, machine, data"), !found.job.length && !found.meta.length ? h("div", { class: "note" }, "Job, code, libraries, machine and data are the same.") : null, h("p", { class: "sub" }, "In the terminal: ", h("code", {}, `phalanx runs diff ${a} ${b}`))) };
}

async function pickTwo(given) {
  const { runs } = await get("/api/runs"), crumbs = [["compare", "/compare"]];
  if (runs.length < 2) return { title: "Compare", crumbs, element: h("div", {}, h("h1", {}, "There are no two runs to compare yet."), h("div", { class: "note" }, "Train twice with ", h("code", {}, "phalanx train"), "; then see here whether both took the same steps, to the bit.")) };
  const list = (chosen, label) => h("select", { "aria-label": label }, runs.map((run) => h("option", { value: run.run, selected: run.run === chosen }, run.run)));
  const one = list(given || runs[0].run, "one run"), other = list(runs.find((run) => run.run !== one.value).run, "the other run");
  const go = () => { history.pushState(null, "", `/compare?a=${encodeURIComponent(one.value)}&b=${encodeURIComponent(other.value)}`); dispatchEvent(new PopStateEvent("popstate")); };
  return { title: "Compare", crumbs, element: h("div", {}, h("h1", {}, "Which two runs?"), h("p", { class: "sub" }, "The first step where they part, and everything that differs between them."),
    h("div", { class: "pair" }, one, "and", other, h("button", { type: "button", onclick: go }, "Compare")), h("p", { class: "sub" }, "In the terminal: ", h("code", {}, "phalanx runs diff RUN OTHER"))) };
}

const PAIR = [["var(--productive)", null], ["var(--recovery)", "5 3"]];  // the lines of two runs

function stepChart(runs, part) {
  const plot = h("div", { class: "plot" });
  new ResizeObserver(() => { if (plot.clientWidth) plot.replaceChildren(drawSteps(runs, part, plot.clientWidth)); }).observe(plot);
  return h("figure", { "data-chart": "loss-by-step" }, h("figcaption", {}, h("b", {}, "Loss by step"), "nats per token"), plot, lineKey(runs.map(([name], k) => [name, ...PAIR[k]])));
}

function drawSteps(runs, part, width) {
  const height = 260, left = 56, right = 24, steps = runs.flatMap(([, d]) => d.step), losses = runs.flatMap(([, d]) => d.series.loss?.mean || []).filter(known);
  if (!losses.length) return h("p", { class: "sub" }, "Neither run has a step yet.");
  const [s0, s1, low, high] = [Math.min(...steps), Math.max(...steps), Math.min(...losses), Math.max(...losses)];
  const x = (v) => left + ((v - s0) / (s1 - s0 || 1)) * (width - left - right), y = (v) => height - 24 - ((v - low) / (high - low || 1)) * (height - 40);
  const svg = s("svg", { height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": "Loss of both runs by step" });
  for (const v of ticks(low, high, 5)) svg.append(s("line", { class: "grid", x1: left, x2: width - right, y1: y(v), y2: y(v) }), s("text", { x: left - 8, y: y(v) + 4, "text-anchor": "end" }, figure(v)));
  for (const v of [s0, Math.round((s0 + s1) / 2), s1]) svg.append(s("text", { x: x(v), y: height - 4, "text-anchor": v === s1 ? "end" : v === s0 ? "start" : "middle" }, `step ${count(v)}`));
  runs.forEach(([, d], k) => {
    const line = (d.series.loss?.mean || []).map((v, i) => (known(v) ? `${x(d.step[i]).toFixed(1)},${y(v).toFixed(1)}` : null)).filter(Boolean);
    const path = s("path", { class: "smooth", d: `M${line.join("L")}`, "stroke-dasharray": PAIR[k][1] });
    path.style.stroke = PAIR[k][0];
    svg.append(path);
  });
  if (known(part)) svg.append(s("line", { class: "mark", x1: x(part), x2: x(part), y1: 8, y2: height - 24 }), s("text", { x: x(part) + 4, y: 16 }, `they part at step ${count(part)}`));
  return svg;
}
