"""The store's connection to the bus: kept, and what stands there made again when it is lost."""

import asyncio
from collections.abc import Callable
from typing import Final

from services.kit.messages import bus as kit_bus
from services.kit.messages.bus_login import Login
from services.kit.process.log import get_logger
from services.kit.process.settings import BusSettings
from services.store.bus.outbox import Outbox

_log = get_logger(__name__)

CHECK_SECONDS: Final = 30.0
"""How often streams are looked at though nothing failed: their copies may have been changed."""
_FIRST_DELAY_SECONDS: Final = 0.2
_MOST_DELAY_SECONDS: Final = 5.0


async def keep_bus(
    settings: BusSettings, login: Login | None, outbox: Outbox, wake_outbox: Callable[[], None]
) -> None:
    """Connect, and see to it until cancelled that the outbox has streams to publish to.

    The store serves without a bus, only slower.

    Args:
        settings: where it is, and copies of each stream.
        login: as `services.kit.messages.bus.connect` takes it.
        outbox: given the bus, and asked whether it was refused there.
        wake_outbox: called when it may try again.
    """
    bus = await kit_bus.connect(
        settings.nats_url, "nightshift-store", replicas=settings.nats_replicas, login=login
    )
    try:
        outbox.attach(bus)
        delay = _FIRST_DELAY_SECONDS
        while True:
            try:
                await bus.ensure_streams()
            except Exception as fault:  # noqa: BLE001 - nobody else would ever do it
                _log.warning(
                    "bus_not_set_up",
                    error=str(fault) or type(fault).__name__,
                    exc_info=None if isinstance(fault, kit_bus.BusFault) else fault,
                )
                await asyncio.sleep(delay)
                delay = min(2 * delay, _MOST_DELAY_SECONDS)
                continue
            delay = _FIRST_DELAY_SECONDS
            wake_outbox()
            await outbox.refused(CHECK_SECONDS)
    finally:
        await bus.close()
