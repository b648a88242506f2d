"""A store that is told to stop: streams of executors end in order, at once."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from protos.nightshift.v1 import work_pb2
from services.kit.process.service import DRAIN_SECONDS
from services.kit.wire.frames import RESULT_RECORD
from tests.kit.store import running_store

pytestmark = pytest.mark.slow


async def test_an_open_stream_of_results_ends_in_order_when_the_store_drains(
    tmp_path: Path,
) -> None:
    async with running_store(tmp_path / "data") as client:
        more = asyncio.Event()

        async def nothing_yet() -> AsyncIterator[work_pb2.AppendResultsRequest]:
            # Of an attempt that nobody knows: what counts here is that the stream is open.
            record = np.array([(0, 0, 2, 0, 0, 0, 0, 0)], RESULT_RECORD).tobytes()
            yield work_pb2.AppendResultsRequest(
                token="none", frame=1, records=record, payload=b"x\n"
            )
            await more.wait()

        call = client.work.AppendResults(nothing_yet(), metadata=client.metadata)
        answer: Any = await call.read()
        assert answer.frame == 1
        began = time.monotonic()
        stopping = asyncio.create_task(asyncio.to_thread(client.store.stop))
        assert await call.read() is grpc.aio.EOF
        assert await call.code() is grpc.StatusCode.OK
        assert await stopping == 0
        # Its grace is for those who have something to finish.
        assert time.monotonic() - began < DRAIN_SECONDS
        more.set()
