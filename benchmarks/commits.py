"""Commits a second of the store's writer, on PostgreSQL as a share of those on SQLite."""

import asyncio
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import sqlalchemy as sa

from benchmarks.report import Row
from benchmarks.workshop import Workshop
from services.store.db import migrate
from services.store.db.database import Database
from services.store.tables.core import outbox
from tests.kit.postgres import Postgres

NAME: Final = "commits"

_SECONDS: Final = 3.0
_ROUNDS: Final = 3
_CALLERS: Final = (1, 64)


def _write(connection: sa.Connection) -> None:
    """About what a frame of results costs: a few statements by key, and a row."""
    for _ in range(3):
        connection.execute(sa.select(outbox.c.id).where(outbox.c.id == 1)).first()
    connection.execute(
        outbox.insert().inline(),
        {"project_id": "default", "subject": "s", "payload": b"x" * 4_096, "created_ms": 1},
    )


async def _rate(db: Database, callers: int) -> float:
    """Return calls a second that are answered once they are durable."""
    until = time.monotonic() + _SECONDS

    async def caller() -> int:
        done = 0
        while time.monotonic() < until:
            await db.write("bench.step", _write)
            done += 1
        return done

    began = time.monotonic()
    done = sum(await asyncio.gather(*(caller() for _ in range(callers))))
    return done / (time.monotonic() - began)


def _measure(url: str) -> dict[int, float]:
    db = Database(url)
    try:
        migrate.upgrade(db.writer_engine, 1)
        return {callers: asyncio.run(_rate(db, callers)) for callers in _CALLERS}
    finally:
        db.close()


def measure(workshop: Workshop) -> Iterator[Row]:
    """Write by one caller and by 64 on either database, in turn, all of it synced."""
    server = Postgres(syncs=True)
    rates: dict[str, list[dict[int, float]]] = {"SQLite": [], "PostgreSQL": []}
    try:
        server.start()
        for number in range(_ROUNDS):
            with tempfile.TemporaryDirectory() as folder:
                file = Path(folder) / "bench.db"
                rates["SQLite"].append(_measure(f"sqlite:///{file}"))
            rates["PostgreSQL"].append(_measure(server.new_database()))
            workshop.say(f"round {number}: {rates['SQLite'][-1]} {rates['PostgreSQL'][-1]}")
    finally:
        server.remove()
    for callers in _CALLERS:
        best = {name: max(each[callers] for each in found) for name, found in rates.items()}
        yield Row(
            bench=NAME,
            what=f"durable writes/s of {callers} caller(s), PostgreSQL ÷ SQLite",
            value=best["PostgreSQL"] / best["SQLite"],
            detail=f"{best['PostgreSQL']:,.0f} against {best['SQLite']:,.0f}, best of {_ROUNDS}",
        )
