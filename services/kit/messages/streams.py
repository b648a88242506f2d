"""What stands at the broker: streams, the bucket of beats, the pools' consumers, and their copies.

All of it is made where it is missing and brought up to date where it stands otherwise, as often
as anyone asks, so that a broker that lost everything is set up again by whoever notices first.
"""

from typing import Final

import nats.errors
import nats.js.errors
from nats.js import JetStreamContext, api

from services.kit.messages.subjects import durable_of, work_subject
from services.kit.process import failpoints
from services.kit.process.log import get_logger
from services.kit.wire.ids import PoolId

_log = get_logger(__name__)

WORK_STREAM: Final = "WORK"
EVENT_STREAM: Final = "EVENTS"
EXECUTORS_BUCKET: Final = "executors"
BEATS_STREAM: Final = f"KV_{EXECUTORS_BUCKET}"
"""The stream below that bucket."""
ACK_WAIT_SECONDS: Final = 10.0
"""Time after which an unacknowledged message is delivered again."""

BusFault: Final = (nats.errors.Error, OSError)
"""What every call here may raise while the broker is away, slow or made anew; try again later."""

BusGone: Final = nats.js.errors.NotFoundError
"""Of these, the broker's word that a stream or a consumer is not there, until somebody makes it."""

BusRefusal: Final = nats.js.errors.APIError
"""Of these, whatever the broker answers: it is there, and may grant what else is asked for."""

# Longer than the longest completion window (7 days): reconciling, not the broker, decides.
_WORK_MAX_AGE_SECONDS: Final = 8 * 86_400
_DUPLICATE_WINDOW_SECONDS: Final = 120
_EVENT_MAX_AGE_SECONDS: Final = 3_600
# Room for some 100,000 dispatches, or the beats of as many executors. The broker sets that much of
# its disk aside for each.
_MAX_BYTES: Final = 64 * 1024 * 1024
_BEAT_MAX_AGE_SECONDS: Final = 60
# nats-server's "error creating store for consumer": its files do not read.
_CONSUMER_STORE_FAILED: Final = 10_012
# Settings that may be changed on what exists.
_CHOSEN: Final = frozenset(
    {
        "subjects",
        "max_age",
        "max_bytes",
        "discard",
        "allow_direct",
        "duplicate_window",
        "ack_wait",
        "max_ack_pending",
        "num_replicas",
    }
)


class Layout:
    """Makes what should stand at the broker, and mends what does not."""

    def __init__(self, jetstream: JetStreamContext, replicas: int) -> None:
        """Ask over `jetstream`; streams and bucket are kept by `replicas` servers each."""
        self._jetstream = jetstream
        self._replicas = replicas

    def _streams(self) -> tuple[api.StreamConfig, api.StreamConfig]:
        work = api.StreamConfig(
            name=WORK_STREAM,
            subjects=["nightshift.work.>"],
            retention=api.RetentionPolicy.WORK_QUEUE,
            storage=api.StorageType.FILE,
            max_age=_WORK_MAX_AGE_SECONDS,
            max_bytes=_MAX_BYTES,
            # What does not fit is refused, and reconciling publishes it once there is room.
            discard=api.DiscardPolicy.NEW,
            duplicate_window=_DUPLICATE_WINDOW_SECONDS,
            num_replicas=self._replicas,
        )
        events = api.StreamConfig(
            name=EVENT_STREAM,
            subjects=["nightshift.event.>"],
            retention=api.RetentionPolicy.LIMITS,
            storage=api.StorageType.FILE,
            max_age=_EVENT_MAX_AGE_SECONDS,
            max_bytes=_MAX_BYTES,
            # Hints: who missed one finds out at the next tick.
            discard=api.DiscardPolicy.OLD,
            duplicate_window=_DUPLICATE_WINDOW_SECONDS,
            num_replicas=self._replicas,
        )
        return work, events

    async def ensure_streams(self) -> None:
        """Make the streams and the bucket where they are missing; repeatable.

        What stands is used as it is while the broker cannot change it, as where too few servers
        are there for its copies; the next call tries again.

        Raises:
            BusFault: the broker does not answer, or cannot make one that is missing.
        """
        for config in self._streams():
            try:
                info = await self._jetstream.stream_info(config.name or "")
            except nats.js.errors.NotFoundError:
                await self._add(config)
            else:
                # What exists keeps its old settings until it is told otherwise.
                if _differs(config, info.config):
                    await self._update(config)
        await self.ensure_bucket()

    async def _add(self, config: api.StreamConfig) -> None:
        try:
            with failpoints.around("stream.make"):
                await self._jetstream.add_stream(config)
        except nats.js.errors.APIError as error:
            _log.warning(
                "stream_cannot_be_made",
                stream=config.name,
                replicas=self._replicas,
                error=str(error),
            )
            raise

    async def _update(self, config: api.StreamConfig) -> None:
        try:
            with failpoints.around("stream.change"):
                await self._jetstream.update_stream(config)
        except nats.js.errors.APIError as error:
            _log.warning(
                "stream_keeps_old_settings",
                stream=config.name,
                replicas=self._replicas,
                error=str(error),
            )
        else:
            _log.info("stream_updated", stream=config.name, replicas=self._replicas)

    async def ensure_bucket(self) -> None:
        """Make the bucket of beats where it is missing."""
        try:
            info = await self._jetstream.stream_info(BEATS_STREAM)
        except nats.js.errors.NotFoundError:
            config = api.KeyValueConfig(
                bucket=EXECUTORS_BUCKET,
                history=1,
                ttl=_BEAT_MAX_AGE_SECONDS,
                max_bytes=_MAX_BYTES,
                replicas=self._replicas,
                direct=True,
            )
            with failpoints.around("bucket.make"):
                await self._jetstream.create_key_value(config)
            return
        wanted = info.config.evolve(
            max_bytes=_MAX_BYTES,
            # As the client makes buckets: a beat that replaces another one always fits.
            discard=api.DiscardPolicy.NEW,
            num_replicas=self._replicas,
            allow_direct=True,
        )
        if _differs(wanted, info.config):
            await self._update(wanted)

    async def ensure_consumer(self, pool_id: PoolId) -> int:
        """Make a pool's durable pull consumer where it is missing; repeatable.

        Returns:
            Dispatches of the pool that are published and not yet delivered.

        Raises:
            nats.js.errors.NotFoundError: the stream is missing.
        """
        wanted = api.ConsumerConfig(
            durable_name=durable_of(pool_id),
            filter_subject=work_subject(pool_id),
            ack_policy=api.AckPolicy.EXPLICIT,
            ack_wait=ACK_WAIT_SECONDS,
            max_deliver=-1,
            max_ack_pending=10_000,
        )
        try:
            info = await self._jetstream.consumer_info(WORK_STREAM, durable_of(pool_id))
        except nats.js.errors.NotFoundError:
            info = await self._add_consumer(wanted)
        else:
            if _differs(wanted, info.config):
                info = await self._add_consumer(wanted)
        return info.num_pending or 0

    async def _add_consumer(self, wanted: api.ConsumerConfig) -> api.ConsumerInfo:
        """Make a consumer; a stream whose files are damaged is made anew: it holds hints only."""
        try:
            with failpoints.around("consumer.make"):
                return await self._jetstream.add_consumer(WORK_STREAM, wanted)
        except nats.js.errors.APIError as error:
            if error.err_code != _CONSUMER_STORE_FAILED:
                raise
            _log.warning("damaged_stream_made_anew", stream=WORK_STREAM, error=str(error))
            with failpoints.around("stream.remove"):
                await self._jetstream.delete_stream(WORK_STREAM)
            await self.ensure_streams()
            with failpoints.around("consumer.make_anew"):
                return await self._jetstream.add_consumer(WORK_STREAM, wanted)


def _differs(
    wanted: api.StreamConfig | api.ConsumerConfig, found: api.StreamConfig | api.ConsumerConfig
) -> bool:
    """Tell whether a setting that this code chooses stands otherwise at the broker."""
    return any(
        value is not None and value != getattr(found, name)
        for name, value in vars(wanted).items()
        if name in _CHOSEN
    )
