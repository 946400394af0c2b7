// Rank x time: how long each rank's own work took, waits left out, against the median of its step. The server keeps the largest value of every cell,
// so one slow rank shows at every zoom; the picture is never larger than the screen.
import { h, get, count, clock } from "./dom.js";
import { LEFT, RIGHT, nearest } from "./chart.js";

const LEAST = 0.5, MOST = 16, HEIGHT = 256, STANDS_OUT = 1.2;
export const ratio = (code) => LEAST * (MOST / LEAST) ** ((code - 1) / 254);
// Viridis, by eight of its colours (Smith and van der Walt, matplotlib; CC0).
const STOPS = [[68, 1, 84], [72, 40, 120], [62, 74, 137], [49, 104, 142], [38, 130, 142], [31, 158, 137], [110, 206, 88], [253, 231, 37]];
export function colour(value) {
  // 0.8 to 2 times the median fills the scale: that is where stragglers are.
  const at = Math.max(0, Math.min(1, Math.log(value / 0.8) / Math.log(2.5))) * (STOPS.length - 1);
  const i = Math.min(STOPS.length - 2, Math.floor(at)), f = at - i;
  return STOPS[i].map((v, k) => Math.round(v + f * (STOPS[i + 1][k] - v)));
}

// `ranks`: those that are shown at first. `onRank(rank)` opens one; `onRanks(first, end)` hears which are shown, if they
// are not all: both only where ranks can be chosen. `onDrawn(words)`: hears which is the slowest.
export function heatMap(view, { run, onRank, onRanks, onDrawn, ranks = [0, Infinity], height = HEIGHT }) {
  const canvas = h("canvas", { height, tabindex: 0, role: "img", "aria-label": "Own work of each rank over time, against the median of the step" });
  const tip = h("div", { class: "tip", hidden: true, role: "status" }), status = h("span", {}, "");
  const plot = h("div", { class: "plot" }, canvas, tip);
  const ramp = h("canvas", { class: "ramp", width: 120, height: 8 });
  const figure = h("figure", { "data-chart": "ranks" }, h("figcaption", {}, h("b", {}, "Own work of each rank"), status, onRanks ? h("span", { class: "tools" }, [["more ranks", 2, "["], ["fewer ranks", 0.5, "]"]].map(([text, by, key]) => h("button", { type: "button", title: `Key: ${key}`, onclick: () => zoom(by) }, text))) : null), plot,
    h("div", { class: "legend" }, h("span", {}, "0.8 ×", ramp, "2 × the median of the step"), h("span", {}, "hatched: the rank took no part"),
      onRanks ? h("span", { class: "hide-narrow" }, "click or ↑ ↓ Enter: one rank · [ ] or Shift + scroll: zoom ranks · drag: zoom time") : null));
  const state = { ranks: [...ranks], found: null, codes: null, asked: 0, who: 0, picked: null };  // `picked`: by the keyboard
  const paper = ramp.getContext("2d");
  for (let x = 0; x < 120; x++) { paper.fillStyle = `rgb(${colour(0.8 * 2.5 ** (x / 119))})`; paper.fillRect(x, 0, 1, 8); }

  async function load() {
    const width = Math.round(plot.clientWidth);
    if (!width) return;
    const [s0, s1] = view.steps ? view.steps(view.begin, view.end) : [0, 1e12];
    const asked = ++state.asked;
    const q = new URLSearchParams({ r0: Math.floor(state.ranks[0]), r1: Number.isFinite(state.ranks[1]) ? Math.ceil(state.ranks[1]) : 2 ** 40, s0, s1, h: height, w: Math.max(1, width - LEFT - RIGHT) });
    const found = await get(`/api/runs/${encodeURIComponent(run)}/heat?${q}`);
    if (asked !== state.asked) return;
    state.found = found;
    state.codes = Uint8Array.from(atob(found.codes || ""), (c) => c.charCodeAt(0));
    draw();
  }

  function draw() {
    const { found, codes } = state, width = plot.clientWidth, scale = devicePixelRatio || 1;
    if (!found || !width) return;
    canvas.width = width * scale; canvas.height = height * scale; canvas.style.height = `${height}px`;
    const ink = canvas.getContext("2d"), style = getComputedStyle(document.documentElement);
    ink.scale(scale, scale);
    ink.font = "12px system-ui, sans-serif"; ink.fillStyle = style.getPropertyValue("--soft");
    if (!found.rows) { ink.fillText("This run's record has no step times of ranks yet: they come with its first step.", LEFT, 40); status.textContent = ""; return; }
    const tall = height / found.rows, hatch = hatched(ink, style);
    let worst = 0, who = 0, when = 0;
    const hot = [], edge = (v) => Math.round(v * scale) / scale;  // on the pixels of the screen: no seams
    const paint = (a, b, r, code) => {
      const x = edge(a), y = edge(r * tall);
      ink.fillStyle = code ? `rgb(${colour(ratio(code))})` : hatch;
      ink.fillRect(x, y, Math.max(1 / scale, edge(b) - x), Math.max(1 / scale, edge((r + 1) * tall) - y));
    };
    state.worst = new Uint8Array(found.rows);
    for (let c = 0; c < found.columns; c++) {
      const a = Math.max(LEFT, view.x(found.begins[c], width)), b = Math.min(width - RIGHT, view.x(found.ends[c], width));
      if (b < LEFT || a > width - RIGHT) continue;
      for (let r = 0; r < found.rows; r++) {
        const code = codes[r * found.columns + c];
        if (code > worst) { worst = code; who = r; when = c; }
        state.worst[r] = Math.max(state.worst[r], code);
        paint(a, b, r, code);
        if (code && ratio(code) >= STANDS_OUT) hot.push([a, b, r, code]);
      }
    }
    for (const cell of hot) paint(...cell);  // where columns are narrower than a pixel, the larger value stays
    ink.fillStyle = style.getPropertyValue("--soft"); ink.textAlign = "right";
    const rows = found.ranks[1] - found.ranks[0];
    const names = rows <= 16 ? [...Array(rows).keys()] : [0, 0.25, 0.5, 0.75, 1].map((part) => Math.min(rows - 1, Math.floor(part * rows)));
    for (const i of names) ink.fillText(count(found.ranks[0] + i), LEFT - 8, Math.max(12, Math.min(height - 2, ((i + 0.5) / rows) * height + 4)));
    const cell = (r) => { const a = found.ranks[0] + Math.floor((r * rows) / found.rows), b = found.ranks[0] + Math.ceil(((r + 1) * rows) / found.rows); return b - a > 1 ? `ranks ${count(a)} to ${count(b - 1)}` : `rank ${count(a)}`; };
    state.cell = cell; state.who = found.ranks[0] + Math.floor((who * rows) / found.rows);
    if (state.picked !== null) { ink.strokeStyle = style.getPropertyValue("--text"); ink.lineWidth = 2; ink.strokeRect(LEFT, rowOf(state.picked) * tall, width - LEFT - RIGHT, Math.max(2, tall)); }
    status.textContent = `${rows > 1 ? `ranks ${count(found.ranks[0])} to ${count(found.ranks[1] - 1)} of ${count(found.all[0])}` : `rank ${count(found.ranks[0])}`}`;
    const most = `${ratio(worst).toFixed(2)} × the median`, slowest = cell(who);
    onDrawn?.(!worst ? "No rank took part." : found.all[0] === 1 ? `One rank: nobody to compare it with.` : ratio(worst) < STANDS_OUT ? `No rank stands out: the slowest, ${slowest}, took ${most}.` : `Slowest: ${slowest}, with ${most} of its step at ${clock(found.ends[when])}.`);
    canvas.dataset.worst = ratio(worst).toFixed(3); canvas.dataset.who = state.who; canvas.dataset.ranks = found.ranks.join("-");
  }

  function hatched(ink, style) {
    const tile = h("canvas", { width: 6, height: 6 }), pen = tile.getContext("2d");
    pen.strokeStyle = style.getPropertyValue("--out"); pen.globalAlpha = 0.7;
    pen.beginPath(); pen.moveTo(0, 6); pen.lineTo(6, 0); pen.moveTo(-1, 1); pen.lineTo(1, -1); pen.moveTo(5, 7); pen.lineTo(7, 5); pen.stroke();
    return ink.createPattern(tile, "repeat");
  }

  function at(event) {
    const box = canvas.getBoundingClientRect(), { found } = state;
    if (!found?.rows) return null;
    const t = view.t(event.clientX - box.left, box.width), c = Math.max(0, Math.min(found.columns - 1, nearest(found.ends, t)));
    const r = Math.max(0, Math.min(found.rows - 1, Math.floor(((event.clientY - box.top) / box.height) * found.rows)));
    return { t, c, r, code: state.codes[r * found.columns + c], rank: found.ranks[0] + Math.floor((r * (found.ranks[1] - found.ranks[0])) / found.rows) };
  }
  canvas.addEventListener("pointermove", (event) => {
    const here = at(event);
    if (!here) return;
    view.hover(here.t);
    tip.hidden = false;
    tip.textContent = `${state.cell(here.r)}, ${clock(here.t)}: ${here.code ? `${ratio(here.code).toFixed(2)} × the median` : "took no part"}`;
    const width = plot.clientWidth, x = view.x(here.t, width);
    tip.style.left = `${x + 8 + tip.offsetWidth < width ? x + 8 : Math.max(0, x - 8 - tip.offsetWidth)}px`;
  });
  canvas.addEventListener("pointerleave", () => { tip.hidden = true; view.hover(null); });
  let down = null;
  canvas.addEventListener("pointerdown", (event) => { down = at(event); canvas.setPointerCapture(event.pointerId); });
  canvas.addEventListener("pointercancel", () => { down = null; });
  canvas.addEventListener("pointerup", (event) => {
    const up = at(event);
    if (down && up && Math.abs(view.x(up.t, plot.clientWidth) - view.x(down.t, plot.clientWidth)) > 6) view.set(Math.min(down.t, up.t), Math.max(down.t, up.t));
    else if (up && onRank) onRank(up.rank);
    down = null;
  });
  canvas.addEventListener("dblclick", () => { if (onRanks) { state.ranks = [0, Infinity]; onRanks(...state.ranks); } view.reset(); });
  canvas.addEventListener("wheel", (event) => {
    if (!(event.shiftKey || event.ctrlKey) || !onRanks || !state.found?.rows) return;
    event.preventDefault();
    zoom((event.deltaY || event.deltaX) > 0 ? 1.5 : 1 / 1.5, at(event).rank);
  }, { passive: false });

  // -- which ranks are shown

  const rowOf = (rank) => { const [a, b] = state.found.ranks; return Math.floor(((rank - a) * state.found.rows) / (b - a)); };
  function choose(first, many) {
    const all = state.found.all[0], a = Math.max(0, Math.min(all - many, first));
    state.ranks = many < all ? [a, a + many] : [0, Infinity];
    onRanks(...state.ranks);
    return load();
  }
  // Show `by` times as many ranks; what stays in its place is `rank`, or the picked or the slowest one.
  function zoom(by, rank = state.picked ?? state.who) {
    if (!state.found?.rows) return;
    const [a, b] = state.found.ranks, now = b - a, many = Math.min(state.found.all[0], by < 1 ? Math.max(1, Math.min(now - 1, Math.floor(now * by))) : Math.max(now + 1, Math.ceil(now * by)));
    choose(Math.round(rank - ((rank - a) * many) / now), many);
  }
  async function move(by) {
    const { found } = state, [a, b] = found.ranks, size = Math.max(1, Math.round((b - a) / found.rows));
    state.picked = state.picked === null ? state.who : Math.max(0, Math.min(found.all[0] - 1, state.picked + by * size));
    if (state.picked < a || state.picked >= b) await choose(state.picked - Math.floor((b - a) / 2), b - a); else draw();
    const row = rowOf(state.picked), code = state.worst[row];
    tip.hidden = false;
    tip.style.left = `${LEFT + 8}px`;
    tip.textContent = `${state.cell(row)}: ${code ? `at most ${ratio(code).toFixed(2)} × the median` : "took no part"}`;
  }
  const keys = { "[": () => zoom(2), "]": () => zoom(0.5), ArrowUp: () => move(-1), ArrowDown: () => move(1), Enter: () => onRank(state.picked ?? state.who) };
  canvas.addEventListener("keydown", (event) => {
    if (!keys[event.key] || !onRanks || !state.found?.rows || event.metaKey || event.ctrlKey || event.altKey) return;
    event.preventDefault(); event.stopPropagation();
    keys[event.key]();
  });
  canvas.addEventListener("blur", () => { if (state.picked === null) return; state.picked = null; tip.hidden = true; draw(); });
  view.on(load);
  new ResizeObserver(load).observe(plot);
  return { figure, load };
}
