"""How an executor presents itself to the store: its life at once, its engine when it is ready."""

import asyncio
from collections.abc import Callable, Iterable, Sequence

from services.executor.engines.base import Engine
from services.executor.lines.retry import Backoff
from services.executor.store_client import StoreClient
from services.kit.calls.rpc import CallFault
from services.kit.process.log import get_logger
from services.kit.wire.errors import UnavailableError, from_rpc_error
from services.kit.wire.ids import PoolId

_log = get_logger(__name__)


class Registration:
    """Registers, waiting for the store as long as it takes."""

    def __init__(
        self,
        *,
        store: StoreClient,
        pool_id: PoolId,
        models: Sequence[str],
        chance: Callable[[], float],
        on_refused: Callable[[str], None],
    ) -> None:
        """Make it.

        Args:
            store: told of this life of the executor.
            pool_id: the pool it serves.
            models: names it serves.
            chance: random numbers in [0, 1), for jitter.
            on_refused: called with what a person has to change; it is tried again all the same.
        """
        self._store = store
        self._pool_id = pool_id
        self._models = models
        self._chance = chance
        self._on_refused = on_refused
        self._begun = asyncio.Event()
        self._presented = False

    async def begin(self) -> None:
        """Say that a new life began: attempts of the last one need not wait for an engine."""
        await self._register((), (), None, "")
        self._begun.set()

    async def present(self, engine: Engine) -> None:
        """Say what the engine, which is ready, serves; once a life."""
        if self._presented:
            return
        await self._begun.wait()
        await self._register(self._models, engine.endpoints, engine.context_length, engine.revision)
        self._presented = True

    async def _register(
        self,
        models: Sequence[str],
        endpoints: Iterable[str],
        context_length: int | None,
        engine_revision: str,
    ) -> None:
        away = Backoff(0.05, 1.0, self._chance)
        refused = Backoff(1.0, 30.0, self._chance)
        while True:
            try:
                await self._store.register(
                    pool_id=self._pool_id,
                    models=models,
                    endpoints=endpoints,
                    context_length=context_length,
                    engine_revision=engine_revision,
                )
            except CallFault as fault:
                error = from_rpc_error(fault)
                if isinstance(error, UnavailableError):
                    wait = away.next_seconds()
                else:
                    wait = refused.next_seconds()
                    self._on_refused(error.message)
                _log.warning("not_registered", error=error.message)
                await asyncio.sleep(wait)
            else:
                return
