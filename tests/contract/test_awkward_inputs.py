"""Files that users stumble over, each through the whole system to the outcome that it must have."""

import openai
import pytest
from openai import AsyncOpenAI

from tests.contract.input_kinds import Completes, Fails, Input, Refused
from tests.contract.inputs import INPUTS
from tests.kit.batches import answer_to, chats, create, ended, outcome, run, upload

pytestmark = [pytest.mark.contract, pytest.mark.asyncio(loop_scope="module")]


def _having(kind: type) -> list[pytest.param]:  # type: ignore[valid-type]
    return [pytest.param(each, id=each.name) for each in INPUTS if isinstance(each.outcome, kind)]


async def _files(client: AsyncOpenAI) -> list[str]:
    # Inputs only: batches of earlier tests may still make files of results.
    listed = await client.files.list(purpose="batch", limit=10_000)
    return [file.id for file in listed.data]


# contract: 43, 50, 51
@pytest.mark.parametrize("given", _having(Completes))
async def test_runs(openai_client: AsyncOpenAI, given: Input) -> None:
    expected = given.outcome
    assert isinstance(expected, Completes)
    client = openai_client
    batch = await ended(client, await create(client, await upload(client, given.content())))
    assert batch.status == "completed", batch.errors
    found = await outcome(client, batch, expected.lines)
    assert found.answers() == {
        custom_id: answer_to(asked)
        for custom_id, asked in expected.lines.items()
        if asked is not None
    }
    assert set(found.codes.values()) <= {400}


# contract: 12, 39, 40, 41, 42, 44, 45, 46, 47, 48, 49, 53
@pytest.mark.parametrize("given", _having(Fails))
async def test_fails_and_says_where(openai_client: AsyncOpenAI, given: Input) -> None:
    expected = given.outcome
    assert isinstance(expected, Fails)
    client = openai_client
    batch = await create(client, await upload(client, given.content()))
    assert batch.status == "validating"
    done = await ended(client, batch, within_seconds=10)
    assert done.status == "failed"
    assert done.failed_at is not None
    assert done.in_progress_at is None
    assert done.output_file_id is done.error_file_id is None
    assert done.request_counts is not None
    assert done.request_counts.to_dict() == {"total": 0, "completed": 0, "failed": 0}
    assert done.errors is not None
    assert done.errors.object == "list"
    errors = done.errors.data or []
    assert tuple((each.line, each.code, each.param) for each in errors) == expected.faults
    assert expected.says in (errors[0].message or "")
    for error in errors:
        assert error.message
        assert "Traceback" not in error.message
        assert "/tmp" not in error.message


# contract: 11, 12
@pytest.mark.parametrize("given", _having(Refused))
async def test_refused_at_upload(openai_client: AsyncOpenAI, given: Input) -> None:
    expected = given.outcome
    assert isinstance(expected, Refused)
    before = await _files(openai_client)
    with pytest.raises(openai.BadRequestError) as caught:
        await upload(openai_client, given.content())
    assert expected.says.lower() in str(caught.value).lower()
    assert caught.value.type == "invalid_request_error"
    assert await _files(openai_client) == before


@pytest.mark.parametrize(
    "escape", ["\\ud83d", "\\ude00", "\\ude00\\ud83d"], ids=["high", "low", "reversed"]
)
async def test_a_lone_surrogate_is_named_or_its_line_refused(
    openai_client: AsyncOpenAI, escape: str
) -> None:
    client = openai_client
    lines = chats(3)
    data = "\n".join(
        f'{{"custom_id":"{line["custom_id"]}","method":"POST","url":"{line["url"]}","body":'
        f'{{"model":"simulated","messages":[{{"role":"user","content":"x {extra}"}}]}}}}'
        for line, extra in zip(lines, ["", escape, ""], strict=True)
    ).encode()
    batch = await ended(client, await create(client, await upload(client, data)))
    if batch.status == "failed":
        assert batch.errors is not None
        assert [error.line for error in batch.errors.data or []] == [2]
        return
    assert batch.status == "completed"
    assert batch.request_counts is not None
    assert (batch.request_counts.completed, batch.request_counts.failed) == (2, 1)


async def test_all_faults_are_listed_up_to_a_bound(openai_client: AsyncOpenAI) -> None:
    client = openai_client
    data = b"{}\n" * 150
    done = await ended(client, await create(client, await upload(client, data)))
    assert done.status == "failed"
    assert done.errors is not None
    errors = done.errors.data or []
    assert 100 <= len(errors) <= 101
    assert [error.line for error in errors[:8]] == sorted(error.line or 0 for error in errors[:8])
    assert "more" in (errors[-1].message or "")


async def test_another_url_than_an_endpoint_is_refused(openai_client: AsyncOpenAI) -> None:
    file_id = await upload(openai_client, chats(1))
    for endpoint in ("/v1/nothing", "", "https://x.example/v1/chat/completions"):
        with pytest.raises(openai.BadRequestError) as caught:
            await create(openai_client, file_id, endpoint)
        assert caught.value.param == "endpoint"


async def test_bad_inputs_leave_the_system_as_it_was(openai_client: AsyncOpenAI) -> None:
    # Ran last: nothing that came before has hurt an executor, or left a batch that never ends.
    found = await run(openai_client, chats(100), within_seconds=10)
    assert found.counts == (100, 100, 0)
    listed = [batch async for batch in openai_client.batches.list(limit=100)]
    assert {batch.status for batch in listed} <= {"completed", "failed", "expired", "cancelled"}
