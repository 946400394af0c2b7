"""The HTTP API and the pages. Everything is read-only: no request changes a run or a file.

On a loopback address the server answers only requests whose Host is a loopback address, so that no web site can reach
it through a name of its own. On any other address it answers only requests with the token."""

from __future__ import annotations

import asyncio
import gzip
import json
import secrets
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from fastapi import FastAPI, HTTPException, Query, Request, Response
from fastapi.responses import FileResponse, JSONResponse, PlainTextResponse, RedirectResponse, StreamingResponse
from starlette.datastructures import MutableHeaders
from starlette.middleware.gzip import GZipMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from phalanx.web.shelf import REPORTS, Shelf

STATIC = Path(__file__).parent / "static"
FILES = {
    "app.css": "text/css",
    "icon.svg": "image/svg+xml",
    **{path.name: "text/javascript" for path in STATIC.glob("*.js")},
}
COOKIE = "phalanx_token"
LOOPBACK = {"localhost", "127.0.0.1", "[::1]", "::1"}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
# A report is a page from a file: its scripts do not run, and it cannot reach anything.
REPORT_HEADERS = {
    "Content-Security-Policy": "sandbox allow-popups; default-src 'none'; style-src 'unsafe-inline'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
}
LIVE_S, BEAT_S = 1.0, 10.0


class Guard:
    """Refuse requests that are not allowed, and add the common headers to every answer."""

    def __init__(self, app: ASGIApp, token: str):
        self.app, self.token = app, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for header, value in HEADERS.items():
                    headers.setdefault(header, value)
            await send(message)

        request = Request(scope)
        app: ASGIApp = _refused(request, self.token) or self.app
        if app is self.app and self.token and _same(request.query_params.get("token", ""), self.token):
            app = response = RedirectResponse(str(request.url.remove_query_params("token")), status_code=303)
            response.set_cookie(COOKIE, self.token, httponly=True, samesite="strict", max_age=30 * 86_400)
        await app(scope, receive, with_headers)


def create_app(shelf: Shelf, token: str = "") -> FastAPI:
    """Create the app. `token`: required in every request; "": requests must be sent to a loopback address instead."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(GZipMiddleware, minimum_size=1000, compresslevel=5)

    app.add_middleware(Guard, token=token)

    @app.exception_handler(KeyError)
    async def missing(request: Request, error: KeyError) -> Response:
        return JSONResponse({"error": "there is no such run or incident", "remedy": "go back to the list"}, 404)

    @app.get("/api/runs")
    def runs() -> Any:
        keep = ("run", "name", "state", "headline", "began", "ended", "step", "steps", "loss", "tokens_per_s", "mfu",
                "incidents", "open_incidents", "ranks", "layout", "reason")  # fmt: skip
        found = [
            {**{k: about[k] for k in keep}, "goodput": about["goodput"]["ratio"], "gpu_s": about["goodput"]["gpu_s"],
             "dollars": about["goodput"]["dollars"]}
            for about in shelf.runs()
        ]  # fmt: skip
        return {"folder": str(shelf.root), "runs": found}

    @app.get("/api/runs/{run}")
    def one(run: str, request: Request) -> Any:
        return _compressed(request, shelf.answer(run, "whole"))

    @app.get("/api/runs/{run}/record")
    def record(run: str, request: Request) -> Any:
        return _compressed(request, shelf.answer(run, "record"))

    @app.get("/api/runs/{run}/series")
    def series(
        run: str, request: Request, begin: float = 0.0, end: float = 1e12, points: int = Query(800, ge=1, le=4000)
    ) -> Any:
        return _compressed(request, shelf.answer(run, "series", begin, end, points))

    @app.get("/api/runs/{run}/heat")
    def heat(
        run: str,
        r0: int = Query(0, ge=0),
        r1: int = Query(1 << 40, ge=0),
        s0: int = Query(0, ge=0),
        s1: int = Query(1 << 40, ge=0),
        h: int = Query(256, ge=1, le=2000),
        w: int = Query(800, ge=1, le=4000),
    ) -> Any:
        return shelf.heat(run, (r0, r1), (s0, s1), h, w) or {"rows": 0, "columns": 0}

    @app.get("/api/runs/{run}/fleet")
    def fleet(run: str) -> Any:
        return shelf.fleet(run)

    @app.get("/api/runs/{run}/mixture")
    def mixture(run: str) -> Any:
        return shelf.mixture(run)

    @app.get("/api/runs/{run}/incidents/{number}")
    def incident(run: str, number: int) -> Any:
        return shelf.incident(run, number)

    @app.get("/api/diff")
    def diff(a: str, b: str) -> Any:
        from phalanx.observe.compare import compare

        return compare(shelf.get(a).story, shelf.get(b).story)

    @app.get("/api/runs/{run}/logs")
    def logs(run: str) -> Any:
        from phalanx.observe.logs import folded

        return folded(shelf.get(run).story.path / "logs")

    @app.get("/api/runs/{run}/live")
    async def live(run: str, request: Request) -> Response:
        await asyncio.to_thread(shelf.get, run)
        return StreamingResponse(_live(shelf, run, request), media_type="text/event-stream")

    @app.get("/api/runs/{run}/traces")
    def traces(run: str) -> Any:
        return {"traces": shelf.traces(run)}

    @app.get("/api/runs/{run}/traces/{name}")
    def trace(run: str, name: str) -> Response:
        return FileResponse(shelf.trace(run, name), media_type="application/gzip", filename=f"{run}-{name}")

    @app.get("/api/reports")
    def reports() -> Any:
        return {"folder": str(shelf.root / REPORTS), "reports": shelf.reports()}

    @app.get("/reports/{name}")
    def report(name: str) -> Response:
        return FileResponse(shelf.report(name), media_type="text/html; charset=utf-8", headers=REPORT_HEADERS)

    @app.get("/metrics")
    def metrics() -> Response:
        from phalanx.observe.prometheus import exposition

        return PlainTextResponse(exposition(shelf.runs()), media_type="text/plain; version=0.0.4")

    @app.get("/static/{name}")
    def static(name: str) -> Response:
        if name not in FILES:
            raise HTTPException(404)
        return FileResponse(STATIC / name, media_type=FILES[name])

    @app.get("/")
    @app.get("/compare")
    @app.get("/reports")
    @app.get("/runs/{rest:path}")
    def page(rest: str = "") -> Response:
        return FileResponse(STATIC / "index.html", media_type="text/html; charset=utf-8")

    return app


def _compressed(request: Request, made: bytes) -> Response:
    """Send the stored gzip to clients that accept it, and decompress it for the others."""
    headers = {"Vary": "Accept-Encoding"}
    if "gzip" in request.headers.get("accept-encoding", ""):
        headers["Content-Encoding"] = "gzip"
    else:
        made = gzip.decompress(made)
    return Response(made, media_type="application/json", headers=headers)


async def _live(shelf: Shelf, run: str, request: Request) -> AsyncIterator[str]:
    """Send the overview whenever it changes, and a heartbeat in between."""
    sent, silent = -1, 0.0
    while not await request.is_disconnected():
        try:
            about = await asyncio.to_thread(shelf.about, run)
        except KeyError:  # it was deleted
            yield "event: gone\ndata: {}\n\n"
            return
        if about["version"] != sent:
            sent, silent = about["version"], 0.0
            yield f"data: {json.dumps(about)}\n\n"
        elif silent >= BEAT_S:
            silent = 0.0
            yield ": alive\n\n"
        if about["state"] != "running":
            yield "event: over\ndata: {}\n\n"
            return
        await asyncio.sleep(LIVE_S)
        silent += LIVE_S


def _refused(request: Request, token: str) -> Response | None:
    if request.method not in ("GET", "HEAD"):
        return JSONResponse({"error": "the dashboard is read-only"}, 405)
    if not token:
        host = (
            (request.headers.get("host") or "").rsplit(":", 1)[0] if request.url.port else request.headers.get("host")
        )
        if (host or "") not in LOOPBACK:
            return JSONResponse({"error": "this address is not the dashboard's", "remedy": "open it by 127.0.0.1"}, 403)
        return None
    given = request.headers.get("authorization", "").removeprefix("Bearer ") or request.cookies.get(COOKIE, "")
    if _same(given, token) or _same(request.query_params.get("token", ""), token):
        return None
    return JSONResponse(
        {"error": "the token is missing or wrong", "remedy": "open the address that `phalanx dash` printed"}, 401
    )


def _same(given: str, token: str) -> bool:
    return secrets.compare_digest(given.encode(), token.encode())
