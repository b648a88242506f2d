"""Commands on webhooks: who is told of a batch's end, what became of it, and once more."""

import sys
from typing import Any, Final, Literal, cast

import click
import openai

from services.cli.shared.openai_client import (
    REFUSED,
    errors_explained,
    fail,
    id_argument,
    open_client,
    server_options,
)
from services.cli.shared.table import local_time, print_object, print_table

EventType = Literal["batch.completed", "batch.failed", "batch.expired", "batch.cancelled"]

_STATES: Final = ("pending", "delivered", "given_up")

_json_option = click.option("--json", "as_json", is_flag=True, help="For programs: JSON lines.")


@click.group()
def webhooks() -> None:
    """Have a server of yours told when batches end."""


@webhooks.command()
@click.argument("url")
@click.option("--name", default="", help="For people.  [default: the URL]")
@click.option(
    "--event", "events", multiple=True, help="Such as batch.failed; repeatable.  [default: all]"
)
@_json_option
@server_options
def create(
    *, url: str, name: str, events: tuple[str, ...], as_json: bool, base_url: str, api_key: str
) -> None:
    """Have events posted to URL, and print the secret that signs them: it is shown this once."""
    client = open_client(base_url, api_key)
    with errors_explained(base_url):
        wanted = list(events) or client.webhooks.event_types.list().data
        made = client.webhooks.create(
            # Which events there are is the server's to say.
            event_types=cast(Any, wanted),
            name=name or url[:256],
            url=url,
        )
    if as_json:
        print_object(made.to_dict())
        return
    print(f"nightshift: {made.id}; keep its secret, it is not shown again", file=sys.stderr)
    print(made.signing_secret)


@webhooks.command(name="list")
@_json_option
@server_options
def list_endpoints(*, as_json: bool, base_url: str, api_key: str) -> None:
    """List endpoints, newest first."""
    client = open_client(base_url, api_key)
    with errors_explained(base_url):
        found = list(client.webhooks.list(limit=100))
    if as_json:
        for endpoint in found:
            print_object(endpoint.to_dict())
        return
    head = ("ID", "URL", "EVENTS", "SECRET", "CREATED")
    rows = [
        (
            endpoint.id,
            endpoint.url,
            " ".join(endpoint.event_types),
            endpoint.signing_secret_hint or "",
            local_time(endpoint.created_at),
        )
        for endpoint in found
    ]
    print_table([head, *rows])


@webhooks.command()
@id_argument("endpoint_id")
@server_options
def delete(*, endpoint_id: str, base_url: str, api_key: str) -> None:
    """Remove an endpoint; what waits to be sent to it is given up."""
    client = open_client(base_url, api_key)
    with errors_explained(base_url):
        gone = client.webhooks.delete(endpoint_id)
    print(f"removed {gone.id}")


@webhooks.command()
@id_argument("endpoint_id")
@click.option("--keep-old", is_flag=True, help="Sign with the old secret too for 24 hours.")
@_json_option
@server_options
def rotate(*, endpoint_id: str, keep_old: bool, as_json: bool, base_url: str, api_key: str) -> None:
    """Make a new secret for an endpoint and print it: it is shown this once."""
    client = open_client(base_url, api_key)
    with errors_explained(base_url):
        made = client.webhooks.rotate_secret(
            endpoint_id, keep_old_secret_active_for_24_hours=keep_old
        )
    if as_json:
        print_object(made.to_dict())
    else:
        print(made.signing_secret)


@webhooks.command()
@id_argument("endpoint_id")
@click.option("--event", default="batch.completed", show_default=True)
@_json_option
@server_options
def test(*, endpoint_id: str, event: str, as_json: bool, base_url: str, api_key: str) -> None:
    """Send a sample event to an endpoint and say what it answered.

    Exit status: 0 where it took it, 1 otherwise.
    """
    client = open_client(base_url, api_key)
    with errors_explained(base_url):
        answer = client.webhooks.test(endpoint_id, event_type=cast(EventType, event))
    if as_json:
        print_object(answer.to_dict())
    if not 200 <= answer.status_code < 300:
        fail(f"{endpoint_id} answered {answer.status_code}; only a 2xx counts", REFUSED)
    if not as_json:
        print(f"{endpoint_id} answered {answer.status_code}")


@webhooks.command()
@click.option("--endpoint", default="", help="Only those to this endpoint.")
@click.option("--state", type=click.Choice(_STATES), help="Only those in this state.")
@click.option("--limit", type=click.IntRange(1, 100), default=20, show_default=True)
@_json_option
@server_options
def deliveries(
    *,
    endpoint: str,
    state: str | None,
    limit: int,
    as_json: bool,
    base_url: str,
    api_key: str,
) -> None:
    """List what was sent or is to be, newest first; ended ones for 30 days."""
    query = {"limit": str(limit), "webhook_endpoint_id": endpoint, "state": state or ""}
    client = open_client(base_url, api_key)
    with errors_explained(base_url):
        answer = client.get("/webhook_deliveries", cast_to=object, options={"params": query})
    _show(answer, as_json=as_json)


@webhooks.command()
@click.argument("wanted", metavar="EVENT_OR_DELIVERY")
@_json_option
@server_options
def redeliver(*, wanted: str, as_json: bool, base_url: str, api_key: str) -> None:
    """Send a delivery (wh_…), or all of an event (evt_…), once more, at once.

    The receiver sees the same `webhook-id` as before.
    """
    client = open_client(base_url, api_key)
    with errors_explained(base_url):
        answer = _redeliver(client, wanted)
    _show(answer, as_json=as_json)


def _redeliver(client: openai.OpenAI, wanted: str) -> object:
    if not wanted.replace("_", "").isalnum():
        fail(f"'{wanted}' is neither a delivery (wh_…) nor an event (evt_…)", REFUSED)
    return client.post(f"/webhook_deliveries/{wanted}/redeliver", cast_to=object)


def _show(answer: object, *, as_json: bool) -> None:
    found = cast(dict[str, list[dict[str, Any]]], answer)["data"]
    if as_json:
        for delivery in found:
            print_object(delivery)
        return
    head = ("ID", "EVENT", "TYPE", "ENDPOINT", "STATE", "TRIES", "LAST", "CREATED")
    print_table([head, *map(_row, found)])


def _row(delivery: dict[str, Any]) -> tuple[str, ...]:
    last = delivery["last_error"] or str(delivery["last_status_code"] or "")
    return (
        delivery["id"],
        delivery["event_id"],
        delivery["event_type"],
        delivery["webhook_endpoint_id"],
        delivery["state"],
        str(delivery["attempts"]),
        last,
        local_time(delivery["created_at"]),
    )
