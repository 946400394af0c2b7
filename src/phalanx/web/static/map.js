// The machines of a run: each node with its ranks, by health or by how slow they are. A click on a rank marks its peers.
import { h, get, count, clock } from "./dom.js";
import { colour, ratio } from "./heat.js";
import { at } from "./parts.js";

const SIGNS = { part: ["●", "productive", "at work"], spare: ["○", "start", "stands by"], out: ["◐", "out", "takes no part"], dead: ["✕", "recovery", "dead"] };
const MOST = 4096;  // cells that are drawn one by one; of more ranks, blocks

function coords(rank, axes) {
  const out = {};
  for (const axis of ["tp", "cp", "shard", "pp", "replica"]) { out[axis] = rank % axes[axis]; rank = Math.floor(rank / axes[axis]); }
  return out;
}

// Ranks that share all coordinates but one with a rank, by that axis.
function peers(rank, axes, ranks) {
  const own = coords(rank, axes), out = {}, size = { tp: 1, cp: axes.tp, shard: axes.tp * axes.cp, pp: axes.tp * axes.cp * axes.shard, replica: axes.tp * axes.cp * axes.shard * axes.pp };
  for (const axis of Object.keys(size)) if (axes[axis] > 1) out[axis] = Array.from({ length: Math.min(axes[axis], 64) }, (_, i) => rank + (i - own[axis]) * size[axis]).filter((r) => r !== rank && r >= 0 && r < ranks);
  return out;
}

export async function mapTab(name, run, query) {
  let found = await get(`/api/runs/${encodeURIComponent(name)}/fleet`);
  const how = { by: query.get("by") === "health" ? "health" : "time", picked: query.has("rank") ? Number(query.get("rank")) : null };
  const none = h("div", { class: "note" }, "No node has joined yet. Each node appears here with its ranks as soon as it does.");
  const box = h("div", { class: "map" }), says = h("p", { class: "sub" }), detail = h("p", { class: "sub", role: "status" });
  const remember = () => { const url = new URL(location.href); url.searchParams.set("by", how.by); if (how.picked === null) url.searchParams.delete("rank"); else url.searchParams.set("rank", how.picked); history.replaceState(null, "", url); };
  const buttons = ["time", "health"].map((by) => h("button", { type: "button", "aria-pressed": how.by === by, onclick: () => { how.by = by; buttons.forEach((b, i) => b.setAttribute("aria-pressed", ["time", "health"][i] === by)); remember(); draw(); } }, by === "time" ? "by work" : "by health"));

  function draw() {
    const codes = Uint8Array.from(atob(found.codes || ""), (c) => c.charCodeAt(0)), each = found.each, present = (rank) => found.replicas.some(([a, b]) => { const r = Math.floor(rank / found.replica_size); return a <= r && r < b; });
    const per = Math.max(each, Math.ceil(found.ranks / MOST)), near = how.picked === null ? {} : peers(how.picked, found.axes, found.ranks), marked = new Map(Object.entries(near).flatMap(([axis, list]) => list.map((r) => [r, axis])));
    const slow = (rank) => { let worst = 0; for (let r = Math.floor(rank / each); r < Math.ceil(Math.min(found.ranks, rank + per) / each); r++) worst = Math.max(worst, codes[r] || 0); return worst; };
    const cell = (rank) => {
      const code = slow(rank), there = present(rank), axis = marked.get(rank), names = per > 1 ? `ranks ${count(rank)} to ${count(Math.min(found.ranks, rank + per) - 1)}` : `rank ${count(rank)}`;
      const text = `${names}: ${there ? "takes part" : "takes no part"}${code ? `, ${ratio(code).toFixed(2)} × the median` : ""}${axis ? `, ${axis} peer of rank ${how.picked}` : ""}`;
      const one = h("button", { type: "button", class: `cell${how.picked === rank ? " picked" : ""}${axis ? " peer" : ""}${there ? "" : " out"}`, title: text, "aria-label": text, "data-rank": rank, "data-code": code,
        onclick: () => { how.picked = how.picked === rank ? null : rank; remember(); draw(); box.querySelector(`[data-rank="${rank}"]`)?.focus(); } }, axis && per === 1 ? axis[0] : "");
      if (there) one.style.background = how.by === "time" ? (code ? `rgb(${colour(ratio(code))})` : "var(--raised)") : "var(--productive)";
      return one;
    };
    const cells = (spans) => { const out = []; for (const [a, b] of spans) for (let r = Math.floor(a / per) * per; r < b; r += per) out.push(cell(r)); return out; };
    const groups = new Map();
    for (const node of found.nodes) { const key = node.about.topology?.split(".").slice(0, -1).join(" › ") || node.about.domain || ""; groups.set(key, [...(groups.get(key) || []), node]); }
    const kids = [...groups].map(([key, nodes]) => h("section", {}, key ? h("h3", {}, key) : null, h("div", { class: "nodes" }, nodes.map((node) => {
      const [mark, tint, words] = SIGNS[node.state], sign = h("span", { "aria-hidden": true }, mark);
      sign.style.color = `var(--${tint})`;
      return h("div", { class: `node ${node.state}`, "data-node": node.name, "data-state": node.state },
        h("div", { class: "state" }, sign, h("b", {}, node.name)), h("div", { class: "what" }, words, node.deaths ? `, ${count(node.deaths)} ${node.deaths > 1 ? "deaths" : "death"}` : ""),
        node.ranks.length ? h("div", { class: "cells" }, cells(node.ranks)) : h("div", { class: "what why", title: node.why }, node.state === "dead" ? `since ${clock(node.since)}: ${node.why}` : "no rank"),
        h("div", { class: "what" }, [node.about.devices?.length ? `${node.about.devices.length} devices` : null, node.about.cores ? `${count(node.about.cores)} cores` : null, node.about.address].filter(Boolean).join(" · "))); })))) ;
    if (found.unplaced?.length) kids.push(h("section", {}, h("h3", {}, "on no node"), h("div", { class: "cells" }, cells(found.unplaced))));
    box.replaceChildren(...kids);
    none.hidden = found.nodes.length > 0;
    const axes = Object.entries(found.axes).filter(([, n]) => n > 1).map(([axis, n]) => `${axis} ${count(n)}`).join(" × ") || "one rank";
    says.textContent = `${count(found.ranks)} ranks: ${axes}. ${how.by === "time" ? `Colour: most work of its own in the last ${found.last} steps, against the median rank (violet 0.8 ×, yellow 2 ×).` : "Colour: takes part, or hatched: takes no part."}${per > 1 ? ` A cell is ${count(per)} ranks, and shows the slowest of them.` : ""}`;
    const own = how.picked === null ? null : coords(how.picked, found.axes), code = how.picked === null ? 0 : slow(how.picked);
    detail.replaceChildren(...(own ? [`Rank ${count(how.picked)}: ${Object.entries(own).filter(([axis]) => found.axes[axis] > 1).map(([axis, i]) => `${axis} ${i}`).join(", ") || "the only one"}${code ? `; ${ratio(code).toFixed(2)} × the median` : ""}. Letters mark its peers by axis. `, h("a", { href: `${at(name, "ranks")}?rank=${how.picked}` }, "Its steps over time")] : ["Click a rank to see its peers on each axis."]));
  }
  draw();
  return { says: () => found.headline, element: [none, says, h("p", {}, buttons), detail, box, h("p", { class: "sub" }, "In the terminal: ", h("code", {}, `phalanx runs fleet ${name}`))],
    async heard() { found = await get(`/api/runs/${encodeURIComponent(name)}/fleet`); draw(); } };
}
