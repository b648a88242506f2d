"""Who did what: one line in the log for each thing that an operator or a key changes."""

from typing import Final

from services.kit.calls import rpc
from services.kit.calls.interceptors import Call, metadata_value
from services.kit.process.log import get_logger

_log = get_logger(__name__)

_MOST_CHARACTERS: Final = 200


def record(context: Call, event: str, **what: object) -> None:
    """Log that a call did something, with who asked.

    Of a call through the gateway those are project, key and request id, under which the gateway's
    log has the address. An operator's command names user and machine itself.
    """
    who = {
        "project": metadata_value(context, rpc.PROJECT_KEY),
        "key": metadata_value(context, rpc.API_KEY_ID_KEY),
        "request_id": metadata_value(context, rpc.REQUEST_KEY),
        "operator": metadata_value(context, rpc.OPERATOR_KEY)[:_MOST_CHARACTERS],
    }
    shown = {name: value for name, value in who.items() if value}
    if "request_id" not in shown:
        shown["peer"] = context.peer()
    _log.info(event, **shown, **what)
