"""What of vLLM's faults is the engine's death, and what is an answer to one line.

vLLM itself is a fake here: starting it takes half a minute, and it does not fail on demand.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import orjson
import pytest

from services.executor.engines.base import EngineDead, EngineRequest, EngineResponse
from services.executor.engines.vllm import api
from services.executor.engines.vllm.engine import VllmEngine
from services.executor.lines.retry import Again, judge
from services.kit.wire.endpoints import CHAT_COMPLETIONS

pytestmark = pytest.mark.unit


class EngineDeadError(Exception):
    """Fake of vLLM's."""


class ErrorResponse:
    """Fake of vLLM's."""

    def __init__(self, status: int, message: str) -> None:
        self._error = {"code": status, "message": message, "type": "x", "param": None}

    def model_dump(self, **_: object) -> dict[str, Any]:
        return {"error": self._error}


class FakeLlm:
    """Fake of AsyncLLM."""

    def __init__(self) -> None:
        self.errored = False
        self.hangs = asyncio.Event()
        self.model_config = SimpleNamespace(max_model_len=64)
        self.vllm_config = SimpleNamespace(
            scheduler_config=SimpleNamespace(max_num_seqs=2),
            parallel_config=SimpleNamespace(data_parallel_size=1),
        )

    def get_num_unfinished_requests(self) -> int:
        return 1

    def shutdown(self) -> None:
        pass


class Fake:
    """A started engine on a fake vLLM that answers each request as a test says."""

    def __init__(self, engine: VllmEngine, llm: FakeLlm) -> None:
        self.engine = engine
        self.llm = llm
        self.answer: Callable[[], Awaitable[Any]] = self._well

    async def _well(self) -> Any:
        return SimpleNamespace(model_dump=lambda **_: {"choices": [], "usage": {}})

    async def ask(self, name: int = 0) -> EngineResponse:
        body = orjson.dumps({"messages": []})
        request = EngineRequest(CHAT_COMPLETIONS, "m", body, f"{name:032x}", 1)
        return await self.engine.submit(request)

    def raises(self, error: BaseException, *, dead: bool = False) -> None:
        """Have each request raise `error`, the engine being `dead` by then."""

        async def fail() -> Any:
            self.llm.errored |= dead
            raise error

        self.answer = fail


@pytest.fixture
async def fake(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Fake]:
    llm = FakeLlm()
    engine = VllmEngine(model="/m", served_name="m")
    made = Fake(engine, llm)

    async def serve(*_: object) -> dict[str, api.Served]:
        async def call(_body: object) -> Any:
            return await made.answer()

        return {CHAT_COMPLETIONS: api.Served(lambda body: body, call)}

    names: dict[str, Any] = {
        "EngineDeadError": EngineDeadError,
        "ErrorResponse": ErrorResponse,
        "create_error_response": lambda error: ErrorResponse(500, str(error)),
        "current_platform": SimpleNamespace(is_cpu=lambda: True),
    }
    monkeypatch.setattr(api, "find", names.__getitem__)
    monkeypatch.setattr(api, "parse_arguments", lambda *_: None)
    monkeypatch.setattr(api, "make_llm", lambda *_: llm)
    monkeypatch.setattr(api, "serve", serve)
    await engine.start()
    yield made
    await engine.close()


async def test_an_engine_on_a_cpu_may_take_long_for_a_step(fake: Fake) -> None:
    assert fake.engine.stall_limit_seconds == 600


@pytest.mark.parametrize(
    ("error", "dead"),
    [
        (EngineDeadError("EngineCore encountered an issue."), False),
        # The core was killed, for want of memory: calls fail in whatever way they do.
        (RuntimeError("connection reset"), True),
        (MemoryError(), True),
    ],
)
async def test_what_the_engine_dies_of_is_no_lines_answer(
    fake: Fake, error: Exception, dead: bool
) -> None:
    waiting = asyncio.Event()
    fake.answer = waiting.wait
    first = asyncio.ensure_future(fake.ask(1))
    await asyncio.sleep(0)
    fake.raises(error, dead=dead)
    with pytest.raises(EngineDead):
        await fake.ask(2)
    # All that were in it hear of it, though their own calls say nothing.
    if not dead:
        with pytest.raises(EngineDead):
            await first
    first.cancel()


async def test_an_error_answer_of_a_dead_engine_is_no_lines_answer(fake: Fake) -> None:
    async def last_words() -> Any:
        fake.llm.errored = True
        return ErrorResponse(500, "CUDA out of memory. Tried to allocate 2.00 GiB.")

    fake.answer = last_words
    with pytest.raises(EngineDead):
        await fake.ask()


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("cannot allocate"),
        RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    ],
)
async def test_what_one_line_lacks_memory_for_is_tried_again_and_then_its_answer(
    fake: Fake, error: Exception
) -> None:
    fake.raises(error)
    response = await fake.ask()
    assert response.status == 500
    assert str(error) in orjson.loads(response.body)["error"]["message"]
    assert isinstance(judge(response, counted=0, retries=0, chance=0.5), Again)
    # The engine lives, and answers the next.
    fake.answer = fake._well
    assert (await fake.ask(1)).status == 200
    fake.engine.check_health()
