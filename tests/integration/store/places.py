"""Places for blobs that tests write to."""

from collections.abc import AsyncIterator, Iterator

import pytest

from services.kit.wire.ids import uuid7_hex
from services.store.settings import StoreSettings
from tests.kit.s3_server import S3Server, s3_server

MIB = 1024 * 1024


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with s3_server(tmp_path_factory.mktemp("s3")) as server:
        yield server


def at_server(
    server: S3Server, monkeypatch: pytest.MonkeyPatch, port: int | None = None
) -> StoreSettings:
    """Empty the server's bucket and return the settings of a store that uses it."""
    server.fault(None)
    server.empty()
    for name, value in server.environment(port).items():
        monkeypatch.setenv(name, value)
    return StoreSettings(blobs_url=server.url)


def new_name(kind: str = "file") -> str:
    return f"default/{kind}/{uuid7_hex()}"


async def pieces(content: bytes, size: int = MIB) -> AsyncIterator[memoryview]:
    for start in range(0, len(content), size):
        yield memoryview(content)[start : start + size]
