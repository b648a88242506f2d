"""vLLM in this process: AsyncLLM behind vLLM's own OpenAI request handling, without HTTP."""

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from services.executor.engines.base import (
    STALL_LIMIT_SECONDS,
    Answer,
    EngineDead,
    EngineError,
    EngineRequest,
    EngineResponse,
    EngineStartError,
    RequestAborted,
    refusal,
)
from services.executor.engines.bodies.bounds import BodyRefused
from services.executor.engines.bodies.guard import guarded_body
from services.executor.engines.vllm import api, reaper
from services.kit.process.log import get_logger

_log = get_logger(__name__)

_STALL_LIMIT_ON_CPU_SECONDS = 600.0
"""A step over long prompts took more than a minute on a CPU that did other work, too."""
_ABORT_SECONDS = 5.0
"""Bound on waiting for aborted requests to leave; milliseconds is what it takes."""
_SHUT_DOWN_SECONDS = 10.0
"""Bound on vLLM's own shutdown, which waits 4 to 5 s; then its processes are killed."""
_PROCESSES_GONE_SECONDS = 10.0
"""After vLLM's shutdown (which itself kills after 5 s) its processes get this long to end."""


class VllmEngine:
    """One vLLM engine; its processes are children of this one.

    `model` is a folder or a Hugging Face name, `served_name` and `aliases` what users call it,
    `engine_args` go to vLLM unread. `default_max_tokens` is what a line generates that does not say
    how many.
    """

    name = "vllm"

    def __init__(
        self,
        *,
        model: str,
        served_name: str,
        aliases: Sequence[str] = (),
        engine_args: Sequence[str] = (),
        default_max_tokens: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.seats = 1  # known once started
        self.stall_limit_seconds = STALL_LIMIT_SECONDS
        self.endpoints: frozenset[str] = frozenset()
        self.context_length: int | None = None
        ours = [] if default_max_tokens is None else [f"default_max_tokens={default_max_tokens}"]
        self.revision = api.revision_of(model, [*engine_args, *ours])
        self._default_max_tokens = default_max_tokens
        self._model = model
        self._served_names = (served_name, *aliases)
        self._engine_args = list(engine_args)
        self._clock = clock
        self._llm: Any = None
        self._served: dict[str, api.Served] = {}
        self._calls: dict[str, tuple[asyncio.Future[EngineResponse], asyncio.Task[None]]] = {}
        self._processes: dict[int, psutil.Process] = {}
        self._reaper: subprocess.Popen[bytes] | None = None
        self._last_step_at = clock()
        self._busy_since = clock()

    @property
    def in_flight(self) -> int:
        """Requests submitted and not yet answered."""
        return len(self._calls)

    @property
    def last_step_at(self) -> float:
        """Monotonic seconds of the last step an engine core reported."""
        return self._last_step_at

    def stalled_seconds(self) -> float:
        """Seconds since the last step, or since there is work if that is later."""
        if self._llm is None or not self._llm.get_num_unfinished_requests():
            return 0.0
        return max(0.0, self._clock() - max(self._last_step_at, self._busy_since))

    def check_health(self) -> None:
        """Raise `EngineDead` if a process of the engine died or it was not started."""
        if self._llm is None:
            raise EngineDead("vLLM is not running")
        if self._llm.errored:
            raise EngineDead("vLLM's engine process died")

    async def start(self) -> None:
        """Start vLLM, after ending what is left of an earlier one. Takes 15 s at the least.

        Raises `EngineStartError`.
        """
        await self.close()
        api.set_environment(self._model)
        others = {process.pid for process in psutil.Process().children(recursive=True)}
        starting = asyncio.create_task(asyncio.to_thread(self._start_llm))
        try:
            # The loop stays free, and the reaper hears of each process while it comes up.
            while not starting.done():
                await asyncio.wait([starting], timeout=0.5)
                self._note_processes(others)
            arguments, self._llm = starting.result()
            self._served = await api.serve(self._llm, arguments)
        except BaseException as error:
            await _to_its_end(self._settle(starting, others))
            await self.close()
            if isinstance(error, EngineError) or not isinstance(error, Exception):
                raise
            raise EngineStartError(f"vLLM did not start: {error}") from error
        self.endpoints = frozenset(self._served)
        self.seats = api.seats_of(self._llm)
        if api.runs_on_cpu():
            self.stall_limit_seconds = _STALL_LIMIT_ON_CPU_SECONDS
        self.context_length = int(self._llm.model_config.max_model_len)
        self._last_step_at = self._clock()

    def submit(self, request: EngineRequest) -> asyncio.Future[EngineResponse]:
        """Answer one request; it is in vLLM's queue as soon as the loop has gone round."""
        if request.request_id in self._calls:
            raise ValueError(f"request id {request.request_id} is in flight already")
        if not self._calls:
            self._busy_since = self._clock()
        future: asyncio.Future[EngineResponse] = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(self._run(request, future))
        self._calls[request.request_id] = (future, task)
        future.add_done_callback(partial(self._leave, request.request_id, task))
        task.add_done_callback(partial(_pass_on, future))
        return future

    def submit_many(self, requests: Sequence[EngineRequest]) -> list[Answer]:
        """Answer many; vLLM runs them in this order."""
        return [self.submit(request) for request in requests]

    async def abort(self, request_ids: Iterable[str]) -> None:
        """Abort these; returns when they have left the engine."""
        calls = [self._calls[name] for name in request_ids if name in self._calls]
        await self._abort_calls(calls, RequestAborted, "aborted")

    async def close(self) -> None:
        """Abort what is in flight and end vLLM's processes, in up to 15 s."""
        llm, self._llm = self._llm, None
        await self._abort_calls(list(self._calls.values()), RequestAborted, "the engine was closed")
        if llm is not None:
            self._served = {}
            await self._shut_down(llm)
        if self._processes:
            await asyncio.to_thread(self._end_processes, _PROCESSES_GONE_SECONDS)
        if self._reaper is not None:
            assert self._reaper.stdin is not None
            self._reaper.stdin.close()
            await asyncio.to_thread(self._reaper.wait)
            self._reaper = None

    async def _run(self, request: EngineRequest, future: asyncio.Future[EngineResponse]) -> None:
        """Settle `future`, unless an abort did so first.

        vLLM's serving classes swallow the CancelledError of an abort and return an ordinary
        400; that answer finds the future settled and is dropped.
        """
        try:
            response = await self._answer(request)
        except EngineDead:
            for other, _ in list(self._calls.values()):
                _fail(other, EngineDead("vLLM's engine process died"))
            return
        if not future.done():
            future.set_result(response)

    async def _answer(self, request: EngineRequest) -> EngineResponse:
        self.check_health()
        served = self._served.get(request.endpoint)
        if served is None:
            return refusal(f"This model does not serve {request.endpoint}.", param="model")
        try:
            body = guarded_body(request, default_max_tokens=self._tokens())
            answer = await served.call(served.validate(body))
        except BodyRefused as refused:
            return refused.response
        except Exception as error:
            # A dead engine comes in several shapes; what it says is never a line's result.
            self.check_health()
            if isinstance(error, api.find("EngineDeadError")):
                raise EngineDead(str(error)) from error
            return api.failure(error)
        response = api.response_of(answer)
        if response.status >= 500:
            self.check_health()
        return response

    def _tokens(self) -> int | None:
        """The default as far as the model goes: vLLM refuses what is longer than its context."""
        if self._default_max_tokens is None or self.context_length is None:
            return self._default_max_tokens
        return min(self._default_max_tokens, self.context_length)

    def _leave(
        self, request_id: str, task: asyncio.Task[None], future: asyncio.Future[Any]
    ) -> None:
        """The call is over for its caller; where that came early, for the engine too."""
        del self._calls[request_id]
        if future.cancelled():
            task.cancel()

    async def _abort_calls(
        self,
        calls: Sequence[tuple[asyncio.Future[EngineResponse], asyncio.Task[None]]],
        error: type[EngineError],
        message: str,
    ) -> None:
        for future, task in calls:
            _fail(future, error(message))
            task.cancel()
        if calls:
            await asyncio.wait([task for _, task in calls], timeout=_ABORT_SECONDS)

    def _start_llm(self) -> tuple[Any, Any]:
        """In a thread: imports and process starts take 15 s and more."""
        self._reaper = subprocess.Popen(
            [sys.executable, str(Path(reaper.__file__))],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        with _stdout_to_stderr():
            arguments = api.parse_arguments(self._model, self._served_names, self._engine_args)
            return arguments, api.make_llm(arguments, self._on_step)

    async def _shut_down(self, llm: Any) -> None:
        """vLLM's own way, and by force where that takes too long or our caller waits no more."""
        ending = asyncio.create_task(asyncio.to_thread(api.shut_down, llm))
        ending.add_done_callback(_log_failure)
        try:
            await asyncio.wait([ending], timeout=_SHUT_DOWN_SECONDS)
        finally:
            if not ending.done():
                # Its thread ends once they are gone.
                for process in self._processes.values():
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.kill()

    def _on_step(self) -> None:
        self._last_step_at = self._clock()

    async def _settle(self, starting: asyncio.Task[tuple[Any, Any]], others: set[int]) -> None:
        """A start that was cancelled still runs in its thread: end what comes of it."""
        while not starting.done():
            # Again and again: it may be importing still, and start its processes only then.
            self._note_processes(others)
            await asyncio.to_thread(self._end_processes, 0.0)
            await asyncio.wait([starting], timeout=0.2)
        self._note_processes(others)
        with contextlib.suppress(Exception):
            _, self._llm = starting.result()

    def _note_processes(self, others: set[int]) -> None:
        """Remember the engine's processes, here and in the reaper: all children but `others`."""
        known = others | self._processes.keys() | ({self._reaper.pid} if self._reaper else set())
        for process in psutil.Process().children(recursive=True):
            if process.pid in known:
                continue
            with contextlib.suppress(psutil.Error, OSError):
                # Python's own resource tracker serves this process to its end.
                if "resource_tracker" in " ".join(process.cmdline()):
                    continue
                self._processes[process.pid] = process
                if self._reaper is not None and self._reaper.stdin is not None:
                    self._reaper.stdin.write(b"%d\n" % process.pid)
                    self._reaper.stdin.flush()

    def _end_processes(self, grace_seconds: float) -> None:
        processes = list(self._processes.values())
        self._processes.clear()
        _, alive = psutil.wait_procs(processes, timeout=grace_seconds)
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(alive, timeout=_PROCESSES_GONE_SECONDS)


def _log_failure(ending: asyncio.Task[None]) -> None:
    if not ending.cancelled() and (error := ending.exception()) is not None:
        _log.warning("shutdown_failed", error=f"{type(error).__name__}: {error}")


async def _to_its_end(work: Coroutine[Any, Any, None]) -> None:
    """Await `work` however often we are cancelled meanwhile: processes hang on it."""
    task = asyncio.create_task(work)
    while not task.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.shield(task)


def _pass_on(future: asyncio.Future[EngineResponse], task: asyncio.Task[None]) -> None:
    """Let no caller wait for a task that has ended."""
    error = None if task.cancelled() else task.exception()
    # Without an error the future is settled, unless the task was cancelled by no abort of ours,
    # as a loop that ends does.
    _fail(future, error or RequestAborted("the engine's task was cancelled"))


def _fail(future: asyncio.Future[EngineResponse], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
        future.exception()  # an awaitable left unawaited is no fault: nothing is to be logged


@contextlib.contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """Libraries of the engine's processes print to standard output, which is not theirs.

    The children inherit the descriptor that stands while they start.
    """
    sys.stdout.flush()
    saved = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(saved, 1)
        os.close(saved)
