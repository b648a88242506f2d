"""What stands besides files and batches: outbox, leadership, webhooks, keys, the secret."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import sqlalchemy as sa
from google.protobuf.message import DecodeError

from protos.nightshift.v1 import dispatch_pb2
from services.kit.messages.subjects import event_subject
from services.store.blobs.holds_repo import HOLD_MS
from services.store.checkup.report import Kind
from services.store.checkup.rows_read import View
from services.store.domain import webhooks
from services.store.domain.checks import statement
from services.store.domain.checks.fault import Fault
from services.store.domain.state import BatchStatus
from services.store.tables.core import (
    batch_engines,
    batches,
    files,
    leadership,
    outbox,
    projects,
    sweep_holds,
)
from services.store.tables.keys import api_keys, idempotency_keys
from services.store.tables.webhooks import PENDING, deliveries, webhook_endpoints
from services.store.work.leadership_repo import MAX_TTL_MS

Row = sa.Row[*tuple[Any, ...]]

PAGE: Final = 500
_BY_HAND: Final = "Stop nightshift, run the statement, and check again."
_CLOCK_SLACK_MS: Final = 60_000
_LATE_MS: Final = 60_000


def check_outbox(view: View, kind: Kind) -> None:
    """Check that what waits to be told can be, each under a number of its own."""
    now_ms = int(time.time() * 1000)
    last = 0
    while True:
        with view.snapshot() as connection:
            rows = connection.execute(
                sa.select(outbox).where(outbox.c.id > last).order_by(outbox.c.id).limit(PAGE)
            ).all()
            given = connection.exec_driver_sql(
                "SELECT seq FROM sqlite_sequence WHERE name = 'outbox'"
            ).scalar()
        if not rows:
            return
        if not last and rows[0].created_ms < now_ms - _LATE_MS:
            kind.note(
                f"events wait since {(now_ms - rows[0].created_ms) // 1000} s: they are told once "
                "the store reaches its NATS; nothing is lost meanwhile"
            )
        kind.count("waiting", len(rows))
        kind.step(len(rows))
        for row in rows:
            kind.extend(_event_faults(row))
        last = rows[-1].id
        if (given or 0) < last:
            kind.add(
                Fault(
                    subject=f"event {last}",
                    what=f"is beyond the last number given, {given}: it would be given again, and"
                    " NATS drops what comes under a number twice",
                    mend=_BY_HAND,
                    sql=_number_from(view, last),
                )
            )


def _number_from(view: View, last: int) -> str:
    if view.is_copy:
        return f"SELECT setval(pg_get_serial_sequence('outbox', 'id'), {last})"
    return statement.update("sqlite_sequence", {"name": "outbox"}, seq=last)


def _event_faults(row: Row) -> Iterator[Fault]:
    try:
        fits = event_subject(dispatch_pb2.Event.FromString(row.payload)) == row.subject
    except (DecodeError, ValueError, KeyError):
        fits = False
    if not fits:
        yield Fault(
            subject=f"event {row.id}",
            what=f"cannot be told: its content is none of {row.subject}",
            mend=_BY_HAND + " Events only make things fast: nothing is lost by it.",
            sql=statement.delete("outbox", id=row.id),
        )


def check_leadership(view: View, kind: Kind) -> None:
    """Check that some scheduler can lead, soon."""
    now_ms = int(time.time() * 1000)
    with view.snapshot() as connection:
        rows = connection.execute(sa.select(leadership)).all()
    for row in rows:
        kind.count("leading", int(row.until_ms > now_ms))
        key = {"name": row.name}
        if row.term < 1:
            what, sql = f"is in term {row.term}", statement.update("leadership", key, term=1)
        elif row.until_ms > now_ms + MAX_TTL_MS + _CLOCK_SLACK_MS:
            ahead = (row.until_ms - now_ms) // 1000
            what = f"is {row.holder}'s for {ahead} s more: no other can lead. Did the clock jump?"
            sql = statement.update("leadership", key, until_ms=0)
        else:
            continue
        kind.add(Fault(subject=row.name, what=what, mend=_BY_HAND, sql=sql))


def check_webhooks(view: View, kind: Kind) -> None:
    """Check endpoints and what is told to them."""
    with view.snapshot() as connection:
        kind.count(
            "endpoints",
            connection.scalar(
                sa.select(sa.func.count())
                .select_from(webhook_endpoints)
                .where(webhook_endpoints.c.deleted_at.is_(None))
            )
            or 0,
        )
        for row in connection.execute(
            sa.select(webhook_endpoints.c.id, webhook_endpoints.c.secrets).where(
                webhook_endpoints.c.deleted_at.is_(None)
            )
        ):
            if not row.secrets:
                kind.add(
                    Fault(
                        subject=row.id,
                        what="has no secret to sign with",
                        mend="Delete this webhook and create it again.",
                    )
                )
    last = 0
    while True:
        with view.snapshot() as connection:
            rows = connection.execute(
                sa.select(
                    deliveries,
                    batches.c.status.label("batch_status"),
                    webhook_endpoints.c.deleted_at,
                )
                .join(batches, batches.c.id == deliveries.c.batch_id)
                .join(webhook_endpoints, webhook_endpoints.c.id == deliveries.c.endpoint_id)
                .where(deliveries.c.seq > last)
                .order_by(deliveries.c.seq)
                .limit(PAGE)
            ).all()
        if not rows:
            return
        for row in rows:
            kind.count(row.state.replace("_", " "))
            kind.step()
            kind.extend(_delivery_faults(row))
        last = rows[-1].seq


def _delivery_faults(row: Row) -> Iterator[Fault]:
    event = webhooks.event_id(row.batch_id)
    try:
        told = json.loads(row.payload)
        said = (told["id"], told["type"], told["data"]["id"])
    except (ValueError, KeyError, TypeError):
        said = ("", "", "")
    if (
        said != (event, row.event_type, row.batch_id)
        or row.event_id != event
        or row.id != webhooks.delivery_id(row.endpoint_id, event)
    ):
        what = f"does not tell of the end of {row.batch_id}, which it is for"
    elif row.event_type != webhooks.EVENT_TYPES.get(BatchStatus(row.batch_status)):
        what = f"tells of {row.event_type}, but {row.batch_id} is {row.batch_status}"
    elif row.state == PENDING and row.deleted_at is not None:
        what = "waits for an endpoint that was deleted"
    else:
        return
    yield Fault(
        subject=row.id,
        what=what,
        mend=_BY_HAND + " Its receiver is not told then.",
        sql=statement.delete("deliveries", id=row.id),
    )


def check_keys(view: View, kind: Kind) -> None:
    """Check that keys and idempotency keys name what is there."""
    with view.snapshot() as connection:
        for row in connection.execute(sa.select(api_keys.c.id, api_keys.c.revoked_at)):
            kind.count("live" if row.revoked_at is None else "revoked")
        known = sa.exists().where(api_keys.c.id == batches.c.key_id)
        for row in connection.execute(
            sa.select(batches.c.id, batches.c.key_id)
            .where(batches.c.key_id.is_not(None), ~known)
            .order_by(batches.c.seq)
        ):
            kind.add(
                Fault(
                    subject=row.id,
                    what=f"was created by key {row.key_id}, which is not there",
                    mend="A key's row was deleted by hand: restore it from a backup, or else its "
                    "usage is told without a name.",
                )
            )
        is_file = sa.exists().where(files.c.id == idempotency_keys.c.object_id)
        is_batch = sa.exists().where(batches.c.id == idempotency_keys.c.object_id)
        count = sa.select(sa.func.count()).select_from(idempotency_keys)
        kind.count("idempotency keys", connection.scalar(count) or 0)
        lost = sa.select(idempotency_keys.c.object_id).where(~is_file, ~is_batch)
        for object_id in connection.scalars(lost):
            kind.add(
                Fault(
                    subject=object_id,
                    what="was made under an idempotency key, and is not there",
                    mend=_BY_HAND,
                    sql=statement.delete("idempotency_keys", object_id=object_id),
                )
            )


def check_projects(view: View, kind: Kind) -> None:
    """Check quotas, and that what is noted of engines is of the project whose batch they ran."""
    with view.snapshot() as connection:
        kind.count("projects", connection.scalar(sa.select(sa.func.count(projects.c.id))) or 0)
        for row in connection.execute(
            sa.select(projects.c.id, projects.c.quota_bytes).where(projects.c.quota_bytes < 0)
        ):
            kind.add(
                Fault(
                    subject=row.id,
                    what=f"has a quota of {row.quota_bytes} bytes: nothing can be uploaded",
                    mend=f"Run `nightshift projects set-quota {row.id} default`, or the statement.",
                    sql=statement.update("projects", {"id": row.id}, quota_bytes=None),
                )
            )
        strange = (
            sa.select(batch_engines.c.batch_id, batch_engines.c.project_id)
            .join(batches, batches.c.id == batch_engines.c.batch_id)
            .where(batch_engines.c.project_id != batches.c.project_id)
            .distinct()
        )
        for row in connection.execute(strange):
            kind.add(
                Fault(
                    subject=row.batch_id,
                    what=f"ran on engines that are noted for project {row.project_id}, not its own",
                    mend=_BY_HAND + " Only what is told of the engines that ran it is lost.",
                    sql=statement.delete("batch_engines", **row._asdict()),
                )
            )


def check_holds(view: View, kind: Kind) -> None:
    """Check that blobs which nothing names can be deleted, soon."""
    now_ms = int(time.time() * 1000)
    with view.snapshot() as connection:
        rows = connection.execute(sa.select(sweep_holds)).all()
    for row in rows:
        kind.count("standing", int(row.until_ms > now_ms))
        if row.until_ms > now_ms + HOLD_MS + _CLOCK_SLACK_MS:
            ahead = (row.until_ms - now_ms) // 1000
            kind.add(
                Fault(
                    subject=f"hold {row.id}",
                    what=f"keeps every blob for {ahead} s more: nothing leaves the disk or the"
                    " bucket. Did the clock jump while a backup was taken?",
                    mend=_BY_HAND,
                    sql=statement.delete("sweep_holds", id=row.id),
                )
            )


def check_secret(file: Path, kind: Kind, *, is_ours: bool) -> None:
    """Check that services can read their secret, and others cannot where the file `is_ours`."""
    try:
        found = file.stat()
    except FileNotFoundError:
        kind.note(f"there is no {file.name} yet: the next start makes one")
        return
    kind.count("there")
    if is_ours and found.st_mode & 0o077:
        kind.add(
            Fault(
                subject=file.name,
                what=f"can be read by others: its mode is {found.st_mode & 0o777:o}",
                mend=f"Run chmod 600 {file}. Where others may have read it, delete it while "
                "nothing runs: the next start makes another.",
            )
        )
    if not found.st_size:
        kind.add(
            Fault(
                subject=file.name,
                what="is empty, so that no service starts",
                mend=f"Delete {file} while nothing runs: the next start makes another.",
            )
        )
