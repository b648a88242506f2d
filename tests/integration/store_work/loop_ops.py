"""What a store does by itself, as ops: its loops take a turn when they are told to."""

from collections.abc import Callable

from services.store.domain.state import BatchStatus
from tests.integration.store_work.ops import Check, Op, Ops, any_answer
from tests.kit.store_model_parts import Moment

LEASE_MS = 60_000
"""For how long a store that is gone holds the right to finalize."""
_JUDGED = ("batch.start", "batch.fail")


class AllOps(Ops):
    """Makes ops of clients and of loops."""

    # --- the stores' own loops ----------------------------------------------------------------

    def validate(self) -> Op:
        """Judge new batches."""
        waiting = [each for each in self.model.batches if each.status is BatchStatus.VALIDATING]
        there = {each.key: each.file_id in self.model.files for each in waiting}

        def decide(at: Moment) -> Check:
            # What was read before it stood still is judged as it was then.
            self.model.validate(there)
            return any_answer

        found = {f"{step}:after": lambda _at: self.model.validate(there) for step in _JUDGED}
        # One at most, so that it is known which one stands still.
        steps = _JUDGED if len(waiting) == 1 else ()
        return Op(
            lambda store: store.validator.run_once(), steps, decide, found, again=True, is_loop=True
        )

    def end(self) -> Op:
        """Stop what is late, seal what has stopped."""

        def late(at: Moment) -> None:
            self.model.stop_late(at)

        def sealed(at: Moment) -> None:
            self.model.stop_late(at)
            self.model.seal_stopped(at, self.sealed_rows())

        def decide(at: Moment) -> Check:
            return lambda _answer: sealed(at)

        found = {
            "batch.stop_late:after": late,
            "batch.seal:before": late,
            "batch.seal:after": sealed,
        }
        return Op(
            lambda store: store.ender.run_once(),
            ("batch.stop_late", "batch.seal"),
            decide,
            found,
            again=True,
            is_loop=True,
        )

    def finalize(self) -> Op:
        """End what is sealed."""
        waiting = [
            each for each in self.model.batches if each.outcome is not None and not each.ended
        ]

        def decide(at: Moment) -> Check:
            return lambda _answer: self.model.finalize(at, self.ended_rows())

        def claimed(at: Moment) -> None:
            for batch in waiting:
                batch.claimed_until_ms = at.now_ms + LEASE_MS

        def done(at: Moment) -> None:
            claimed(at)
            self.model.finalize(at, self.ended_rows())

        found: dict[str, Callable[[Moment], None]] = {
            "finalize.claim:after": claimed,
            "finalize.write:before": claimed,
            "finalize.write:after": claimed,
            "finalize.end:before": claimed,
            "finalize.end:after": done,
        }
        steps = ("finalize.claim", "finalize.write", "finalize.end") if len(waiting) == 1 else ()
        return Op(
            lambda store: store.finalizer.run_once(), steps, decide, found, again=True, is_loop=True
        )

    def sweep(self) -> Op:
        """Delete what nothing names."""
        return Op(
            lambda store: store.sweeper.run_once(),
            ("sweep.purge_file", "sweep.delete_blob", "sweep.forget_blobs"),
            lambda _at: any_answer,
            again=True,
            is_loop=True,
        )

    # --- what is looked up behind the doors ---------------------------------------------------

    #: Set by the machine, which owns the loop.
    sealed_rows: Callable[[], set[str]]
    ended_rows: Callable[[], set[str]]
