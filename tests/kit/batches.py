"""Batches through the official client: lines to send, waiting for ends, accounts that must balance.

The accounts hold for every batch that has ended, whatever happened on the way: each input line
stands exactly once, in one of two files in the order of the input, and the counts equal the files.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, Final

import openai
from openai import AsyncOpenAI
from openai.types import Batch

from tests.kit.eventually import eventually

CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"
EMBEDDINGS: Final = "/v1/embeddings"
RESPONSES: Final = "/v1/responses"
SCORE: Final = "/v1/score"
RERANK: Final = "/v1/rerank"

ENDED: Final = frozenset({"completed", "failed", "expired", "cancelled"})

POLL_SECONDS: Final = 0.05
"""Each poll takes some of the processor from what is waited for."""

Json = dict[str, Any]

_RAN: Final = ("request_timeout", "engine_failure", "result_too_large")
"""Codes of requests without an answer that count as failed."""

_FORWARD: Final = {
    "validating": {"in_progress", "failed", "cancelling", "expired"},
    "in_progress": {"finalizing", "cancelling", "expired"},
    "finalizing": {"completed", "expired", "cancelling"},
    "cancelling": {"cancelled"},
}
"""Where a status may lead; a poll may miss those between."""


def answer_to(text: str) -> str:
    """What the simulated engine answers to a text."""
    return "sim-" + sha256(text.encode()).hexdigest()[:16]


def request(custom_id: str, body: Json, url: str = CHAT) -> Json:
    """One line of an input file."""
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def chat(custom_id: str, text: str = "hello", model: str = "simulated", **fields: Any) -> Json:
    """One chat line; `fields` join its body."""
    messages = [{"role": "user", "content": text}]
    return request(custom_id, {"model": model, "messages": messages, **fields})


def chats(count: int, text: str = "line", **fields: Any) -> list[Json]:
    """Many chat lines, no two of them alike."""
    return [chat(f"r{number}", f"{text} {number}", **fields) for number in range(count)]


def ids(lines: Iterable[Json]) -> list[str]:
    """Their custom_ids, in order."""
    return [line["custom_id"] for line in lines]


def text_of(line: Json) -> str:
    """What a chat line asks."""
    return str(line["body"]["messages"][-1]["content"])


def jsonl(lines: Iterable[Json]) -> bytes:
    """The file of these lines, as raw UTF-8."""
    return b"".join(json.dumps(line, ensure_ascii=False).encode() + b"\n" for line in lines)


async def upload(client: AsyncOpenAI, data: bytes | Iterable[Json]) -> str:
    """Upload a batch input; return the file's id."""
    content = data if isinstance(data, bytes) else jsonl(data)
    return (await client.files.create(file=("in.jsonl", content), purpose="batch")).id


async def create(
    client: AsyncOpenAI, file_id: str, endpoint: str = CHAT, window: str = "24h", **fields: Any
) -> Batch:
    """Create a batch; windows other than the client knows are sent as they are."""
    return await client.batches.create(
        input_file_id=file_id,
        endpoint=endpoint,  # type: ignore[arg-type]
        completion_window=window,  # type: ignore[arg-type]
        **fields,
    )


async def submit(
    client: AsyncOpenAI,
    data: bytes | Iterable[Json],
    endpoint: str = CHAT,
    window: str = "24h",
    **fields: Any,
) -> Batch:
    """Upload lines and create a batch of them."""
    return await create(client, await upload(client, data), endpoint, window, **fields)


class Watch:
    """Polls one batch, and holds each answer against those before.

    Statuses move along the drawn transitions, stamps that are set stay, counts only grow.
    """

    def __init__(self, client: AsyncOpenAI, batch: Batch, *, through_faults: bool = False) -> None:
        """Begin with a batch as created.

        Args:
            client: asks for it.
            batch: its first state.
            through_faults: take a connection error or a 5xx for "ask again".
        """
        self._client = client
        self._through_faults = through_faults
        self.batch = batch

    @property
    def done(self) -> int:
        """Lines with a result, as last seen."""
        counts = self.batch.request_counts
        assert counts is not None
        return counts.completed + counts.failed

    @property
    def total(self) -> int:
        """Lines of the batch, as last seen; 0 until it is validated."""
        assert self.batch.request_counts is not None
        return self.batch.request_counts.total

    @property
    def ended(self) -> bool:
        """Whether it has ended, as last seen."""
        return self.batch.status in ENDED

    async def poll(self) -> Batch | None:
        """Ask once; None where nobody answered."""
        try:
            now = await self._client.batches.retrieve(self.batch.id)
        except (openai.APIConnectionError, openai.InternalServerError):
            if not self._through_faults:
                raise
            return None
        check_step(self.batch, now)
        self.batch = now
        return now

    async def half_way(self, within_seconds: float = 20) -> None:
        """Wait for a moment when some lines are done, and others are not."""
        await self.until(lambda: self.done > 0, within_seconds)
        assert 0 < self.done < self.total, self.batch

    async def until_status(self, *statuses: str, within_seconds: float = 20) -> Batch:
        """Wait for one of these statuses."""
        await self.until(lambda: self.batch.status in statuses, within_seconds)
        return self.batch

    async def until(self, condition: Any, within_seconds: float) -> None:
        """Poll until `condition()` holds or it has ended."""

        async def met() -> bool:
            return await self.poll() is not None and (condition() or self.ended)

        try:
            await eventually(met, within_seconds=within_seconds, every_seconds=POLL_SECONDS)
        except AssertionError as late:
            raise AssertionError(f"{late}; the batch: {self.batch}") from None
        assert condition(), f"it ended before: {self.batch}"

    async def end(self, within_seconds: float = 30) -> Batch:
        """Wait for its end."""
        await self.until(lambda: self.ended, within_seconds)
        return self.batch


def check_step(before: Batch, after: Batch) -> None:
    reachable = {before.status}
    fresh = set(reachable)
    while fresh:
        fresh = {to for status in fresh for to in _FORWARD.get(status, ())} - reachable
        reachable |= fresh
    assert after.status in reachable, f"{before.status} became {after.status}"
    old, new = before.to_dict(), after.to_dict()
    for name, value in old.items():
        if name.endswith(("_at", "_file_id")) and value is not None:
            assert new[name] == value, f"{name} was {value} and is {new[name]}"
    for name, value in old["request_counts"].items():  # type: ignore[attr-defined]
        assert new["request_counts"][name] >= value, (before, after)  # type: ignore[index]


async def ended(client: AsyncOpenAI, batch: Batch, within_seconds: float = 30) -> Batch:
    """Wait for a batch's end."""
    return await Watch(client, batch).end(within_seconds)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A batch that has ended, with its two files parsed."""

    batch: Batch
    output: list[Json] = field(default_factory=list)
    errors: list[Json] = field(default_factory=list)

    @property
    def counts(self) -> tuple[int, int, int]:
        """Total, completed, failed."""
        counts = self.batch.request_counts
        assert counts is not None
        return counts.total, counts.completed, counts.failed

    @property
    def codes(self) -> dict[str, str | int]:
        """What each line of the error file says: the code of one that never answered, else 4xx."""
        return {
            line["custom_id"]: line["error"]["code"]
            if line["error"]
            else line["response"]["status_code"]
            for line in self.errors
        }

    def answers(self) -> dict[str, str]:
        """The text of each answered chat line."""
        return {
            line["custom_id"]: line["response"]["body"]["choices"][0]["message"]["content"]
            for line in self.output
        }


async def outcome(client: AsyncOpenAI, batch: Batch, custom_ids: Iterable[str]) -> Outcome:
    """Read the files of a batch that has ended, and hold them against its input.

    Args:
        client: reads the files.
        batch: as it ended.
        custom_ids: of all lines of its input, in order.
    """
    files = []
    for file_id in (batch.output_file_id, batch.error_file_id):
        content = b"" if file_id is None else (await client.files.content(file_id)).content
        # A file with nothing in it is not made.
        assert (file_id is None) == (content == b"")
        files.append(parse(content))
    found = Outcome(batch=batch, output=files[0], errors=files[1])
    check_accounts(found, list(custom_ids))
    return found


async def run(
    client: AsyncOpenAI, lines: Sequence[Json], within_seconds: float = 30, **how: Any
) -> Outcome:
    """Submit lines, wait for the end, read the files and check their accounts."""
    batch = await ended(client, await submit(client, lines, **how), within_seconds)
    return await outcome(client, batch, ids(lines))


def parse(content: bytes) -> list[Json]:
    """Read a result file: strict JSON, one object a line, whichever way lines are told apart."""
    assert content == b"" or content.endswith(b"\n")
    lines = content.decode().split("\n")[:-1]
    assert lines == content.decode().splitlines()
    return [json.loads(line, parse_constant=_no_constant) for line in lines]


def _no_constant(name: str) -> None:
    raise AssertionError(f"{name} is no JSON")


def check_accounts(found: Outcome, custom_ids: Sequence[str]) -> None:
    """Each input line stands once, in order, in the right shape; counts and usage agree."""
    batch = found.batch
    output_ids = [line["custom_id"] for line in found.output]
    error_ids = [line["custom_id"] for line in found.errors]
    in_output, in_errors = set(output_ids), set(error_ids)
    assert len(in_output) + len(in_errors) == len(output_ids) + len(error_ids), "a line twice"
    assert output_ids == [each for each in custom_ids if each in in_output]
    assert error_ids == [each for each in custom_ids if each in in_errors]
    assert in_output | in_errors == set(custom_ids)
    assert not in_output & in_errors
    for line in found.output:
        _check_response(line)
        assert line["response"]["status_code"] == 200
        assert line["error"] is None
    ran = 0
    for line in found.errors:
        if line["response"] is None:
            assert line.keys() == {"id", "custom_id", "response", "error"}
            assert line["error"].keys() == {"code", "message"}
            assert line["error"]["message"]
            ran += line["error"]["code"] in _RAN
        else:
            _check_response(line)
            assert line["error"] is None
            assert 400 <= line["response"]["status_code"] < 600
            assert line["response"]["body"]["error"].keys() == {"message", "type", "param", "code"}
            ran += 1
    lines = [*found.output, *found.errors]
    assert all(line["id"].startswith("batch_req_") for line in lines)
    assert len({line["id"] for line in lines}) == len(lines)
    assert found.counts == (len(custom_ids), len(output_ids), ran)
    if batch.status == "completed":
        assert ran == len(error_ids)
    _check_usage(found)


def _check_response(line: Json) -> None:
    assert line.keys() == {"id", "custom_id", "response", "error"}
    assert line["response"].keys() == {"status_code", "request_id", "body"}
    assert line["response"]["request_id"]


def _check_usage(found: Outcome) -> None:
    usages = [line["response"]["body"].get("usage") or {} for line in found.output]
    usage = found.batch.usage
    assert usage is not None
    # The newest endpoint has names of its own.
    taken = [each.get("prompt_tokens", each.get("input_tokens")) for each in usages]
    given = [each.get("completion_tokens", each.get("output_tokens", 0)) for each in usages]
    assert usage.input_tokens == sum(taken)
    assert usage.output_tokens == sum(given)
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens


def check_answers(found: Outcome, lines: Sequence[Json]) -> None:
    """Every answered chat line has the answer that is its own."""
    texts = {line["custom_id"]: text_of(line) for line in lines}
    for custom_id, content in found.answers().items():
        assert content == answer_to(texts[custom_id]), custom_id
