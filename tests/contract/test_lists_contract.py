"""Lists of batches, numbers 37 and 86 to 90 of the contract; two projects on a system with keys."""

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from typing import Any, Final

import httpx2
import openai
import pytest
import pytest_asyncio
from openai import AsyncOpenAI

from tests.contract.test_files_contract import error_of
from tests.kit.batches import chats, create, ended, upload
from tests.kit.up import RunningUp, running_up

pytestmark = [pytest.mark.contract, pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]

PATH: Final = "/v1/batches"


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningUp]:
    """Run a system of its own, since one key closes it to all who have none."""
    with running_up(tmp_path_factory.mktemp("keyed") / "data") as running:
        yield running


def make_key(running: RunningUp, project: str) -> str:
    """Make a key as an operator does."""
    made = subprocess.run(
        [
            *(sys.executable, "-m", "services.cli.main", "keys", "create"),
            *("--project", project, "--data", str(running.data), "--json"),
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    return str(json.loads(made.stdout)["secret"])


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def ours(keyed: RunningUp) -> AsyncIterator[AsyncOpenAI]:
    """A client of one project."""
    key = await asyncio.to_thread(make_key, keyed, "ours")
    async with AsyncOpenAI(base_url=keyed.base_url, api_key=key) as client:
        yield client


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def theirs(keyed: RunningUp) -> AsyncIterator[AsyncOpenAI]:
    """A client of another project."""
    key = await asyncio.to_thread(make_key, keyed, "theirs")
    async with AsyncOpenAI(base_url=keyed.base_url, api_key=key) as client:
        yield client


# contract: 89
async def test_an_empty_project(ours: AsyncOpenAI) -> None:
    for path in ("/batches", "/files"):
        answer: Any = await ours.get(path, cast_to=httpx2.Response)
        assert answer.json() == {
            "object": "list",
            "data": [],
            "first_id": None,
            "last_id": None,
            "has_more": False,
        }
    assert [batch async for batch in ours.batches.list()] == []


# contract: 86, 87, 88
async def test_pages_of_batches(ours: AsyncOpenAI) -> None:
    file_id = await upload(ours, chats(1))
    made = [(await create(ours, file_id)).id for _ in range(5)][::-1]

    pages = []
    query: dict[str, Any] = {"limit": 2}
    while True:
        answer: Any = await ours.get("/batches", cast_to=httpx2.Response, options={"params": query})
        page = answer.json()
        assert page["first_id"] == page["data"][0]["id"]
        assert page["last_id"] == page["data"][-1]["id"]
        pages.append([batch["id"] for batch in page["data"]])
        if not page["has_more"]:
            break
        query["after"] = page["last_id"]
    assert pages == [made[0:2], made[2:4], made[4:5]]

    exact = await ours.batches.list(limit=5)
    assert (len(exact.data), exact.has_more) == (5, False)

    made = [(await create(ours, file_id)).id for _ in range(17)][::-1] + made
    by_default = await ours.batches.list()
    assert [batch.id for batch in by_default.data] == made[:20]
    assert by_default.has_more
    assert [batch.id for batch in (await ours.batches.list(limit=100)).data] == made
    assert [batch.id async for batch in ours.batches.list(limit=3)] == made
    for limit, code in ((0, "integer_below_min_value"), (101, "integer_above_max_value")):
        with pytest.raises(openai.BadRequestError) as caught:
            await ours.batches.list(limit=limit)
        assert (caught.value.code, caught.value.param) == (code, "limit")
    for batch_id in made:
        assert (await ended(ours, await ours.batches.retrieve(batch_id))).status == "completed"


# contract: 37, 90
async def test_another_projects_objects_are_unknown(ours: AsyncOpenAI, theirs: AsyncOpenAI) -> None:
    file_id = await upload(ours, chats(1))
    batch = await ended(ours, await create(ours, file_id))

    assert [each.id async for each in theirs.batches.list()] == []
    assert [each.id async for each in theirs.files.list()] == []
    for ask, wanted in (
        (theirs.batches.retrieve, batch.id),
        (theirs.batches.cancel, batch.id),
        (theirs.files.retrieve, file_id),
        (theirs.files.content, batch.output_file_id or ""),
        (theirs.files.delete, file_id),
    ):
        with pytest.raises(openai.NotFoundError) as caught:
            await ask(wanted)
        assert wanted in str(caught.value)
    for after in (batch.id, "batch_never_was"):
        with pytest.raises(openai.NotFoundError) as caught:
            await theirs.batches.list(after=after)
        assert caught.value.param == "after"
    with pytest.raises(openai.NotFoundError) as caught:
        await theirs.files.list(after=file_id)
    assert caught.value.param == "after"

    mine = await ended(theirs, await create(theirs, file_id))
    unknown = await ended(theirs, await create(theirs, "file-" + "0" * 32))
    assert mine.status == "failed"
    assert mine.errors is not None
    assert unknown.errors is not None
    [error] = mine.errors.data or []
    [other] = unknown.errors.data or []
    assert (error.code, error.line, error.param) == (other.code, other.line, other.param)
    assert (error.message or "").replace(file_id, "X") == (other.message or "").replace(
        "file-" + "0" * 32, "X"
    )
    assert (await ours.files.content(file_id)).content


async def test_who_shows_no_key_learns_nothing(keyed: RunningUp, ours: AsyncOpenAI) -> None:
    batch = (await ours.batches.list(limit=1)).data[0]
    async with httpx2.AsyncClient(base_url=keyed.url) as http:
        answers = [await http.get(f"{PATH}/{each}") for each in (batch.id, "batch_0")]
    errors = [error_of(answer, 401) for answer in answers]
    assert errors[0] == errors[1]
