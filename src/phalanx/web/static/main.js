// Routes, keys, theme and the live connection. A page in the background costs nothing: its connection is closed.
import { h, clock } from "./dom.js";
import { runsPage, runPage, incidentPage, comparePage } from "./pages.js";
import { reportsPage } from "./reports.js";

const main = document.getElementById("main"), link = document.getElementById("link"), help = document.getElementById("help");
const state = { page: null, source: null, timer: null, busy: false, latest: null, turn: 0, heard: 0 };

async function route(quietly = false) {
  const turn = ++state.turn, path = location.pathname, query = new URLSearchParams(location.search);
  let page;
  try {
    const [, kind, name, tab, number] = path.split("/").map(decodeURIComponent);
    if (kind === "runs" && name && tab === "incidents" && number) page = await incidentPage(name, Number(number));
    else if (kind === "runs" && name) page = await runPage(name, tab || "", query);
    else if (kind === "compare") page = await comparePage(query);
    else if (kind === "reports") page = await reportsPage();
    else page = await runsPage();
  } catch (error) {
    page = { title: "Not found", crumbs: [], element: h("div", {}, h("h1", {}, "This cannot be shown."), h("div", { class: "note bad" }, error.message, ". ", h("a", { href: "/" }, "Back to the runs"))) };
    if (quietly && state.page) { say(`no answer since ${clock(Date.now() / 1e3)}; trying again`, "lost"); return again(); }
  }
  if (turn !== state.turn) return;
  const focus = quietly ? document.querySelector("tr.here")?.dataset.run : null, scroll = scrollY;
  state.page = page;
  document.title = `${page.title} · Phalanx`;
  document.getElementById("crumbs").replaceChildren(h("a", { href: "/" }, "runs"), ...page.crumbs.map(([text, href]) => h("a", { href }, text)));
  main.replaceChildren(page.element);
  const tab = main.querySelector("nav.tabs [aria-current]");
  if (tab) tab.parentElement.scrollLeft = tab.offsetLeft - tab.parentElement.clientWidth / 2;  // where not all tabs fit
  main.dataset.ready = path;
  if (quietly) { scrollTo(0, scroll); if (focus) main.querySelector(`tr[data-run="${CSS.escape(focus)}"]`)?.classList.add("here"); }
  connect();
}

function again() { clearTimeout(state.timer); state.timer = setTimeout(() => route(true), 3000); }

function say(text, kind = "") { link.textContent = text; link.className = kind; }

function connect() {
  state.source?.close(); state.source = null;
  clearTimeout(state.timer);
  const page = state.page;
  if (document.hidden || !page) return;
  if (page.poll) { say(""); const filter = document.getElementById("filter"); state.timer = setTimeout(() => (filter?.value || main.querySelector("input:checked") ? connect() : route(true)), page.poll); return; }
  if (!page.live) { say(""); return; }
  const source = new EventSource(`/api/runs/${encodeURIComponent(page.live)}/live`);
  state.source = source;
  source.onmessage = async (event) => {
    say("live", "live"); state.heard = Date.now();
    state.latest = event.data;
    if (state.busy) return;
    state.busy = true;  // at most one drawing a second, and the latest news is always drawn
    while (state.latest && state.source === source) {
      const latest = state.latest;
      state.latest = null;
      try { await page.heard(JSON.parse(latest)); } catch { /* the next one comes */ }
      await new Promise((done) => setTimeout(done, 900));
    }
    state.busy = false;
  };
  source.addEventListener("over", () => { source.close(); say(""); route(true); });
  source.addEventListener("gone", () => { source.close(); say("the record is gone", "lost"); });
  source.onerror = () => say(`no connection since ${clock((state.heard || Date.now()) / 1e3)}; trying again`, "lost");
}

// -- theme: the system's, unless chosen

const chosen = () => new URLSearchParams(location.search).get("theme") || localStorage.getItem("theme");
function theme() {
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.dataset.theme = chosen() || (dark ? "dark" : "light");
}
function flip() {
  const next = document.documentElement.dataset.theme === "dark" ? "light" : "dark", url = new URL(location.href);
  localStorage.setItem("theme", next);
  if (url.searchParams.has("theme")) { url.searchParams.set("theme", next); history.replaceState(null, "", url); }  // it would win
  theme();
  state.page?.view?.changed();
}
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", theme);
document.getElementById("theme").addEventListener("click", flip);

// -- keys

const KEYS = [["j, k", "next, previous row"], ["Enter", "open it"], ["/", "filter"], ["g r", "all runs"], ["g o, g s, g g, g h", "overview, steps, goodput, heat map"], ["g t, g m, g i", "map of nodes, hosts, incidents"], ["g c, g d, g l, g j", "checkpoints, data, logs, record of the job"], ["[ ], ↑ ↓", "on the heat map: zoom ranks, pick one"], ["g p", "plans and simulations"], ["l", "logarithmic loss"], ["0", "the whole run"], ["+, −", "zoom"], ["← →", "move"], ["t", "light or dark"], ["y", "copy a link to this view"], ["?", "this help"]];
function showHelp() {
  help.replaceChildren(h("h2", {}, "Keyboard"), h("table", {}, h("tbody", {}, KEYS.map(([key, text]) => h("tr", {}, h("td", {}, h("kbd", {}, key)), h("td", {}, text))))), h("form", { method: "dialog" }, h("button", { autofocus: true }, "Close")));
  help.showModal();
}
document.getElementById("keys").addEventListener("click", showHelp);
let lead = "", leadEnds = null;
addEventListener("keydown", (event) => {
  if (event.metaKey || event.ctrlKey || event.altKey || help.open) return;
  if (event.target.matches("input, textarea")) { if (event.key === "Escape") event.target.blur(); return; }
  const view = state.page?.view, run = location.pathname.split("/")[2];
  const key = lead + event.key;
  lead = "";
  if (key === "g") { lead = "g"; clearTimeout(leadEnds); leadEnds = setTimeout(() => { lead = ""; }, 1200); return; }
  const tabs = { gr: "/", gp: "/reports", gs: run && `/runs/${run}/steps`, gt: run && `/runs/${run}/map`, gc: run && `/runs/${run}/checkpoints`, go: run && `/runs/${run}`, gg: run && `/runs/${run}/goodput`, gh: run && `/runs/${run}/ranks`, gm: run && `/runs/${run}/hosts`, gi: run && `/runs/${run}/incidents`, gd: run && `/runs/${run}/data`, gl: run && `/runs/${run}/logs`, gj: run && `/runs/${run}/record` };
  if (tabs[key]) { navigate(tabs[key]); event.preventDefault(); return; }
  const zoom = (by) => { const middle = (view.begin + view.end) / 2, half = ((view.end - view.begin) / 2) * by; view.set(middle - half, middle + half); };
  const shift = (by) => { const d = by * (view.end - view.begin); if (view.begin + d >= view.min && view.end + d <= view.max) view.set(view.begin + d, view.end + d); };
  const acts = {
    j: () => step(1), k: () => step(-1), Enter: () => (event.target.matches("a, button, summary") ? false : main.querySelector("tr.here a")?.click()),
    "/": () => document.getElementById("filter")?.focus(), "?": showHelp, t: flip, l: () => main.querySelector("[data-log]")?.click(),
    y: () => navigator.clipboard?.writeText(location.href).then(() => say("link copied")),
    0: () => view?.reset(), "+": () => view && zoom(0.5), "=": () => view && zoom(0.5), "-": () => view && zoom(2), ArrowLeft: () => view && shift(-0.25), ArrowRight: () => view && shift(0.25),
  };
  if (acts[key] && acts[key]() !== false) event.preventDefault();
});
function step(by) {
  const rows = [...main.querySelectorAll("tbody tr")].filter((row) => !row.hidden), now = rows.findIndex((row) => row.classList.contains("here"));
  const next = rows[Math.max(0, Math.min(rows.length - 1, now < 0 ? 0 : now + by))];
  rows[now]?.classList.remove("here");
  next?.classList.add("here");
  next?.scrollIntoView({ block: "nearest" });
}

function navigate(href) { history.pushState(null, "", href); route().then(() => { scrollTo(0, 0); main.focus({ preventScroll: true }); }); }
addEventListener("click", (event) => {
  const anchor = event.target.closest?.("a[href]");
  if (!anchor || event.button || event.metaKey || event.ctrlKey || event.shiftKey) return;
  const href = typeof anchor.href === "string" ? anchor.href : anchor.href.baseVal;  // of an SVG link
  const url = new URL(href, location.href);
  if (url.origin !== location.origin || url.hash || url.protocol === "blob:" || anchor.hasAttribute("download") || anchor.target) return;
  event.preventDefault();
  navigate(url.pathname + url.search);
});
addEventListener("popstate", () => route());
document.addEventListener("visibilitychange", () => (document.hidden ? (state.source?.close(), clearTimeout(state.timer)) : route(true)));
theme();
route();
