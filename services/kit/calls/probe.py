"""Asks one service whether it takes work: `python -m services.kit.calls.probe HOST:PORT`.

For container health checks, where no other client of gRPC's health service is at hand. Each
container runs one every few seconds, so it imports gRPC and next to nothing else: most of what it
costs is the start of a process.
"""

import sys
from typing import Any, Final

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.kit.process.addresses import parse_addresses

TIMEOUT_SECONDS: Final = 9.0
"""Wait for an answer; below the time-outs that deploy/ gives a health check."""
_MORE_SECONDS: Final = 1.0
"""The same for the question what is missing."""
_NEEDS: Final = ("database", "blobs", "disk")
"""What a service may lack, as it names them to `rpc.RunningServer.set_needs`."""


def probe(target: str) -> str:
    """Return why the service at `host:port` takes no work; empty where it does."""
    with grpc.insecure_channel(target, [("grpc.enable_http_proxy", 0)]) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        if _status(stub, "", TIMEOUT_SECONDS) == health_pb2.HealthCheckResponse.SERVING:
            return ""
        lacking = [
            need
            for need in _NEEDS
            if _status(stub, f"nightshift.needs.{need}", _MORE_SECONDS)
            == health_pb2.HealthCheckResponse.NOT_SERVING
        ]
    lacks = f": {' and '.join(lacking)} cannot be used, its log says why" if lacking else ""
    return f"{target} takes no work right now{lacks}"


def _status(stub: Any, service: str, timeout_seconds: float) -> int | None:
    """Return what the health service answers for a name; None where it does not answer."""
    try:
        answer = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=timeout_seconds)
    except grpc.RpcError:
        return None
    return int(answer.status)


def main(arguments: list[str]) -> int:
    """Probe the one address given; returns 0 where it takes work, 1 where not, 2 for misuse."""
    usage = "usage: python -m services.kit.calls.probe HOST:PORT\n"
    if len(arguments) != 1:
        sys.stderr.write(usage)
        return 2
    try:
        parse_addresses(arguments[0])
    except ValueError as error:
        sys.stderr.write(f"{arguments[0]!r} is no address: {error}\n{usage}")
        return 2
    why = probe(arguments[0])
    if not why:
        return 0
    sys.stderr.write(f"{why}\n")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
