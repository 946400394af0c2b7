"""The dashboard in a real browser, on the records of real runs with faults: every page is opened, what it draws is
compared with the record, and any error on the console fails the test. `make test-browser`; with
PHALANX_SCREENSHOTS=FOLDER each page is also kept as a picture."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from phalanx.observe import durability
from phalanx.observe.fold import members, union
from phalanx.observe.mixture import stage_starts
from phalanx.observe.phases import PHASES
from phalanx.observe.placement import fleet
from phalanx.observe.provenance import provenance
from phalanx.observe.readings import READINGS
from phalanx.observe.story import Story
from phalanx.observe.words import describe
from tests.observe.records import READ, Written
from tests.web.record_runs import unpack

pytestmark = pytest.mark.browser
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PICTURES = os.environ.get("PHALANX_SCREENSHOTS", "")
HOSTILE = "<img src=x onerror=alert(1)><script>alert(2)</script>\x1b[31m"


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    assert CHROMIUM, "apt install chromium"
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


class Server:
    def __init__(self, root: Path):
        command = [sys.executable, "-m", "phalanx.cli.main", "dash", str(root), "--port", "0"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.url = self.process.stdout.readline().rpartition(": ")[2].strip().rstrip("/")

    def stop(self):
        self.process.terminate()
        self.process.wait()
        self.process.stdout.close()


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return unpack(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def server(root):
    server = Server(root)
    yield server
    server.stop()


@pytest.fixture(scope="module")
def broken(root):
    return Story(next(root.glob("*-chaos-*")))


@pytest.fixture
def open_page(browser, server):
    """Open a page of a given width and theme; errors on any console fail the test."""
    contexts, errors = [], []

    def opened(path, width=1280, theme="light", url=server.url, expect_errors=False):
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=theme)
        contexts.append(context)
        page = context.new_page()
        if not expect_errors:
            page.on("console", lambda m: errors.append(m.text) if m.type in ("error", "warning") else None)
        page.on("pageerror", lambda e: errors.append(str(e)))
        page.on("dialog", lambda d: errors.append(f"dialog: {d.message}"))
        page.goto(url + path)
        page.wait_for_selector("main[data-ready]")
        return page

    yield opened
    for context in contexts:
        context.close()
    assert errors == []


def ready(page, path):
    page.wait_for_selector(f'main[data-ready="{path}"]')


def shoot(page, name):
    if PICTURES:
        page.wait_for_timeout(600)
        page.screenshot(path=f"{PICTURES}/{name}.png", full_page=True)


TABS = ("", "/steps", "/goodput", "/ranks", "/map", "/hosts", "/incidents", "/checkpoints", "/data", "/logs", "/record",
        "/incidents/2")  # fmt: skip


def test_a_reader_clicks_through_every_page(open_page, broken):
    page = open_page("/")
    shoot(page, "runs")
    page.get_by_role("link", name=broken.name).click()
    ready(page, f"/runs/{broken.name}")
    shoot(page, "run")
    answers = set()
    for name in (
        "Steps",
        "Goodput",
        "Ranks",
        "Map",
        "Hosts",
        "Incidents",
        "Checkpoints",
        "Data",
        "Logs",
        "Record",
        "Overview",
    ):
        page.get_by_role("navigation", name="Pages of this run").get_by_role("link", name=name).click()
        page.wait_for_selector(f"nav.tabs a[aria-current] >> text={name}")
        answer = page.locator("h1").inner_text()
        assert answer and answer not in answers, "each page answers its own question"
        answers.add(answer)
        story = page.locator("h1" if name == "Overview" else "#about").inner_text()
        assert story.startswith("Done: 160 steps")
        if name in ("Steps", "Goodput", "Map", "Checkpoints", "Data", "Logs", "Record", "Hosts"):
            shoot(page, name.lower())
    page.locator('table[data-table="incidents"] a').nth(1).click()
    ready(page, f"/runs/{broken.name}/incidents/2")
    assert broken.incidents()[1].verdict().split(": ", 1)[1] in page.locator("main").inner_text()
    shown = page.locator('table[data-table="evidence"] td:nth-child(2)').all_inner_texts()
    assert shown == [event["type"] for event in broken.incidents()[1].evidence]
    shoot(page, "incident")
    page.go_back()
    ready(page, f"/runs/{broken.name}")


def test_what_is_drawn_is_what_the_record_says(open_page, broken):
    page = open_page(f"/runs/{broken.name}")
    last = float(page.locator('[data-chart="loss"] svg').get_attribute("data-last"))
    assert last == pytest.approx(broken.rows[-1]["loss"])
    shown = page.eval_on_selector_all(
        "[data-gpu-s]", "all => all.map((e) => [e.dataset.state, Number(e.dataset.gpuS)])"
    )
    spent = {row["state"]: row["gpu_s"] for row in broken.goodput()["states"] if row["gpu_s"] > 0}
    assert dict(shown) == pytest.approx(spent)
    assert page.locator("[data-chart=what-it-did] a.glyph").count() == len(broken.incidents())
    widths = page.eval_on_selector_all(
        "[data-chart=what-it-did] rect[data-state=start]", "all => all.map((e) => Number(e.getAttribute('width')))"
    )
    plot = page.locator("[data-chart=what-it-did] .plot").bounding_box()["width"] - 72
    wall, start = broken.part.ended - broken.part.began, spent["start"] / 4
    assert sum(widths) / plot == pytest.approx(start / wall, abs=0.01)
    rows = page.eval_on_selector_all(".figures small", "all => all.map((e) => Math.round(e.offsetHeight / 17))")
    assert set(rows) == {1}, "a figure of the strip wraps"
    grey = ("start", "between", "end")
    fills = [page.locator(f'.bars:has([data-state="{name}"]) rect[fill*="{name}"]').count() for name in grey]
    angles = {page.locator(f"#p-{name}").first.get_attribute("patternTransform") for name in grey}
    assert all(fills) and len(angles) == 3, "states of one hue differ by their pattern"


def test_a_mixture_shows_its_experts_its_stages_and_its_validations(open_page, broken):
    page = open_page(f"/runs/{broken.name}")
    last = float(page.locator('[data-chart="expert-load"] svg').get_attribute("data-last"))
    assert last == pytest.approx(broken.rows[-1]["expert_load"])
    validated = [row for row in broken.rows if row.get("validation_loss") is not None]
    assert validated and page.locator('[data-chart="loss"] circle').count() == len(validated)
    (stage,) = stage_starts(broken)
    assert page.locator("[data-stage]").all_text_contents() == [
        f"data stage {stage['number']} from step {stage['step']}: prose 25 %, code 75 %stage {stage['number']}"
    ]


def test_a_run_without_experts_has_no_chart_of_them(open_page, tmp_path):
    run = Written(tmp_path, "dense").begin()
    run.record.metric({"step": 0, "loss": 2.0, "time_s": 0.1, "generation": 1})
    run.end()
    server = Server(tmp_path)
    try:
        page = open_page(f"/runs/{run.path.name}", url=server.url)
        assert (
            page.locator('[data-chart="loss"]').count() == 1 and page.locator('[data-chart="expert-load"]').count() == 0
        )
        page.close()
    finally:
        server.stop()


def test_a_plan_a_price_and_devices_are_shown(open_page, tmp_path):
    """What only a run on accelerators of the catalogue has; its record is written by the writer of real runs."""
    terms = {"passes": 0.05, "reduce": 0.012, "optimizer": 0.004, "between": 0.002}
    plan = {"step_s": 0.09, "step_low_s": 0.08, "step_high_s": 0.12, "tokens_per_s": 1.1e3, "phases": terms}
    rates = {"dollars_per_gpu_hour": 3.0, "watts_per_gpu": 700.0}
    much = {"mean": 1e9, "min": 1e9, "min_rank": 1, "max": 1.25e9, "max_rank": 0}
    fast = {**READ, **dict.fromkeys(("host_network", "device_clock", "device_link_errors"), much)}
    run = Written(tmp_path, forecast=plan, rates=rates).begin().steps(0, 40, readings=fast)
    run.end()
    story, server = Story(run.path), Server(tmp_path)
    try:
        page = open_page(f"/runs/{run.path.name}", url=server.url)
        assert page.locator("rect.band").count() == 2, "throughput and step time have what was predicted behind them"
        assert f"${story.goodput()['dollars']:.3g}" in page.locator(".figures").first.inner_text()
        page = open_page(f"/runs/{run.path.name}/steps", url=server.url)
        shown = page.locator('table[data-table="planned"] tbody tr').all_inner_texts()
        assert [row.split("\t")[1:3] for row in shown] == [
            ["50 ms", "54 ms"], ["12 ms", "10 ms"], ["4 ms", "5 ms"], ["2 ms", "3 ms"],
        ]  # fmt: skip
        page = open_page(f"/runs/{run.path.name}/goodput", url=server.url)
        shown = page.locator(".figures").inner_text()
        good = story.goodput()
        for text in (f"{100 * good['ratio']:.1f} %", f"{100 * good['effective']:.1f} %", f"{good['kwh']:.3g} kWh"):
            assert text in shown
        page = open_page(f"/runs/{run.path.name}/hosts", url=server.url)
        assert page.locator("figure[data-chart]").count() == len(READINGS)
        assert page.locator('table[data-table="readings"] tbody tr').count() == len(READINGS)
        network = page.locator("[data-chart=network-of-the-busiest-host]")
        assert "B/s" in network.locator("figcaption").inner_text()
        left = page.locator("figure svg text").evaluate_all("all => Math.min(...all.map((e) => e.getBBox().x))")
        assert left >= 0, "a label of the axis is cut"
        shoot(page, "devices")
        page.close()
    finally:
        server.stop()


def test_the_record_tells_what_was_chosen_from_the_defaults(open_page, broken):
    page = open_page(f"/runs/{broken.name}/record")
    rows = page.locator('table[data-table="job"] tbody tr')
    chosen = sum(origin != "default" for origin in broken.part.job["origins"].values())
    assert 0 < rows.count() <= chosen
    before = rows.count()
    page.get_by_role("button", name="defaults").click()
    assert rows.count() > before
    assert page.locator('table[data-table="meta"]').inner_text().count(broken.part.meta["job_digest"]) == 1


def test_the_map_of_ranks_shows_the_slowest_and_leads_to_one_rank(open_page, broken):
    from phalanx.observe.tiles import TileReader, decode

    page = open_page(f"/runs/{broken.name}/ranks")
    canvas = page.locator("[data-chart=ranks] .plot canvas")
    page.wait_for_selector("[data-chart=ranks] .plot canvas[data-worst]")
    shoot(page, "ranks")
    codes = TileReader(broken.path / "ranks").picture((0, 4), (0, 10**6), 4, 1000)["codes"]
    assert float(canvas.get_attribute("data-worst")) == pytest.approx(float(decode(codes.max())), abs=1e-3)
    box = canvas.bounding_box()
    canvas.click(position={"x": box["width"] * 0.9, "y": box["height"] * 0.4})
    page.wait_for_selector("text=Rank 1 alone")
    assert "rank=1" in page.url


def test_the_keyboard_zooms_to_ranks_and_the_address_holds_them(open_page, broken):
    page = open_page(f"/runs/{broken.name}/ranks")
    canvas = page.locator("[data-chart=ranks] .plot canvas")
    shown = lambda ranks: page.wait_for_selector(f'[data-chart=ranks] canvas[data-ranks="{ranks}"]')  # noqa: E731
    shown("0-4")
    slowest = int(canvas.get_attribute("data-who"))
    canvas.focus()
    page.keyboard.press("]")
    page.wait_for_selector('[data-chart=ranks] .plot canvas:not([data-ranks="0-4"])')
    first, end = map(int, canvas.get_attribute("data-ranks").split("-"))
    assert end - first == 2 and first <= slowest < end and page.url.endswith(f"r0={first}&r1={end}")
    again = open_page(f"/runs/{broken.name}/ranks?r0={first}&r1={end}")
    again.wait_for_selector(f'[data-chart=ranks] canvas[data-ranks="{first}-{end}"]')
    page.keyboard.press("[")
    shown("0-4")
    assert "r0=" not in page.url
    page.get_by_role("button", name="fewer ranks").click()
    shown(f"{first}-{end}")
    page.get_by_role("button", name="more ranks").click()
    shown("0-4")
    canvas.focus()
    page.keyboard.press("ArrowDown")
    assert page.locator("[data-chart=ranks] .tip").inner_text().startswith(f"rank {slowest}: at most")
    key, other = ("ArrowUp", slowest - 1) if slowest else ("ArrowDown", 1)
    page.keyboard.press(key)
    page.wait_for_selector(f"[data-chart=ranks] .tip >> text=rank {other}:")
    page.keyboard.press("Enter")
    page.wait_for_selector(f"text=Rank {other} alone")
    assert f"rank={other}" in page.url


def test_the_phases_of_a_step_are_those_of_the_record(open_page, broken):
    page = open_page(f"/runs/{broken.name}/steps")
    shown = page.eval_on_selector_all(
        "[data-seconds]", "all => all.map((e) => [e.dataset.phase, Number(e.dataset.seconds)])"
    )
    assert dict(shown) == pytest.approx(describe(broken)["phases"]) and list(dict(shown)) == list(PHASES)
    drawn = page.eval_on_selector_all("path[data-phase]", "all => all.map((e) => e.dataset.phase)")
    assert drawn == list(PHASES)


def test_the_map_shows_each_rank_on_its_node_and_marks_the_peers_of_one(open_page, broken):
    found = fleet(broken.part)
    page = open_page(f"/runs/{broken.name}/map")
    nodes = page.eval_on_selector_all("[data-node]", "all => all.map((e) => [e.dataset.node, e.dataset.state])")
    assert dict(nodes) == {node["name"]: node["state"] for node in found["nodes"]}
    on = page.eval_on_selector_all("[data-node] [data-rank]", "all => all.map((e) => Number(e.dataset.rank))")
    assert sorted(on) == sorted(members(union([span for node in found["nodes"] for span in node["ranks"]])))
    page.locator('[data-rank="1"]').click()
    assert page.locator(".cell.picked").count() == 1 and page.locator(".cell.peer").count() == 3, "its replicas"
    assert "rank=1" in page.url
    page.get_by_role("button", name="by health").click()
    assert "by=health" in page.url


def test_the_tiers_are_those_of_the_record(open_page, broken):
    page = open_page(f"/runs/{broken.name}/checkpoints")
    tiers = page.eval_on_selector_all(
        "tr[data-tier]", "all => all.map((e) => [e.dataset.tier, e.cells[1].textContent])"
    )
    assert dict(tiers) == {tier["tier"]: f"{tier['step']:,}" for tier in durability.tiers(broken)}
    drawn = page.eval_on_selector_all("path[data-tier]", "all => all.map((e) => e.dataset.tier)")
    assert drawn == ["trained", "memory", "disk"]
    page = open_page(f"/runs/{broken.name}/data")
    served = sum(sum(row["served"].values()) for row in broken.rows)
    counts = page.locator('table[data-table="mixture"] td:nth-child(2)').all_inner_texts()
    assert len(counts) == 2 and sum(int(text.replace(",", "")) for text in counts) == served


def test_zoom_moves_all_charts_and_the_address_holds_it(open_page, broken):
    page = open_page(f"/runs/{broken.name}")
    axis = lambda chart: page.locator(f'[data-chart="{chart}"] svg text').all_text_contents()  # noqa: E731
    before = axis("throughput")
    box = page.locator('[data-chart="loss"] .plot').bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 60)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.7, box["y"] + 60, steps=4)
    page.mouse.up()
    page.wait_for_url("**from=*")
    page.wait_for_timeout(400)
    assert axis("throughput") != before
    address, zoomed = page.url, axis("gradient-norm")
    again = open_page(address.split("//", 1)[1].partition("/")[2].join(["/", ""]))
    assert again.locator('[data-chart="gradient-norm"] svg text').all_text_contents() == zoomed
    page.keyboard.press("0")
    page.wait_for_timeout(400)
    assert "from=" not in page.url and axis("throughput") == before


def test_a_drag_may_end_outside_and_charts_that_are_gone_listen_no_more(open_page, broken):
    page = open_page("/")
    page.add_init_script(
        "window.heard = []; const add = window.addEventListener;"
        "window.addEventListener = function (kind, ...rest) {"
        "  if (this === window || this === undefined) window.heard.push(kind);"
        "  return add.call(this ?? window, kind, ...rest); };"
    )
    page.goto(page.url + f"runs/{broken.name}")
    ready(page, f"/runs/{broken.name}")
    before = page.evaluate("window.heard")
    assert "keydown" in before
    for name in ("Steps", "Ranks", "Checkpoints", "Overview"):
        page.get_by_role("navigation", name="Pages of this run").get_by_role("link", name=name).click()
        page.wait_for_selector(f"nav.tabs a[aria-current] >> text={name}")
    assert page.evaluate("window.heard") == before, "a chart has left a listener behind"
    box = page.locator('[data-chart="loss"] .plot').bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 60)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.8, box["y"] - 200, steps=4)
    page.mouse.up()
    page.wait_for_url("**from=*")


def test_a_spike_is_drawn_where_it_was(open_page, tmp_path):
    run = Written(tmp_path, steps=200).begin().steps(0, 80)
    run.steps(80, 81, loss=9.0)
    story, server = Story(run.steps(81, 200).end()), Server(tmp_path)
    try:
        page = open_page(f"/runs/{run.path.name}", url=server.url)
        star = page.locator("[data-spike]")
        plot = page.locator("[data-chart=what-it-did] .plot").bounding_box()["width"] - 72
        part = (story.rows[80]["time"] - story.part.began) / (story.part.ended - story.part.began)
        assert (float(star.get_attribute("x")) - 56) / plot == pytest.approx(part, abs=0.002)
        later = story.rows[120]["time"]
        page = open_page(f"/runs/{run.path.name}?from={later}&to={story.part.ended}", url=server.url)
        assert star.count() == 1 and page.locator("[data-spike]").count() == 0, "it was before this view"
        page.close()
    finally:
        server.stop()


def test_a_run_that_goes_on_with_fewer_ranks_has_lost_none(open_page, tmp_path):
    first = Written(tmp_path, "job", replicas=8).begin().steps(0, 20)
    first.event("checkpoint", step=20, checkpoint="step-20")
    first.end()
    run = Written(tmp_path, "job", replicas=4, started=first.now)
    run.now = first.now
    run.event("resume", url=str(first.path / "checkpoints"), name="step-20", step=20)
    run.begin().steps(20, 40).end()
    server = Server(tmp_path)
    try:
        page = open_page(f"/runs/{run.path.name}", url=server.url)
        assert "Continues" in page.locator("main").inner_text()
        page.wait_for_selector("[data-chart=what-it-did] rect[data-state=productive]")
        drawn = page.eval_on_selector_all(
            "[data-chart=what-it-did] rect[data-state]",
            "all => all.map((e) => [e.dataset.state, Number(e.getAttribute('height'))])",
        )
        assert {height for _, height in drawn} == {24.0} and "out" not in dict(drawn)
        page.close()
    finally:
        server.stop()


def test_the_keyboard_reaches_everything(open_page, broken):
    page = open_page("/")
    page.keyboard.press("/")
    page.keyboard.type("chaos")
    assert page.locator("tbody tr:visible").count() == 1
    page.keyboard.press("Escape")
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    ready(page, f"/runs/{broken.name}")
    for keys, path in (("gg", "/goodput"), ("gh", "/ranks"), ("gi", "/incidents"), ("go", "")):
        for key in keys:
            page.keyboard.press(key)
        ready(page, f"/runs/{broken.name}{path}")
    page.keyboard.press("l")
    assert page.locator("[data-log]").first.get_attribute("aria-pressed") == "true"
    theme = page.locator("html").get_attribute("data-theme")
    page.keyboard.press("t")
    assert page.locator("html").get_attribute("data-theme") != theme
    for keys, path in (("gd", "/data"), ("gl", "/logs"), ("gj", "/record"), ("gm", "/hosts")):
        for key in keys:
            page.keyboard.press(key)
        ready(page, f"/runs/{broken.name}{path}")
    page.keyboard.press("?")
    assert page.locator("dialog[open]").count() == 1
    assert "hosts" in page.locator("dialog").inner_text() and "logs" in page.locator("dialog").inner_text()
    page.keyboard.press("Escape")
    page.keyboard.press("g")
    page.keyboard.press("r")
    ready(page, "/")
    page = open_page("/?theme=dark")
    page.keyboard.press("t")
    assert page.locator("html").get_attribute("data-theme") == "light" and page.url.endswith("?theme=light")


def test_two_runs_are_compared(open_page, root):
    page = open_page("/")
    for box in page.locator("tbody input").all():
        box.check()
    page.get_by_role("button", name="Compare the two").click()
    page.wait_for_selector("text=All 160 steps are equal to the bit")
    shoot(page, "compare")
    strokes = "all => all.map((e) => e.style.stroke)"
    chart = page.locator("[data-chart=loss-by-step]")
    lines = chart.locator(".plot path").evaluate_all(strokes)
    assert len(set(lines)) == 2 and lines == chart.locator(".legend line").evaluate_all(strokes)
    page = open_page("/compare")
    page.get_by_role("button", name="Compare").click()
    page.wait_for_selector("text=All 160 steps are equal to the bit")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_page_works_at_390_px(open_page, broken, theme):
    for path in ("/", *(f"/runs/{broken.name}{tab}" for tab in TABS), "/compare"):
        page = open_page(path, width=390, theme=theme)
        over = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert over <= 0, path
        assert page.locator("figcaption .tools.hide-narrow:visible").count() == 0, path
        if path.endswith("/incidents"):
            verdict = page.locator('table[data-table="incidents"] td:nth-child(2)').first
            assert verdict.bounding_box()["width"] > 300, "the verdict has the width of the page"
        if theme == "dark" and path.endswith(broken.name):
            shoot(page, "narrow-dark")
    if theme == "dark":
        shoot(open_page(f"/runs/{broken.name}", theme="dark"), "run-dark")


def test_text_has_enough_contrast(open_page, broken):
    """At least 4.5 to 1 for the text colours, in both themes."""
    colours = (
        """(names) => names.map((name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim())"""
    )

    def light(colour):  # relative luminance, WCAG 2.2
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    names = ["--ground", "--raised", "--text", "--soft", "--accent", "--good", "--bad"]
    for theme in ("light", "dark"):
        *grounds, text, soft, accent, good, bad = map(light, open_page("/", theme=theme).evaluate(colours, names))
        for ground in grounds:
            for ink in (text, soft, accent, good, bad):
                assert (max(ink, ground) + 0.05) / (min(ink, ground) + 0.05) >= 4.5, theme


def test_hostile_text_is_shown_as_text(open_page, tmp_path):
    run = Written(tmp_path, "hostile", note=HOSTILE).begin().steps(0, 3)
    run.event("exit", rank=1, signal=HOSTILE, node=HOSTILE, service="")
    run.event("ended", ok=False, reason=HOSTILE)
    (run.path / "logs" / "node-0").mkdir()
    (run.path / "logs" / "node-0" / "rank-00000.log").write_text(f"{HOSTILE}\n")
    run.record.finish({"status": "failed", "reason": HOSTILE})
    server = Server(tmp_path)
    try:
        for path in (
            "/",
            *(f"/runs/{run.path.name}{tab}" for tab in ("", "/incidents", "/incidents/1", "/logs", "/record")),
        ):
            page = open_page(path, url=server.url)
            page.wait_for_timeout(100)
            assert page.locator("main img, main script").count() == 0
            text = page.locator("main").inner_text()
            page.close()  # the list would ask a server that is gone
        assert "onerror=alert(1)" in text
    finally:
        server.stop()


def test_a_live_run_moves_in_place_and_a_lost_connection_is_told(open_page, tmp_path):
    now = time.time()
    run = Written(tmp_path, process=provenance()["process"], started=now, steps=400)
    run.now = now
    run.begin().steps(0, 10)
    server = Server(tmp_path)
    try:
        page = open_page(f"/runs/{run.path.name}", url=server.url, expect_errors=True)
        page.wait_for_selector("#link.live")
        assert "step 10 of 400" in page.locator("h1").inner_text()
        page.evaluate("window.unchanged = document.querySelector('h1')")
        run.steps(10, 25)
        page.wait_for_selector("h1:has-text('step 25 of 400')")
        assert page.evaluate("window.unchanged === document.querySelector('h1')"), "the page was built anew"
    finally:
        server.stop()
    page.wait_for_selector("#link.lost >> text=no connection since")


def test_every_page_of_a_live_run_follows_it(open_page, tmp_path):
    """A page that was opened before the first step must not say for ever that nothing has happened."""
    now = time.time()
    run = Written(tmp_path, process=provenance()["process"], started=now, steps=400)
    run.now = now
    server = Server(tmp_path)
    pages = {  # what each says before the first step, and after a step and a death
        "": ("The ranks are starting", "What broke"),
        "steps": ("No step has reported its phases yet: each", "Most work of its own"),
        "goodput": ("no failure in", "1 failure in"),
        "ranks": ("no step times of single ranks", "Own work of each rank"),
        "map": ("No node has joined yet", "node-0"),
        "hosts": ("No node has read anything yet", "Cores of the busiest host"),
        "incidents": ("Nothing has broken", "SIGKILL"),
        "checkpoints": ("Nothing is saved yet", "Durable checkpoints"),
        "data": ("No sample was served yet", "samples of 2 sources were served"),
        "logs": ("have written nothing", "a line of a log"),
    }  # fmt: skip
    try:
        opened = {tab: open_page(f"/runs/{run.path.name}/{tab}".rstrip("/"), url=server.url) for tab in pages}
        for tab, (before, after) in pages.items():
            text = opened[tab].locator("main").inner_text()
            assert before in text and after not in text, tab
        run.begin().steps(0, 20)
        for step in range(20):
            run.record.rank_times(step, [1, {"0": 0.1, "1": 0.2}], 2)
        saved = {"step": 16, "bytes": 1, "drain_s": 0.1, "stall_s": 0.1, "slowdown_s": 0.0, "checkpoint": "step-16"}
        run.event("checkpoint", 0.1, **saved)
        run.event("exit", 0.1, node="node-0", rank=1, signal="SIGKILL", service="", worker="w1")
        (run.path / "logs" / "node-0").mkdir()
        (run.path / "logs" / "node-0" / "rank-00000.log").write_text("a line of a log\n")
        for tab, (before, after) in pages.items():
            opened[tab].wait_for_selector(f"main :text('{after}'):visible", timeout=15_000)
            assert before not in opened[tab].locator("main").inner_text(), tab
            assert opened[tab].locator("nav.tabs a >> text=Incidents (1)").count() == 1, tab
        page = open_page(f"/runs/{run.path.name}/incidents/1", url=server.url)
        before = page.locator("main").inner_text()
        run.generation += 1
        run.form(20)
        run.steps(20, 25)
        page.wait_for_function("(before) => document.querySelector('main').innerText !== before", arg=before)
        run.steps(10, 30)  # from an earlier step on
        opened[""].wait_for_selector("text=Branch: 15 steps from step 10 on were abandoned")
        page.close()
        for each in opened.values():
            each.close()
    finally:
        server.stop()


def test_empty_and_wrong_say_what_to_do(open_page, tmp_path, server):
    empty = Server(tmp_path)
    try:
        page = open_page("/", url=empty.url)
        assert "phalanx train" in page.locator("main").inner_text()
        shoot(page, "empty")
        page = open_page("/runs/nothing-20260101T000000Z-0000", url=empty.url, expect_errors=True)
        assert "there is no such run" in page.locator("main").inner_text()
    finally:
        empty.stop()


def test_the_first_view_is_small(open_page, broken):
    page = open_page(f"/runs/{broken.name}")
    sizes = page.evaluate("performance.getEntries().filter((e) => e.transferSize).map((e) => e.transferSize)")
    assert sum(sizes) < 300_000
