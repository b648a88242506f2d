"""Connections to the public internet only: whom users name must not be our own network."""

import asyncio
import ipaddress
import socket
import threading
from collections.abc import Iterable
from concurrent.futures import Future
from typing import Any

import httpcore2

from services.store.domain.webhooks import Address, is_public


class AddressNotAllowedError(Exception):
    """The host leads to an address that is not one of the public internet's."""


async def resolve(host: str, port: int, *, allow_private: bool) -> list[str]:
    """Return the addresses of `host`, in the order in which to try them.

    One that is not public spoils all: a name that leads to both is not an honest one. Whatever the
    system's resolver takes for an address (decimal, octal, short forms) is judged by what it means.

    Raises:
        AddressNotAllowedError: one of them is not public.
        OSError: the name is not known.
        UnicodeError: it is no name at all.
    """
    found = await _look_up(host, port)
    addresses: list[str] = []
    for *_, place in found:
        text = str(place[0])
        if not allow_private and not is_public(_address(text)):
            raise AddressNotAllowedError
        if text not in addresses:
            addresses.append(text)
    return addresses


async def _look_up(host: str, port: int) -> list[Any]:
    """Ask the system's resolver, in a thread of its own.

    The loop's threads are few, and a name whose servers are silent holds one for half a minute,
    however soon its caller gives up: whoever names such hosts would keep all others waiting. As
    many run at once as callers ask in that time.
    """
    told: Future[list[Any]] = Future()

    def ask() -> None:
        if told.set_running_or_notify_cancel():
            try:
                told.set_result(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
            except Exception as error:  # noqa: BLE001 - belongs to the caller
                told.set_exception(error)

    # A daemon: a store that stops does not wait for it.
    threading.Thread(target=ask, name="webhook-name", daemon=True).start()
    return await asyncio.wrap_future(told)


def _address(text: str) -> Address:
    # A zone, as in fe80::1%eth0, is part of the place and not of the address.
    return ipaddress.ip_address(text.partition("%")[0])


class PublicBackend(httpcore2.AsyncNetworkBackend):
    """Connects to the very addresses that were judged, so that a name cannot change in between."""

    def __init__(self, *, allow_private: bool) -> None:
        """Refuse what is not public, unless `allow_private`."""
        self._allow_private = allow_private
        self._plain = httpcore2.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109 - the library's own signature
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore2.AsyncNetworkStream:
        """Connect to the first address of `host` that answers.

        Raises:
            AddressNotAllowedError: one of them is not public.
            httpcore2.ConnectError: the name is not known, or nobody answers.
            httpcore2.ConnectTimeout: it took longer than `timeout` seconds, each.
        """
        try:
            addresses = await resolve(host, port, allow_private=self._allow_private)
        except (OSError, UnicodeError) as error:
            # The second is Python's for a label of more than 63 characters.
            raise httpcore2.ConnectError("the host's name is not known") from error
        failure: Exception = httpcore2.ConnectError("the host has no address")
        for address in addresses:
            try:
                return await self._plain.connect_tcp(
                    address, port, timeout, local_address, socket_options
                )
            except (httpcore2.ConnectError, httpcore2.ConnectTimeout) as error:
                failure = error
        raise failure

    async def sleep(self, seconds: float) -> None:
        """Wait; the pool's retries, which are off, would ask for it."""
        await asyncio.sleep(seconds)
