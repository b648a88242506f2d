"""A true gRPC server whose handlers raise what a test tells them to, in all four shapes."""

from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc

from protos.nightshift.v1 import (
    batches_pb2,
    batches_pb2_grpc,
    files_pb2,
    files_pb2_grpc,
    work_pb2,
    work_pb2_grpc,
)
from services.kit.calls import rpc
from tests.kit.streams import all_told, told

Context = Any


class Raising(
    batches_pb2_grpc.BatchesServicer, files_pb2_grpc.FilesServicer, work_pb2_grpc.WorkServicer
):
    """Answers, or raises what `fault` holds; counts its calls by method."""

    def __init__(self) -> None:
        self.fault: Exception | None = None
        self.faults_left = -1
        """Calls that still fail; -1 is all of them."""
        self.answers_first = False
        """Whether a stream gives one answer before it fails."""
        self.calls: dict[str, int] = {}

    def _turn(self, method: str) -> None:
        self.calls[method] = self.calls.get(method, 0) + 1
        if self.fault is not None and self.faults_left != 0:
            self.faults_left -= 1
            raise self.fault

    async def GetBatch(
        self, request: batches_pb2.GetBatchRequest, context: Context
    ) -> batches_pb2.GetBatchResponse:
        self._turn("GetBatch")
        return batches_pb2.GetBatchResponse()

    async def CreateBatch(
        self, request: batches_pb2.CreateBatchRequest, context: Context
    ) -> batches_pb2.CreateBatchResponse:
        self._turn("CreateBatch")
        return batches_pb2.CreateBatchResponse()

    async def ReadFile(
        self, request: files_pb2.ReadFileRequest, context: Context
    ) -> AsyncIterator[files_pb2.ReadFileResponse]:
        if self.answers_first:
            yield files_pb2.ReadFileResponse()
        self._turn("ReadFile")

    async def UploadFile(
        self, request: AsyncIterator[files_pb2.UploadFileRequest], context: Context
    ) -> files_pb2.UploadFileResponse:
        async for _ in request:
            pass
        self._turn("UploadFile")
        return files_pb2.UploadFileResponse()

    async def AppendResults(
        self, request: AsyncIterator[work_pb2.AppendResultsRequest], context: Context
    ) -> AsyncIterator[work_pb2.AppendResultsResponse]:
        async for _ in request:
            if self.answers_first:
                yield work_pb2.AppendResultsResponse()
        self._turn("AppendResults")


async def start(
    servicer: Raising,
    interceptors: Sequence[grpc.aio.ServerInterceptor],
    listen: str = "127.0.0.1:0",
) -> rpc.RunningServer:
    """Serve it on a free port, or on `listen`."""
    adders = {
        "Batches": batches_pb2_grpc.add_BatchesServicer_to_server,
        "Files": files_pb2_grpc.add_FilesServicer_to_server,
        "Work": work_pb2_grpc.add_WorkServicer_to_server,
    }
    entries = [
        rpc.ServiceEntry(f"nightshift.v1.{name}", servicer, add) for name, add in adders.items()
    ]
    return await rpc.start_server(listen, entries, interceptors)


async def _one_of_each(request: Any) -> AsyncIterator[Any]:
    yield request


async def unary(channel: grpc.aio.Channel, metadata: Any = None) -> None:
    """Call with one message each way, in a call that is never repeated."""
    stub = batches_pb2_grpc.BatchesStub(channel)
    await stub.CreateBatch(batches_pb2.CreateBatchRequest(), metadata=metadata)


async def repeatable(channel: grpc.aio.Channel) -> None:
    """Call with one message each way, in a call that may be repeated."""
    await batches_pb2_grpc.BatchesStub(channel).GetBatch(batches_pb2.GetBatchRequest())


async def answers_stream(channel: grpc.aio.Channel, metadata: Any = None) -> None:
    """Call with a stream of answers."""
    stub = files_pb2_grpc.FilesStub(channel)
    async for _ in stub.ReadFile(files_pb2.ReadFileRequest(), metadata=metadata):
        pass


async def requests_stream(channel: grpc.aio.Channel, metadata: Any = None) -> None:
    """Call with a stream of requests."""
    stub = files_pb2_grpc.FilesStub(channel)
    await told(stub.UploadFile(_one_of_each(files_pb2.UploadFileRequest()), metadata=metadata))


async def both_stream(channel: grpc.aio.Channel, metadata: Any = None) -> None:
    """Call with streams both ways."""
    stub = work_pb2_grpc.WorkStub(channel)
    requests = _one_of_each(work_pb2.AppendResultsRequest())
    async for _ in all_told(stub.AppendResults(requests, metadata=metadata)):
        pass


SHAPES = [unary, answers_stream, requests_stream, both_stream]
