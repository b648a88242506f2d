"""The health probe of containers, run as they run it, against a real server."""

import asyncio
import sys

import pytest

from services.kit.calls import rpc
from services.kit.calls.interceptors import SecretInterceptor
from tests.kit.eventually import eventually

pytestmark = pytest.mark.integration


async def probe(*arguments: str) -> tuple[int, str]:
    """Run the probe; returns its exit status and what it said."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "services.kit.calls.probe", *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    output, said = await process.communicate()
    assert process.returncode is not None
    assert output == b""
    return process.returncode, said.decode()


async def test_it_tells_whether_a_service_takes_work() -> None:
    server = await rpc.start_server("127.0.0.1:0", [], [SecretInterceptor("not told to probes")])
    target = f"127.0.0.1:{server.port}"
    try:
        assert await probe(target) == (0, "")
        await server.set_ready(False)
        assert await probe(target) == (1, f"{target} takes no work right now\n")
        server.set_needs({"database": True, "blobs": False})
        told = (1, f"{target} takes no work right now: blobs cannot be used, its log says why\n")

        async def says_what_it_lacks() -> bool:
            return await probe(target) == told

        # It asks for that with little patience.
        await eventually(says_what_it_lacks, within_seconds=30)
        await server.set_ready(True)
        assert (await probe(target))[0] == 0
    finally:
        await server.drain(0)
    assert (await probe(target))[0] == 1


async def test_it_imports_no_more_than_grpc() -> None:
    """Each container runs one every few seconds."""
    code = (
        "import sys, services.kit.calls.probe\n"
        "print(sorted(each for each in sys.modules if each.startswith('services.kit.')))\n"
        "print({'numpy', 'rich', 'pydantic', 'structlog', 'opentelemetry'} & set(sys.modules))"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE
    )
    output, _ = await process.communicate()
    seen = ("calls", "calls.probe", "process", "process.addresses")
    assert output.decode().splitlines() == [
        str([f"services.kit.{one}" for one in seen]),
        "set()",
    ]


@pytest.mark.parametrize("arguments", [(), ("127.0.0.1:1", "127.0.0.1:2")])
async def test_it_wants_one_address(arguments: tuple[str, ...]) -> None:
    status, said = await probe(*arguments)
    assert (status, said[:6]) == (2, "usage:")


@pytest.mark.parametrize("junk", ["junk", "127.0.0.1:99999"])
async def test_what_is_no_address_is_said_so(junk: str) -> None:
    status, said = await probe(junk)
    assert status == 2
    assert said.startswith(f"{junk!r} is no address: ")
    assert "Traceback" not in said
