"""Models, as the official client sees them."""

import openai
import pytest
from openai import AsyncOpenAI

from protos.nightshift.v1 import models_pb2
from services.kit.wire.errors import NotFoundError
from tests.kit.public_store import CREATED_AT, ScriptedStore

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_models(client: AsyncOpenAI, store: ScriptedStore) -> None:
    names = ["meta/llama-3", "simulated"]
    models = [models_pb2.Model(id=name, created_at=CREATED_AT) for name in names]
    store.script("ListModels", models_pb2.ListModelsResponse(models=models))
    store.script("GetModel", models_pb2.GetModelResponse(model=models[0]))
    assert [model.id async for model in client.models.list()] == names
    one = await client.models.retrieve("meta/llama-3")
    assert one.to_dict() == {
        "id": "meta/llama-3",
        "object": "model",
        "created": CREATED_AT,
        "owned_by": "nightshift",
        "shutdown_date": None,
    }
    assert store.requests("GetModel")[0].model_id == "meta/llama-3"


async def test_unknown_model(client: AsyncOpenAI, store: ScriptedStore) -> None:
    unknown = NotFoundError("The model 'x' does not exist.", code="model_not_found", param="model")
    store.script("GetModel", unknown)
    with pytest.raises(openai.NotFoundError) as caught:
        await client.models.retrieve("x")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
