"""One trace a batch: from the REST call that creates it to the last file, over every service."""

from collections.abc import Iterator
from concurrent import futures
from pathlib import Path

import grpc
import openai
import pytest
from opentelemetry.proto.collector.trace.v1 import (
    trace_service_pb2,
    trace_service_pb2_grpc,
)

from tests.kit.store import chat_line
from tests.kit.up import SIMULATED, running_up, wait_until

pytestmark = [pytest.mark.integration, pytest.mark.slow]

Spans = set[tuple[str, str, str]]


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Remembers (trace, service, span) of all that it is sent."""

    def __init__(self) -> None:
        self.spans: Spans = set()

    def Export(
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        for resource in request.resource_spans:
            names = {each.key: each.value.string_value for each in resource.resource.attributes}
            self.spans |= {
                (span.trace_id.hex(), names["service.name"], span.name)
                for scope in resource.scope_spans
                for span in scope.spans
            }
        return trace_service_pb2.ExportTraceServiceResponse()


@pytest.fixture
def collector() -> Iterator[tuple[Collector, str]]:
    servicer = Collector()
    server = grpc.server(futures.ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield servicer, f"http://127.0.0.1:{port}"
    server.stop(None)


def test_a_batch_is_one_trace_over_every_service(
    tmp_path: Path, collector: tuple[Collector, str]
) -> None:
    servicer, endpoint = collector
    traced = {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, "OTEL_BSP_SCHEDULE_DELAY": "50"}
    with running_up(tmp_path / "data", SIMULATED, traced) as system:
        client = openai.OpenAI(base_url=system.base_url, api_key="none")
        file = client.files.create(file=("input.jsonl", chat_line("r1")), purpose="batch")
        trace_id = "4bf92f3577b34da6a3ce929d0e0e4736"
        batch = client.batches.create(
            input_file_id=file.id,
            endpoint="/v1/chat/completions",
            completion_window="24h",
            extra_headers={"traceparent": f"00-{trace_id}-00f067aa0ba902b7-01"},
        )
        wait_until(lambda: client.batches.retrieve(batch.id).status == "completed")

        expected = {
            ("nightshift-store", "nightshift.v1.Batches/CreateBatch"),
            ("nightshift-store", "validate"),
            ("nightshift-scheduler", "publish"),
            ("nightshift-executor", "run chunk"),
            ("nightshift-store", "nightshift.v1.Work/OpenAttempt"),
            ("nightshift-store", "nightshift.v1.Work/ReadLines"),
            ("nightshift-store", "finalize"),
        }

        def of_the_batch() -> set[tuple[str, str]]:
            return {(service, name) for trace, service, name in servicer.spans if trace == trace_id}

        wait_until(lambda: expected <= of_the_batch(), what=f"{expected} in the batch's trace")
        assert any(service == "nightshift-gateway" for service, _ in of_the_batch())
