"""Tracing is off, and costs nothing, until the standard variables name an exporter."""

import os
import subprocess
import sys

import pytest

from services.kit.process import telemetry

pytestmark = pytest.mark.unit

STANDARD = "OTEL_"
ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
TRACES_ENDPOINT = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"


@pytest.fixture(autouse=True)
def _no_standard_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(STANDARD)]:
        monkeypatch.delenv(name)


def outcome(code: str) -> str:
    """Run code in a process of its own, as a provider is set once a process; returns its output."""
    done = subprocess.run(
        [sys.executable, "-c", "import sys\nfrom services.kit.process import telemetry\n" + code],
        capture_output=True,
        check=True,
        text=True,
    )
    return done.stdout.strip()


def test_it_is_off_by_default() -> None:
    assert not telemetry.enabled()


@pytest.mark.parametrize("name", [ENDPOINT, TRACES_ENDPOINT])
def test_an_endpoint_turns_it_on(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "http://127.0.0.1:4317")
    assert telemetry.enabled()


@pytest.mark.parametrize(
    ("name", "value"), [("OTEL_SDK_DISABLED", "true"), ("OTEL_TRACES_EXPORTER", "none")]
)
def test_the_standard_variables_turn_it_off_again(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(ENDPOINT, "http://127.0.0.1:4317")
    monkeypatch.setenv(name, value)
    assert not telemetry.enabled()


def test_off_no_exporter_is_loaded_and_no_span_is_recorded() -> None:
    assert outcome(
        "flush = telemetry.configure('plant')\n"
        "with telemetry.tracer.start_as_current_span('step') as span:\n"
        "    print(span.is_recording(), repr(telemetry.current_traceparent()))\n"
        "flush()\n"
        "print([name for name in sys.modules if 'otlp' in name])\n"
    ).splitlines() == ["False ''", "[]"]


def test_on_the_trace_goes_on_where_its_carrier_arrives() -> None:
    code = """
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
kept = InMemorySpanExporter()
flush = telemetry.configure('plant', kept)
with telemetry.tracer.start_as_current_span('here'):
    carried = {'traceparent': telemetry.current_traceparent()}
with telemetry.tracer.start_as_current_span('there', context=telemetry.context_of(carried)):
    pass
flush()
here, there = kept.get_finished_spans()
print(there.context.trace_id == here.context.trace_id, there.parent.span_id == here.context.span_id)
print(here.resource.attributes['service.name'])
"""
    assert outcome(code).splitlines() == ["True True", "nightshift-plant"]


def test_a_collector_that_does_not_answer_does_not_hold_up_the_end() -> None:
    code = """
import threading
from opentelemetry.sdk.trace.export import SpanExporter
asked = threading.Event()
class Silent(SpanExporter):
    def export(self, spans):
        asked.set()
        threading.Event().wait()
    def shutdown(self):
        threading.Event().wait()
telemetry.FLUSH_SECONDS = 0.1
flush = telemetry.configure('plant', Silent())
with telemetry.tracer.start_as_current_span('step'):
    pass
flush()
asked.wait()
print('ended')
"""
    # Whoever waits for it waits for ever.
    assert outcome(code) == "ended"
