"""Tracing by OpenTelemetry: on when the standard environment variables name an exporter.

Off, every span is the API's no-op and costs nothing worth measuring. W3C trace context travels in
gRPC metadata, in NATS headers and in the batch's row, so that a batch is one trace.
"""

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from opentelemetry import context, propagate, trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter

_ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")

FLUSH_SECONDS: Final = 2.0
"""What is left to export gets this long at the end: who collects it may be away."""

tracer: Final = trace.get_tracer("nightshift")
"""Spans of our own steps; a no-op until `configure` finds an exporter."""


def enabled() -> bool:
    """Tell whether the standard variables ask for traces to be exported."""
    if os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return False
    if os.environ.get("OTEL_TRACES_EXPORTER", "otlp") == "none":
        return False
    return any(os.environ.get(name) for name in _ENDPOINTS)


def configure(service: str, exporter: SpanExporter | None = None) -> Callable[[], None]:
    """Export spans if the environment says where to, or to `exporter`; return what flushes them.

    That is called at the end of the process, and gives up after `FLUSH_SECONDS`.
    """
    if exporter is None:
        if not enabled():
            return lambda: None
        # Imported late: it is a large module that most processes never need.
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

        exporter = OTLPSpanExporter()
    provider = TracerProvider(
        resource=Resource.create({"service.name": f"nightshift-{service}"}),
        # At exit it would wait for as long as it does by itself.
        shutdown_on_exit=False,
    )
    provider.add_span_processor(BatchSpanProcessor(exporter))
    trace.set_tracer_provider(provider)

    def flush() -> None:
        # In a thread: a collector that does not answer holds it up for up to half a minute.
        last = threading.Thread(target=provider.shutdown, name="flush-traces", daemon=True)
        last.start()
        last.join(FLUSH_SECONDS)

    return flush


def current_traceparent() -> str:
    """Return the W3C `traceparent` of the current span; empty when there is none."""
    carrier: dict[str, str] = {}
    propagate.inject(carrier)
    return carrier.get("traceparent", "")


@contextlib.contextmanager
def span_of(name: str, traceparent: str, **attributes: str) -> Iterator[trace.Span]:
    """Make what is done inside one step of the trace that `traceparent` names.

    Empty means that the batch is not traced: the span is then one that records nothing.
    """
    if not traceparent:
        yield trace.INVALID_SPAN
        return
    context = context_of({"traceparent": traceparent})
    with tracer.start_as_current_span(name, context=context, attributes=attributes) as span:
        yield span


def context_of(carrier: Mapping[str, str]) -> context.Context:
    """Return the context that a carrier's `traceparent` names."""
    return propagate.extract(carrier)
