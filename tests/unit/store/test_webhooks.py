"""Events, retries and addresses of webhooks, as values."""

import ipaddress
import itertools
import json

import pytest

from services.kit.wire.errors import InvalidRequestError
from services.store.domain import webhooks
from services.store.domain.state import TERMINAL, BatchStatus

pytestmark = pytest.mark.unit

HOUR_MS = 3_600_000

PUBLIC = [
    "8.8.8.8",
    "93.184.216.34",
    "2606:2800:220:1:248:1893:25c8:1946",
    "::ffff:8.8.8.8",
    "64:ff9b::808:808",
    "2002:808:808::1",
]
NOT_PUBLIC = [
    "0.0.0.0",
    "0.1.2.3",
    "10.0.0.1",
    "100.64.0.1",
    "100.100.100.200",
    "127.0.0.1",
    "127.255.255.254",
    "168.63.129.16",
    "169.254.169.254",
    "172.16.0.1",
    "172.31.255.255",
    "192.0.0.9",
    "192.0.0.192",
    "192.0.2.1",
    "192.168.1.1",
    "198.18.0.1",
    "224.0.0.1",
    "239.255.255.250",
    "240.0.0.1",
    "255.255.255.255",
    "::",
    "::1",
    "::ffff:127.0.0.1",
    "::ffff:169.254.169.254",
    "::ffff:a00:1",
    "::7f00:1",
    "64:ff9b::7f00:1",
    "64:ff9b::a9fe:a9fe",
    "64:ff9b:1::1",
    "100::1",
    "2001::1",
    "2001:20::1",
    "3fff::1",
    "4000::1",
    "2001:db8::1",
    "2002:7f00:1::",
    "2002:a9fe:a9fe::1",
    "fc00::1",
    "fd00:ec2::254",
    "fe80::1",
    "fec0::1",
    "ff02::1",
]


@pytest.mark.parametrize("text", PUBLIC)
def test_addresses_of_the_internet_are_public(text: str) -> None:
    assert webhooks.is_public(ipaddress.ip_address(text))


@pytest.mark.parametrize("text", NOT_PUBLIC)
def test_no_other_address_is_public(text: str) -> None:
    assert not webhooks.is_public(ipaddress.ip_address(text))


@pytest.mark.parametrize(
    "url",
    [
        "https://example.com",
        "https://example.com:8443/a/b?c=d",
        "https://8.8.8.8/hook",
        "https://[2606:2800:220:1:248:1893:25c8:1946]/hook",
        "https://xn--bcher-kva.example/",
    ],
)
def test_public_https_addresses_are_taken(url: str) -> None:
    webhooks.check_url(url, allow_private=False)
    webhooks.check_url(url, allow_private=True)


PRIVATE_URLS = [
    "http://example.com/",
    "https://localhost/",
    "https://a.localhost/",
    "https://127.0.0.1/",
    "https://[::1]/",
    "https://[::ffff:10.0.0.1]/",
    "https://169.254.169.254/latest/meta-data",
]


@pytest.mark.parametrize("url", PRIVATE_URLS)
def test_private_and_plain_addresses_need_a_setting(url: str) -> None:
    with pytest.raises(InvalidRequestError, match="Invalid 'url'") as refused:
        webhooks.check_url(url, allow_private=False)
    assert refused.value.param == "url"
    webhooks.check_url(url, allow_private=True)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "example.com",
        "//example.com/",
        "ftp://example.com/",
        "file:///etc/passwd",
        "https://",
        "https:///path",
        "https://user@example.com/",
        "https://user:password@example.com/",
        "https://@example.com/",
        "https://example.com/#part",
        "https://example.com:0/",
        "https://example.com:65536/",
        "https://example.com:port/",
        "https://[::1/",
        "https://bücher.example/",
        "https://\uff11\uff12\uff17.0.0.1/",
        "https://example.com/\r\nwebhook-id: x",
        "https://example.com/a b",
        "https://example.com/\0",
        f"https://example.com/{'a' * webhooks.MAX_URL}",
    ],
)
def test_what_is_no_address_is_never_taken(url: str) -> None:
    for allow_private in (False, True):
        with pytest.raises(InvalidRequestError):
            webhooks.check_url(url, allow_private=allow_private)


def test_every_end_of_a_batch_has_its_event() -> None:
    assert set(webhooks.EVENT_TYPES) == TERMINAL
    assert {f"batch.{status.value}" for status in TERMINAL} == set(webhooks.EVENT_TYPES.values())


def test_a_payload_is_thin_and_always_the_same() -> None:
    event = webhooks.event_id("batch_0123")
    body = webhooks.payload(event, webhooks.EVENT_TYPES[BatchStatus.EXPIRED], "batch_0123", 7)
    assert json.loads(body) == {
        "id": "evt_0123",
        "object": "event",
        "created_at": 7,
        "type": "batch.expired",
        "data": {"id": "batch_0123"},
    }
    assert webhooks.delivery_id("we_1", event) == webhooks.delivery_id("we_1", event)
    assert webhooks.delivery_id("we_1", event) != webhooks.delivery_id("we_2", event)


@pytest.mark.parametrize("chance", [0.0, 0.5, 1.0])
def test_waits_grow_and_end_after_72_hours(chance: float) -> None:
    now_ms, tries, waits = 0, 1, []
    while (next_ms := webhooks.next_try_ms(now_ms, 0, tries, chance)) is not None:
        waits.append(next_ms - now_ms)
        now_ms = next_ms
        tries += 1
    assert 2_500 <= waits[0] <= 5_000
    assert all(later >= earlier for earlier, later in itertools.pairwise(waits[:-1]))
    assert max(waits) <= 6 * HOUR_MS
    # The last attempt is made when the time is over, and none after it.
    assert now_ms == 72 * HOUR_MS
    assert 20 < tries < 50


def test_a_secret_shows_only_its_end() -> None:
    secret = webhooks.new_secret(bytes(range(32)))
    assert secret == "whsec_AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8="
    assert webhooks.hint(secret) == f"whsec_…{secret[-5:-1]}"
    assert len(webhooks.hint(secret)) == len("whsec_…") + 4


def test_event_types_are_judged_and_put_in_order() -> None:
    assert webhooks.check_event_types(["batch.failed", "batch.completed", "batch.failed"]) == [
        "batch.completed",
        "batch.failed",
    ]
    for wanted in ([], ["batch.completed", "response.completed"], [""]):
        with pytest.raises(InvalidRequestError, match=r"'batch\.completed', 'batch\.failed'"):
            webhooks.check_event_types(wanted)


@pytest.mark.parametrize("name", ["", "a" * 257, "a\0b", "a\nb", "\x1b[2J"])
def test_names_that_do_not_fit_are_refused(name: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        webhooks.check_name(name)
    assert refused.value.param == "name"
