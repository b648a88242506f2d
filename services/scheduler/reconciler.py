"""Reconciling, each second: what has no live lease is handed out again."""

from services.kit.messages.bus import Bus, BusFault
from services.kit.process.log import get_logger
from services.kit.wire.errors import NightshiftError, StaleTermError
from services.scheduler.leader import Leader
from services.scheduler.pool_reports import PoolReporter
from services.scheduler.queues import Queues
from services.scheduler.registry import Registry
from services.scheduler.work_client import WorkClient

_log = get_logger(__name__)


class Reconciler:
    """Makes right what events only make fast."""

    def __init__(
        self,
        *,
        bus: Bus,
        client: WorkClient,
        leader: Leader,
        registry: Registry,
        queues: Queues,
        reporter: PoolReporter,
    ) -> None:
        """Work on the parts that the dispatcher works on."""
        self._bus = bus
        self._client = client
        self._leader = leader
        self._registry = registry
        self._queues = queues
        self._reporter = reporter

    async def run_once(self) -> int:
        """Sweep executors, tell of them, measure queues, reclaim; return what was published."""
        term = self._leader.term
        if term is None:
            # A standby hears them too.
            self._registry.sweep()
            return 0
        try:
            await self._read_beats()
            await self._reporter.run_once(term, self._queues.ready)
            pending = await self._queues.measure()
            dispatches = await self._client.reclaim(term, pending)
            if dispatches:
                _log.info("chunks_reclaimed", chunks=len(dispatches), term=term)
            return await self._queues.publish(term, dispatches)
        except StaleTermError:
            self._leader.lost(term)
        except NightshiftError as error:
            _log.warning("reconcile_waits_for_store", error=error.message)
        except BusFault as fault:
            _log.warning("reconcile_waits_for_bus", error=str(fault) or type(fault).__name__)
        return 0

    async def _read_beats(self) -> None:
        beats = await self._bus.beats()
        self._registry.read(beats)
        for beat in beats:
            self._queues.note_opened(beat)
        self._registry.sweep()
