"""Calls end at the deadline of their policy: not before, and not after."""

import asyncio

import grpc
import pytest

from protos.nightshift.v1 import work_pb2, work_pb2_grpc
from services.kit.calls import rpc

pytestmark = pytest.mark.integration


class Silent(work_pb2_grpc.WorkServicer):
    """Never answers."""

    async def Resign(
        self, request: work_pb2.ResignRequest, context: grpc.aio.ServicerContext
    ) -> work_pb2.ResignResponse:
        await asyncio.Event().wait()
        return work_pb2.ResignResponse()


async def test_a_call_without_an_answer_ends_at_its_policys_deadline() -> None:
    server = await rpc.start_server(
        "127.0.0.1:0",
        [
            rpc.ServiceEntry(
                "nightshift.v1.Work", Silent(), work_pb2_grpc.add_WorkServicer_to_server
            )
        ],
        [],
    )
    policy = rpc.POLICIES["Work", "Resign"]
    assert policy.timeout_seconds is not None
    loop = asyncio.get_running_loop()
    async with rpc.open_channel(f"127.0.0.1:{server.port}") as channel:
        began = loop.time()
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await work_pb2_grpc.WorkStub(channel).Resign(work_pb2.ResignRequest())
        took = loop.time() - began
    await server.server.stop(0)
    assert failure.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    assert policy.timeout_seconds * 0.95 < took < policy.timeout_seconds + 3
