"""A true gateway, both ports, before a scripted store. Started once, as its stop takes a while."""

from collections.abc import AsyncIterator

import grpc
import httpx2
import openai
import pytest_asyncio
from openai import AsyncOpenAI

from services.gateway.main import Listening, running
from services.gateway.settings import GatewaySettings
from services.kit.calls import rpc
from tests.kit.public_store import SECRET, ScriptedStore


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def one_store() -> AsyncIterator[ScriptedStore]:
    """The store of all tests."""
    scripted = ScriptedStore()
    await scripted.start()
    try:
        yield scripted
    finally:
        await scripted.stop()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def gateway(one_store: ScriptedStore) -> AsyncIterator[Listening]:
    """The gateway of all tests, on ports of its own."""
    settings = GatewaySettings(
        listen="127.0.0.1:0",
        grpc_listen="127.0.0.1:0",
        store=f"127.0.0.1:{one_store.port}",
        completion_windows="24h,10s",
    )
    async with running(settings, SECRET) as listening:
        yield listening


@pytest_asyncio.fixture(loop_scope="session")
async def store(one_store: ScriptedStore) -> AsyncIterator[ScriptedStore]:
    """The store, with nothing scripted; what a test scripts must be asked for."""
    one_store.forget()
    yield one_store
    assert one_store.left() == {}


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def one_http(gateway: Listening) -> AsyncIterator[httpx2.AsyncClient]:
    """A plain HTTP client that follows nothing."""
    base = f"http://127.0.0.1:{gateway.http_port}"
    async with httpx2.AsyncClient(base_url=base, timeout=20) as client:
        yield client


@pytest_asyncio.fixture(loop_scope="session")
async def http(one_http: httpx2.AsyncClient, store: ScriptedStore) -> httpx2.AsyncClient:
    """That client, before a store with nothing scripted."""
    return one_http


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def one_client(gateway: Listening) -> AsyncIterator[AsyncOpenAI]:
    """The official client, as a user makes it."""
    base = f"http://127.0.0.1:{gateway.http_port}/v1"
    async with openai.AsyncOpenAI(base_url=base, api_key="anything") as official:
        yield official


@pytest_asyncio.fixture(loop_scope="session")
async def client(one_client: AsyncOpenAI, store: ScriptedStore) -> AsyncOpenAI:
    """That client, before a store with nothing scripted."""
    return one_client


@pytest_asyncio.fixture(loop_scope="session")
async def channel(gateway: Listening, store: ScriptedStore) -> AsyncIterator[grpc.aio.Channel]:
    """A gRPC client's channel to the public port."""
    async with rpc.open_channel(f"127.0.0.1:{gateway.grpc_port}") as opened:
        yield opened
