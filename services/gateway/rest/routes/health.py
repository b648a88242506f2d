"""Is it alive, is it ready, what does it count, and what can be asked of it."""

from importlib.resources import files as package_files
from typing import Final

import prometheus_client
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import BaseRoute, Mount
from starlette.staticfiles import StaticFiles
from swagger_ui_bundle import swagger_ui_path

from services.gateway.callers import caller_address
from services.gateway.context import Context
from services.gateway.rest.envelope import JsonResponse
from services.gateway.rest.routes.resource import page
from services.gateway.settings import is_loopback
from services.kit.wire.errors import PermissionError_, UnavailableError

_PAGE: Final = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>Nightshift API</title>
<link rel="stylesheet" href="/docs/assets/swagger-ui.css">
</head>
<body>
<div id="api"></div>
<script src="/docs/assets/swagger-ui-bundle.js"></script>
<script>SwaggerUIBundle({url: "/openapi.yaml", dom_id: "#api", deepLinking: true})</script>
</body>
</html>
"""


class HealthRoutes:
    """Routes of operators rather than users."""

    def __init__(self, context: Context) -> None:
        """Judge readiness by `context`'s store."""
        self._context = context
        self._openapi = (package_files("services.gateway") / "openapi.yaml").read_bytes()

    def routes(self) -> list[BaseRoute]:
        """Return the routes."""
        pages = {
            "/healthz": self.live,
            "/readyz": self.ready,
            "/metrics": self.metrics,
            "/openapi.yaml": self.openapi,
            "/docs": self.docs,
        }
        return [
            *(route for path, handler in pages.items() for route in page(path, handler)),
            Mount("/docs/assets", StaticFiles(directory=str(swagger_ui_path))),
        ]

    async def live(self, _request: Request) -> Response:
        """Say that the process answers."""
        return JsonResponse({"status": "ok"})

    async def ready(self, _request: Request) -> Response:
        """Say whether batches can be taken: 503 unless the store takes work."""
        if self._context.watchers.draining.is_set():
            raise UnavailableError("This gateway is stopping; ask another one.", code="stopping")
        store = self._context.store
        if await store.is_serving():
            return JsonResponse({"status": "ready"})
        if await store.lacks_room_only():
            raise UnavailableError(
                "The store keeps what is left of its disk for batches that run; delete files, or "
                "give it a larger disk.",
                code="storage_reserve",
            )
        lacking = await store.lacking()
        if "database" in lacking:
            raise UnavailableError(
                "The store cannot write its database right now; its log says why (not_ready).",
                code="database_unavailable",
            )
        if "blobs" in lacking:
            raise UnavailableError(
                "The store cannot use its blob storage right now; its log says why (not_ready).",
                code="blobs_unavailable",
            )
        raise UnavailableError(
            "No store takes work right now: none answers, or it is starting or stopping. One that "
            "waits for its database says so in its log (database_awaited)."
        )

    async def metrics(self, request: Request) -> Response:
        """Return what Prometheus scrapes, from this machine only once there are keys."""
        self._context.sites.check(request)
        # A proxy on this machine passes on what others ask.
        is_passed_on = "x-forwarded-for" in request.headers
        here = is_loopback(caller_address(request.scope)) and not is_passed_on
        if not here and await self._context.auth.keys_needed():
            raise PermissionError_(
                "Metrics are served to this machine only. (HINT: "
                "NIGHTSHIFT_GATEWAY_METRICS_LISTEN names an address for Prometheus.)"
            )
        return Response(
            prometheus_client.generate_latest(),
            headers={"content-type": prometheus_client.CONTENT_TYPE_LATEST},
        )

    async def openapi(self, _request: Request) -> Response:
        """Return the description of this API."""
        return Response(self._openapi, media_type="application/yaml")

    async def docs(self, _request: Request) -> Response:
        """Show that description; all of the page comes from here."""
        return HTMLResponse(_PAGE)
