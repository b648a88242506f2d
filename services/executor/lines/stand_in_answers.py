"""What stands for an answer where an engine gives none."""

import asyncio
from collections.abc import Sequence
from typing import Final

from services.executor.engines.base import (
    Answer,
    Engine,
    EngineRequest,
    EngineResponse,
    RequestAborted,
    error_body,
    refusal,
)
from services.kit.process.log import get_logger

_log = get_logger(__name__)

UNREADABLE: Final = refusal("The line is not a request: it has no custom_id or no body.")
"""For a line that never reaches an engine; none such passes validation."""


def submitted(engine: Engine, requests: Sequence[EngineRequest]) -> Sequence[Answer]:
    """Submit; a request that the engine chokes on fails alone, and does not end the process."""
    if not requests:
        return []
    try:
        return engine.submit_many(requests)
    except Exception as error:  # noqa: BLE001 - an engine is foreign code
        _log.exception("engine_chokes", requests=len(requests))
        if len(requests) == 1:
            return [failure(error)]
    return [answer for one in requests for answer in submitted(engine, [one])]


def has_result(future: asyncio.Future[EngineResponse]) -> bool:
    """Tell whether a call ended with an answer, though nobody may have looked at it yet."""
    return future.done() and not future.cancelled() and future.exception() is None


def failure(error: BaseException | None) -> EngineResponse:
    """Return the answer for a call that ended without one: tried again, then an error line."""
    if error is not None and not isinstance(error, RequestAborted):
        _log.error("engine_call_failed", exc_info=error)
    return EngineResponse(
        500, error_body("The engine gave no answer to this request.", type_="server_error")
    )
