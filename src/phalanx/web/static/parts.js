// What the pages of a run share: the address of one, its view of time, and its series between the edges of that.
import { h, s, get } from "./dom.js";
import { View } from "./chart.js";

export const at = (run, tab = "") => `/runs/${encodeURIComponent(run)}${tab ? `/${tab}` : ""}`;

export function makeView(run, query) {
  const view = new View(run.began, Math.max(run.began + 1e-3, run.ended));
  const a = Number(query.get("from")), b = Number(query.get("to"));
  if (a && b && b > a) { view.begin = Math.max(view.min, a); view.end = Math.min(view.max, b); view.follows = false; }
  view.on(() => {
    const url = new URL(location.href);
    if (view.begin <= view.min && view.end >= view.max) { url.searchParams.delete("from"); url.searchParams.delete("to"); }
    else { url.searchParams.set("from", view.begin.toFixed(3)); url.searchParams.set("to", view.end.toFixed(3)); }
    history.replaceState(null, "", url);
  });
  return view;
}

// What each line of a chart is: [name, colour, dashes].
export function lineKey(lines) {
  return h("div", { class: "legend" }, lines.map(([name, colour, dashes]) => {
    const line = s("line", { x1: 0, x2: 24, y1: 6, y2: 6, "stroke-width": 2, "stroke-dasharray": dashes });
    line.style.stroke = colour;
    return h("span", { class: "state" }, s("svg", { width: 24, height: 12, "aria-hidden": true }, line), name);
  }));
}

// The series of a run between the edges of a view, loaded again when they move; then `after` draws.
export async function seriesOf(name, view, after) {
  let data = null, timer = null;
  const load = async () => {
    const points = Math.min(2000, Math.max(200, innerWidth));
    data = await get(`/api/runs/${encodeURIComponent(name)}/series?begin=${view.begin}&end=${view.end}&points=${points}`);
    for (const one of Object.values(data.series)) { one.min ||= one.mean; one.max ||= one.mean; }  // where each point is one step
  };
  await load();
  let drawn = `${view.begin},${view.end}`;
  view.on(() => {
    const now = `${view.begin},${view.end}`;
    if (now === drawn) return;
    drawn = now;
    clearTimeout(timer);
    timer = setTimeout(async () => { await load(); after(); }, 80);
  });
  return { load, data: () => data };
}
