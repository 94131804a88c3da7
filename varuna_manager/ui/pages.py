"""The pages of ``spottrain ui``.

What they show comes from the functions that ``status``, ``report``, ``events`` and
``explain`` print, and what they do from those that commands call. Text comes from job files,
clouds and users' code: templates escape all of it.
"""

from __future__ import annotations

import sqlite3
from collections import deque
from collections.abc import Callable, Hashable
from contextlib import closing
from itertools import islice
from typing import Any
from urllib.parse import quote

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from starlette.requests import Request
from starlette.responses import (
    HTMLResponse,
    JSONResponse,
    RedirectResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import BaseRoute, Route

import spottrain
from spottrain.errors import ConfigError, SpottrainError
from spottrain.printable import printable
from spottrain.redaction import redacted
from spottrain.varuna_manager import format as fmt
from spottrain.varuna_manager.api import queries
from spottrain.varuna_manager.api.trouble import trouble_of_machine
from spottrain.varuna_manager.jobs.folder import JobDir
from spottrain.varuna_manager.jobs.journal import Journal
from spottrain.varuna_manager.jobs.logs import LogReader, vms_with_logs
from spottrain.varuna_manager.jobs.measurements import Measurements
from spottrain.varuna_manager.pool.report.document import status as pool_status
from spottrain.varuna_manager.pool.report.page import (
    divisions,
    jobs_table,
    lead,
    pictures,
)
from spottrain.varuna_manager.pool.store.folder import PoolDir
from spottrain.varuna_manager.reporting import documents, tables
from spottrain.varuna_manager.reporting.explain import chain
from spottrain.varuna_manager.reporting.explain.document import explanation
from spottrain.varuna_manager.reporting.html.charts import scene_of
from spottrain.varuna_manager.reporting.html.curves import read_curves
from spottrain.varuna_manager.reporting.html.lanes import lanes
from spottrain.varuna_manager.reporting.text import RowsTable, history_tables
from spottrain.varuna_manager.ui import deeds
from spottrain.varuna_manager.ui.charts import charts
from spottrain.varuna_manager.ui.watching import changes, fingerprint

MAX_MESSAGES = 200
"""Events on a job's page, the newest."""
MAX_LINES = 300
"""Of each log, the last."""
_BOTH = ("GET", "POST")


def _shown(value: Any) -> Any:
    """Return a text without secrets, and without what is no text for people."""
    if isinstance(value, str) and not isinstance(value, Markup):
        return redacted(printable(value))
    return value


class Pages:
    """The pages.

    Args:
        base: The path that leads to them.
        is_closing: Returns whether the server is to end.
    """

    def __init__(self, base: str, is_closing: Callable[[], bool]) -> None:
        self._base = base
        self._is_closing = is_closing
        self._briefs: dict[str, tuple[Hashable, dict[str, Any]]] = {}
        loader = PackageLoader("spottrain.varuna_manager.ui")
        env = Environment(
            loader=loader,
            autoescape=True,
            undefined=StrictUndefined,
            finalize=_shown,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        env.filters |= {"dollars": fmt.dollars, "duration": fmt.duration, "number": fmt.number}
        env.filters |= {"clock": fmt.clock, "utc": fmt.utc}
        env.globals |= {"base": base, "version": spottrain.__version__}
        self._env = env

    def routes(self) -> list[BaseRoute]:
        """Return what there is, by path."""
        return [
            Route("/", self._answering(self._overview)),
            Route("/changes", self._changes),
            Route("/jobs/{name}", self._answering(self._job)),
            Route("/jobs/{name}/logs", self._answering(self._logs)),
            Route("/jobs/{name}/charts", self._answering(self._charts)),
            Route("/jobs/{name}/explain/{about}", self._answering(self._explain)),
            Route("/jobs/{name}/do/{what}", self._answering(self._job_deed), methods=_BOTH),
            Route("/pools/{name}", self._answering(self._pool)),
            Route("/pools/{name}/do/limits", self._answering(self._pool_deed), methods=_BOTH),
            Route("/pools/{name}/do/{what}/{job}", self._answering(self._pool_deed), methods=_BOTH),
        ]

    # --- Answers --------------------------------------------------------------------------

    def _answering(self, page: Callable[[Request], Response]) -> Callable[[Request], Response]:
        """Return an endpoint that tells in words why there is no page."""

        def answer(request: Request) -> Response:
            try:
                return page(request)
            except SpottrainError as error:
                code = 404 if isinstance(error, ConfigError) else 409
                return self._page("error.html", code, title="error", why=str(error))
            except (sqlite3.Error, OSError) as error:
                why = trouble_of_machine(error) or f"{type(error).__name__}: {error}"
                return self._page("error.html", 500, title="error", why=why)

        return answer

    def _page(self, template: str, code: int = 200, **values: Any) -> HTMLResponse:
        text = self._env.get_template(template).render(values)
        return HTMLResponse(text.encode("utf-8", "replace"), code)

    async def _changes(self, request: Request) -> Response:
        stream = changes(request.query_params.get("of", ""), self._is_closing)
        return StreamingResponse(stream, media_type="text/event-stream")

    # --- Pages ----------------------------------------------------------------------------

    def _overview(self, request: Request) -> Response:
        jobs = [self._brief(job) for job in JobDir.all()]
        pools = [_read(pool, pool_status) for pool in PoolDir.all()]
        return self._page("overview.html", title="jobs", watch="", jobs=jobs, pools=pools)

    def _brief(self, job: JobDir) -> dict[str, Any]:
        """Return a job's line; it is read again once something has changed."""
        seen, key = fingerprint([job]), str(job.path)
        known = self._briefs.get(key)
        if known is None or known[0] != seen:
            known = self._briefs[key] = seen, _read(job, _row)
        return known[1]

    def _job(self, request: Request) -> Response:
        job = JobDir.find(request.path_params["name"])
        status = queries.status(job)
        report, state, history = queries.with_history(job, documents.report)
        with closing(Journal(job.journal, read_only=True)) as journal:
            messages = list(islice(chain.messages(journal), MAX_MESSAGES))
        return self._page(
            "job.html",
            title=job.name,
            watch=f"jobs/{job.name}",
            status=status,
            lines=list(tables.status_lines(status, messages[0].at_s if messages else None)),
            lanes=Markup(printable(lanes(scene_of(report, state, history)))),
            is_away=job.remote_manager_file.exists(),
            messages=messages,
            fleet=tables.fleet_rows(status),
            gpus=_gpu_rows(job),
            deeds=deeds.names(job),
            tables=list(history_tables(report)),
        )

    def _charts(self, request: Request) -> Response:
        job = JobDir.find(request.path_params["name"])
        scene = scene_of(*queries.with_history(job, documents.report))
        with closing(Measurements(job.measurements, read_only=True)) as measured:
            return JSONResponse(charts(scene, read_curves(measured)))

    def _explain(self, request: Request) -> Response:
        job = JobDir.find(request.path_params["name"])
        about = request.path_params["about"]
        document = explanation(job, None if about == "now" else about)
        return self._page("explain.html", title=f"{job.name}: why", watch="", document=document)

    def _logs(self, request: Request) -> Response:
        job = JobDir.find(request.path_params["name"])
        query = request.query_params
        vm, rank = query.get("vm") or None, query.get("rank") or ""
        if rank and not rank.isdigit():
            raise ConfigError(f"rank: must be a number: got {rank}")
        reader = LogReader(job, vm=vm, rank=int(rank) if rank else None)
        logs = []
        for new in reader.new_lines(is_last=True):
            if lines := deque(new, MAX_LINES):
                path = lines[-1][0].relative_to(job.path)
                logs.append((str(path), "\n".join(line for _, line in lines)))
        return self._page(
            "logs.html",
            title=f"{job.name}: logs",
            watch=f"logs/{job.name}",
            name=job.name,
            vms=vms_with_logs(job),
            vm=vm,
            rank=rank,
            logs=logs,
        )

    def _pool(self, request: Request) -> Response:
        pool = PoolDir.find(request.path_params["name"])
        document, changes = pool_status(pool), divisions(pool)
        return self._page(
            "pool.html",
            title=f"pool {pool.name}",
            watch=f"pools/{pool.name}",
            pool=document,
            lead=lead(document),
            pictures=Markup(printable(pictures(document, changes))),
            table=jobs_table(document, changes),
        )

    # --- Buttons --------------------------------------------------------------------------

    def _job_deed(self, request: Request) -> Response:
        job = JobDir.find(request.path_params["name"])
        deed = deeds.of_job(job, request.path_params["what"], request.query_params)
        return self._deed(request, deed, f"jobs/{quote(job.name)}")

    def _pool_deed(self, request: Request) -> Response:
        pool = PoolDir.find(request.path_params["name"])
        if job := request.path_params.get("job"):
            is_paused = request.path_params["what"] == "pause"
            deed = deeds.of_pools_job(pool, job, is_paused)
        else:
            deed = deeds.of_pool(pool, request.query_params)
        return self._deed(request, deed, f"pools/{quote(pool.name)}")

    def _deed(self, request: Request, deed: deeds.Deed, back: str) -> Response:
        """Show what a button does and costs; do it once that was confirmed."""
        back = f"{self._base}/{back}"
        if request.method == "POST" and deed.do is not None:
            deed.do()
            return RedirectResponse(back, 303)
        query = request.url.query
        return self._page("deed.html", title=deed.title, deed=deed, back=back, query=query)


def _read(folder: Any, view: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
    """Return a view of a job or pool; of one that cannot be read its name and why."""
    try:
        return view(folder)
    except (SpottrainError, sqlite3.Error, OSError) as error:
        return {"name": folder.name, "error": str(error)}


def _row(job: JobDir) -> dict[str, Any]:
    """Return what the list of jobs has of one."""
    status = queries.brief(job)
    return status | {
        "progress": tables.progress_line(status),
        "money": tables.money_line(status),
        "fleet": documents.fleet_line(status),
    }


def _gpu_rows(job: JobDir) -> RowsTable:
    """Return what the GPUs of a job's VMs do, if its manager runs to know it."""
    names = ("VM", "r:GPU", "r:busy", "r:memory used", "r:power", "r:temperature")
    uses = job.gpu_uses() if job.is_managed() else {}
    rows = [
        (
            vm_id,
            str(use.index),
            fmt.NOTHING if use.utilisation is None else f"{use.utilisation:.0%}",
            fmt.size(use.memory_used_bytes),
            fmt.NOTHING if use.power_w is None else f"{use.power_w:.0f} W",
            fmt.NOTHING if use.temperature_c is None else f"{use.temperature_c:.0f} °C",
        )
        for vm_id, gpus in uses.items()
        for use in gpus
    ]
    return RowsTable("GPUs", names, rows)
