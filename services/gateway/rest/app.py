"""The REST application: routes and middleware as lists, outermost first."""

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.routing import BaseRoute

from services.gateway.context import Context
from services.gateway.rest.middleware import ErrorMiddleware, RequestMiddleware, framework_error
from services.gateway.rest.routes.batches import BatchRoutes
from services.gateway.rest.routes.events import EventRoutes
from services.gateway.rest.routes.files import FileRoutes
from services.gateway.rest.routes.health import HealthRoutes
from services.gateway.rest.routes.models import ModelRoutes
from services.gateway.rest.routes.uploads import UploadRoutes
from services.gateway.rest.routes.usage import UsageRoutes
from services.gateway.rest.routes.webhooks import WebhookRoutes
from services.kit.process import telemetry


def routes(context: Context) -> list[BaseRoute]:
    """Return all that is served."""
    return [
        *FileRoutes(context).routes(),
        *UploadRoutes(context).routes(),
        *BatchRoutes(context).routes(),
        *EventRoutes(context).routes(),
        *ModelRoutes(context).routes(),
        *UsageRoutes(context).routes(),
        *WebhookRoutes(context).routes(),
        *HealthRoutes(context).routes(),
    ]


def middleware(context: Context) -> list[Middleware]:
    """Return what every request passes through."""
    return [
        *_tracing(),
        Middleware(RequestMiddleware, new_request_id=context.new_request_id),
        Middleware(ErrorMiddleware),
    ]


def _tracing() -> list[Middleware]:
    if not telemetry.enabled():
        return []
    # Imported late: only a process that exports traces needs it.
    from opentelemetry.instrumentation.asgi import OpenTelemetryMiddleware

    return [
        Middleware(
            OpenTelemetryMiddleware,
            exclude_spans=["receive", "send"],
            excluded_urls="healthz,readyz,metrics",
        )
    ]


def create_app(context: Context) -> Starlette:
    """Return the application; what it needs is acquired by the caller and outlives it."""
    app = Starlette(
        routes=routes(context),
        middleware=middleware(context),
        exception_handlers={HTTPException: framework_error},
    )
    # Each path is there with and without its last slash; a redirect would break an upload.
    app.router.redirect_slashes = False
    return app
