"""A project's quota, as official clients meet it."""

import subprocess
import sys

import httpx2
import openai
import pytest
from openai import AsyncOpenAI

from tests.kit.up import RunningUp

pytestmark = [pytest.mark.contract, pytest.mark.asyncio(loop_scope="module")]


def set_quota(system: RunningUp, size: str) -> str:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "services.cli.main", "projects", "set-quota"),
            *("default", size, "--data", str(system.data)),
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


async def test_what_is_too_much_is_refused_once_and_says_what_to_do(
    system: RunningUp, openai_client: AsyncOpenAI
) -> None:
    sent: list[str] = []

    async def note(request: httpx2.Request) -> None:
        sent.append(request.url.path)

    said = set_quota(system, "1")
    try:
        async with httpx2.AsyncClient(event_hooks={"request": [note]}) as http:
            client = openai_client.with_options(http_client=http)
            with pytest.raises(openai.BadRequestError) as error:
                await client.files.create(file=("big", b"x" * 3_000_000), purpose="user_data")
            assert error.value.code == "storage_quota_exceeded"
            assert error.value.param == "file"
            assert "quota of 1 bytes" in error.value.message
            assert "set-quota" in error.value.message
            # It cannot help to send it again, and the client does not.
            assert len(sent) == 1
            with pytest.raises(openai.BadRequestError) as error:
                await client.uploads.create(
                    purpose="batch", filename="f", bytes=1_000, mime_type="application/jsonl"
                )
            assert error.value.param == "bytes"
            assert len(sent) == 2
    finally:
        set_quota(system, "default")
    assert said.startswith("default: 1 bytes, ")
    file = await openai_client.files.create(file=("big", b"x" * 3_000_000), purpose="user_data")
    await openai_client.files.delete(file.id)
