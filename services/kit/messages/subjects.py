"""Names on the bus: what is published where, and who reads it."""

from typing import Final

from protos.nightshift.v1 import dispatch_pb2
from services.kit.wire.ids import PoolId


def work_subject(pool_id: PoolId) -> str:
    """Return the subject of a pool's batch work for any executor."""
    return f"nightshift.work.{pool_id}.batch.any"


def room_subject(pool_id: PoolId) -> str:
    """Return the subject on which a pool's executors say what they have room for."""
    return f"nightshift.room.{pool_id}"


ANY_BEAT: Final = "$KV.executors.>"


def beat_subject(executor_id: str) -> str:
    """Return the subject below the bucket of beats that holds an executor's."""
    return f"{ANY_BEAT[:-1]}{executor_id}"


def event_subject(event: dispatch_pb2.Event) -> str:
    """Return an event's subject."""
    kind = dispatch_pb2.EventKind.Name(event.kind).removeprefix("EVENT_KIND_").lower()
    return f"nightshift.event.{kind}.{event.batch_id or event.pool_id or 'all'}"


def durable_of(pool_id: PoolId) -> str:
    """Return the name of a pool's consumer."""
    return f"{pool_id}-batch-any"
