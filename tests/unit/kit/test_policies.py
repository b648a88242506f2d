"""Each RPC of the wire has one row in the table of call policies, and no row is left over."""

import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.protobuf.descriptor import MethodDescriptor

import protos.nightshift.v1
from services.kit.calls import rpc

pytestmark = pytest.mark.unit


def methods() -> Iterator[tuple[str, MethodDescriptor]]:
    """Return every RPC of every .proto with the name of its service."""
    for file in sorted(Path(protos.nightshift.v1.__path__[0]).glob("*.proto")):
        module = importlib.import_module(f"protos.nightshift.v1.{file.stem}_pb2")
        for service in module.DESCRIPTOR.services_by_name.values():
            for method in service.methods:
                yield service.name, method


def test_policies_cover_exactly_the_rpcs() -> None:
    assert {(service, method.name) for service, method in methods()} == set(rpc.POLICIES)


def test_unary_calls_have_deadlines_and_streams_have_none() -> None:
    for service, method in methods():
        policy = rpc.POLICIES[service, method.name]
        streams = method.client_streaming or method.server_streaming
        assert (policy.timeout_seconds is None) == streams, method.full_name
        assert not (streams and policy.repeatable), method.full_name
