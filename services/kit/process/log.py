"""One structured logger: JSON lines on standard error, fixed event names, bound ids."""

import logging
import sys
from typing import Final

import structlog
from structlog.typing import EventDict, WrappedLogger

Logger = structlog.stdlib.BoundLogger

LEVELS: Final = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")

_NEVER_LOGGED: Final = frozenset({"authorization", "api_key", "secret", "body", "content", "data"})


def _drop_secrets(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    for name in _NEVER_LOGGED & event.keys():
        event[name] = "[not logged]"
    return event


def configure(service: str, level: str = "INFO") -> None:
    """Send this process's logs, those of libraries included, to standard error as JSON lines.

    Args:
        service: name that every line carries.
        level: one of `LEVELS`, in any case; lower ones are dropped.

    Raises:
        ValueError: it is none; the message says which setting to change.
    """
    if level.upper() not in LEVELS:
        raise ValueError(f"NIGHTSHIFT_LOG_LEVEL is one of {', '.join(LEVELS)}, not {level!r}")

    def add_service(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
        # Not bound: what is bound is seen by the thread that bound it, and a store has others.
        event.setdefault("service", service)
        return event

    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        add_service,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
        _drop_secrets,
    ]
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.stdlib.BoundLogger,
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                structlog.processors.JSONRenderer(),
            ],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for noisy in ("nats", "uvicorn.access", "httpx", "opentelemetry"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def get_logger(name: str) -> Logger:
    """Return the logger of a module; bind ids to it where they are known."""
    logger: Logger = structlog.stdlib.get_logger(name)
    return logger
