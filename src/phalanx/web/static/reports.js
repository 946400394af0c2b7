// Plans and simulations: the pages that `phalanx plan --html` and `phalanx simulate --html` have written beside the runs.
import { h, get, count, date } from "./dom.js";

export async function reportsPage() {
  const { folder, reports } = await get("/api/reports");
  const crumbs = [["plans and simulations", "/reports"]], where = ["in ", h("code", {}, folder), ", the newest first"];
  const how = h("div", { class: "note" }, "Write one with ", h("code", {}, `phalanx plan --model llama3-8b --gpus 64 --hardware h100 --html ${folder}/plan.html`), " or ", h("code", {}, `phalanx simulate llama3-16k --html ${folder}/twin.html`), ".");
  if (!reports.length) return { title: "Plans and simulations", crumbs, element: h("div", {}, h("h1", {}, "No plan or simulation was written yet."), how) };
  return { title: "Plans and simulations", crumbs, element: h("div", {}, h("h1", {}, `${count(reports.length)} ${reports.length === 1 ? "report" : "reports"} of plans and simulations.`), h("p", { class: "sub" }, where),
    h("div", { class: "scroll" }, h("table", { "data-table": "reports" }, h("thead", {}, h("tr", {}, h("th", {}, "report"), h("th", { class: "n" }, "kB"), h("th", { class: "n" }, "written"))),
      h("tbody", {}, reports.map((one) => h("tr", {}, h("td", {}, h("a", { href: `/reports/${encodeURIComponent(one.name)}`, target: "_blank", rel: "noopener" }, one.name)), h("td", { class: "n" }, count(one.bytes / 1e3)), h("td", { class: "n" }, date(one.time))))))), how) };
}
