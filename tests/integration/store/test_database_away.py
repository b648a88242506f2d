"""The database goes away under clients: each is told when to try again, and it all goes on."""

import asyncio
import signal
from pathlib import Path

import httpx
import pytest

from tests.kit.eventually import eventually
from tests.kit.nats_server import NatsServer
from tests.kit.postgres import Postgres
from tests.kit.service_processes import services
from tests.kit.store import chat_line

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(150)]

AWAY_SECONDS = 3.0
MOST_LINES_A_SECOND = 60
"""Of the store's log while it is away: each loop's turn and each client's call is a line or two."""


async def test_clients_are_told_and_work_goes_on_when_the_database_is_back(
    tmp_path: Path, nats_server: NatsServer, postgres: Postgres
) -> None:
    async with services(tmp_path / "fleet", nats_server.url) as fleet:
        store = fleet.store(DATABASE_URL=postgres.new_database())
        gateway = fleet.gateway("gateway")
        await fleet.start()
        async with httpx.AsyncClient(base_url=gateway.base_url, timeout=30) as client:
            file = await upload(client)
            assert file.status_code == 200
            asked = {"input_file_id": file.json()["id"], "endpoint": "/v1/chat/completions"}
            batch = (
                await client.post("/batches", json={**asked, "completion_window": "24h"})
            ).json()

            await asyncio.to_thread(postgres.stop, signal.SIGQUIT)
            try:
                lines = len(store.log(1 << 30).splitlines())
                began = asyncio.get_running_loop().time()
                while asyncio.get_running_loop().time() < began + AWAY_SECONDS:
                    for answer in (
                        await client.post("/batches", json={**asked, "completion_window": "24h"}),
                        await client.get(f"/batches/{batch['id']}"),
                        await upload(client),
                    ):
                        told_to_try_again(answer)
                took = asyncio.get_running_loop().time() - began
                assert len(store.log(1 << 30).splitlines()) - lines < MOST_LINES_A_SECOND * took
            finally:
                await asyncio.to_thread(postgres.start)

            async def made() -> str | None:
                answer = await client.post("/batches", json={**asked, "completion_window": "24h"})
                return answer.json()["id"] if answer.status_code == 200 else None

            again = await eventually(made, within_seconds=20, every_seconds=0.2)
            for batch_id in (batch["id"], again):
                await eventually(lambda each=batch_id: ended(client, each), within_seconds=20)
            assert store.process is not None
            assert store.process.poll() is None


async def upload(client: httpx.AsyncClient) -> httpx.Response:
    return await client.post(
        "/files",
        data={"purpose": "batch"},
        files={"file": ("in.jsonl", chat_line("r0", model="unknown"))},
    )


async def ended(client: httpx.AsyncClient, batch_id: str) -> bool:
    """Tell whether a batch was judged: its lines name a model that nobody has."""
    return (await client.get(f"/batches/{batch_id}")).json().get("status") == "failed"


def told_to_try_again(answer: httpx.Response) -> None:
    assert answer.status_code == 503, answer.text
    assert int(answer.headers["retry-after"]) >= 1
    error = answer.json()["error"]
    assert error["type"] == "server_error"
    assert "try again" in error["message"]
