"""The body does not steer the engine: what a user may not set is overwritten, dropped or refused.

vLLM's request classes take many fields that are the operator's business: scheduling priority,
the id by which a request is aborted, cache salts, transfer parameters, whole chat templates
(code), and addresses it would fetch from inside the operator's network. Only the fields of a list
are passed on (`fields`), within bounds (`bounds`).
"""

from types import NoneType
from typing import Any

from services.executor.engines.base import EngineRequest
from services.executor.engines.bodies.bounds import BodyRefused, bounded_body
from services.executor.engines.bodies.fields import ALLOWED
from services.kit.wire.endpoints import CHAT_COMPLETIONS, COMPLETIONS, RERANK, RESPONSES, SCORE

_TEMPLATE_ARGUMENTS = frozenset(
    {"chat_template", "conversation", "documents", "messages", "tokenize", "tools"}
)
"""Arguments of the template renderer itself, which no `chat_template_kwargs` may replace."""

_TOKEN_LIMITS = {
    CHAT_COMPLETIONS: ("max_tokens", "max_completion_tokens"),
    COMPLETIONS: ("max_tokens", "max_completion_tokens"),
    RESPONSES: ("max_output_tokens",),
}
"""By endpoint that generates, the fields that bound it; the default goes into the first."""

_PLAIN = (str, int, float, bool, type(None))
_MEDIA_KEYS = ("image_url", "audio_url", "video_url", "file_url")


def guarded_body(
    request: EngineRequest,
    body: dict[str, Any] | None = None,
    *,
    default_max_tokens: int | None = None,
) -> dict[str, Any]:
    """The request's body as an engine may see it, with our model name and request id.

    `body`: what `bounded_body` made of it, where that is at hand. `default_max_tokens`: what a body
    that asks for tokens, and does not say how many, gets; None leaves it to the engine.

    Raises `BodyRefused` where it is no strict JSON object, is beyond a bound, asks for what is not
    passed on, or names media by other than `data:` addresses.
    """
    allowed = ALLOWED.get(request.endpoint, frozenset())
    if body is None:
        body = bounded_body(request)
    guarded = {key: value for key, value in body.items() if key in allowed}
    guarded["request_id"] = request.request_id
    if request.model:
        guarded["model"] = request.model
    if request.project_id:
        # Or how fast a prompt is answered would tell whether another project has sent its begin.
        guarded["cache_salt"] = request.project_id
    if "chat_template_kwargs" in guarded:
        guarded["chat_template_kwargs"] = _template_arguments(guarded["chat_template_kwargs"])
    if request.endpoint == RESPONSES:
        _guard_response(guarded)
    limits = _TOKEN_LIMITS.get(request.endpoint, ())
    unlimited = bool(limits) and all(guarded.get(name) is None for name in limits)
    if unlimited and default_max_tokens is not None:
        guarded[limits[0]] = default_max_tokens
    if not isinstance(guarded.get("messages"), (list, NoneType)):
        raise BodyRefused("Invalid type for 'messages': expected an array.", "messages")
    # What is scored has many names; there, no field may name foreign media.
    scored = request.endpoint in (SCORE, RERANK)
    for name in tuple(guarded) if scored else ("messages", "input"):
        _refuse_foreign_media(guarded.get(name), name)
    return guarded


def _guard_response(body: dict[str, Any]) -> None:
    """A response of a batch stands alone: it is kept nowhere and calls nothing but its caller."""
    body["request_id"] = f"resp_{body['request_id']}"
    body["store"] = False
    tools = body.get("tools")
    for tool in tools if isinstance(tools, list) else ():
        if not isinstance(tool, dict) or tool.get("type") != "function":
            raise BodyRefused("Invalid 'tools': only functions of the caller's are taken.", "tools")


def _template_arguments(value: object) -> dict[str, Any] | None:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise BodyRefused(
            "Invalid 'chat_template_kwargs': expected an object.", "chat_template_kwargs"
        )
    return {
        key: plain
        for key, plain in value.items()
        if key not in _TEMPLATE_ARGUMENTS and isinstance(plain, _PLAIN)
    }


def _refuse_foreign_media(value: object, param: str) -> None:
    """Walk lists and objects; engines find media by key, so the part's `type` is no help.

    A part's `uuid` is taken out: vLLM keeps media by it, whoever sent them.
    """
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, list):
            pending.extend(entry for entry in item if isinstance(entry, (dict, list)))
        elif isinstance(item, dict):
            item.pop("uuid", None)
            for key in _MEDIA_KEYS:
                media = item.get(key)
                address = media.get("url") if isinstance(media, dict) else media
                if address is not None and not _is_data(address):
                    raise BodyRefused(
                        f"Invalid '{key}': only data: URLs are taken, with the media inside.",
                        param,
                    )
            pending.extend(entry for entry in item.values() if isinstance(entry, (dict, list)))


def _is_data(address: object) -> bool:
    return isinstance(address, str) and address[:5].lower() == "data:"
