"""`turtlemq clients …`: list, register, pause and delete clients to which the server delivers by itself."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any

import typer

from turtlemq.cli.call import URL, call, path
from turtlemq.cli.output import new_table, print_json, print_table, printable
from turtlemq.cli.parameters import AsJson, Group, Topic, Url
from turtlemq.cli.placeholders import Verbs


class _Clients(Verbs):
    """`turtlemq clients TOPIC` is `turtlemq clients list TOPIC`, for a topic that is not named like one of the commands."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and self.get_command(ctx, args[0]) is None and not args[0].startswith("-"):
            args = ["list", *args]
        return super().resolve_command(ctx, args)


app = typer.Typer(no_args_is_help=True, cls=_Clients)
ClientName = Annotated[str, typer.Argument(metavar="CLIENT", help="Its name.", show_default=False)]


@app.command("list")
def list_clients(topic: Topic, url: Url = URL, as_json: AsJson = False) -> None:
    """List the clients of all groups of a topic, with URLs and with streams.

    turtlemq clients list orders (or: turtlemq clients orders)
    """
    clients = call(url, "GET", path(topic, "clients"))["clients"]
    if as_json:
        print_json(clients)
        return
    columns = "group", "client", "transport", "state", "unacked", "window", "last beat", "failures", "url or name", "last error"
    table = new_table(*columns, left=len(columns), shrink=("last error",))
    for one in clients:
        beat = datetime.fromtimestamp(one["beat_ms"] / 1000, UTC).strftime("%H:%M:%S") if one["beat_ms"] else "-"
        figures = f"{one['unacked']:,}", f"{one['window']:,}", beat, f"{one.get('failures', 0):,}"
        texts = printable(one.get("url", one["name"])), printable(one.get("last_error", ""))
        table.add_row(one["group"], one["client"], one["transport"], one["state"], *figures, *texts)
    print_table(table)


@app.command()
def register(
    topic: Topic,
    target: Annotated[str, typer.Argument(metavar="TARGET_URL", help="The URL that gets the messages.", show_default=False)],
    group: Group = "default",
    name: Annotated[str | None, typer.Option(help="Its name; a random one by default.", show_default=False)] = None,
    capacity: Annotated[int, typer.Option(help="The most messages that it has at once.")] = 16,
    ttl: Annotated[int, typer.Option(metavar="S", help="Seconds without a heartbeat until it is removed; 0: it stays.")] = 0,
    timeout: Annotated[float | None, typer.Option(metavar="S", help="Seconds for an answer.", show_default=False)] = None,
    url: Url = URL,
    as_json: AsJson = False,
) -> None:
    """Let the server send the messages of a group to a URL. Prints the secret that signs them, once.

    turtlemq clients register orders https://hooks.shop.example/orders --name shop
    """
    fields = {"url": target, "name": name, "capacity": capacity, "ttl": ttl, "timeout": timeout}
    asked = {field: value for field, value in fields.items() if value is not None}
    answer = call(url, "POST", path(topic, "groups", group, "clients"), asked)
    print_json(answer) if as_json else print(f"{answer['client']}\t{answer['secret']}")


@app.command()
def pause(topic: Topic, client: ClientName, group: Group = "default", url: Url = URL, as_json: AsJson = False) -> None:
    """Send nothing to a client for now.

    turtlemq clients pause orders shop
    """
    _set_paused(topic, client, group, True, url, as_json)


@app.command()
def resume(topic: Topic, client: ClientName, group: Group = "default", url: Url = URL, as_json: AsJson = False) -> None:
    """Send messages to a client again that was paused, or has answered 410.

    turtlemq clients resume orders shop
    """
    _set_paused(topic, client, group, False, url, as_json)


def _set_paused(topic: str, client: str, group: str, paused: bool, url: str, as_json: bool) -> None:
    answer = call(url, "PUT", path(topic, "groups", group, "clients", client), {"paused": paused})
    print_json(answer) if as_json else print(f"{client} {answer['state']}")


@app.command()
def delete(topic: Topic, client: ClientName, group: Group = "default", url: Url = URL, as_json: AsJson = False) -> None:
    """Send nothing more to a client.

    turtlemq clients delete orders shop
    """
    answer = call(url, "DELETE", path(topic, "groups", group, "clients", client))
    print_json(answer) if as_json else print(f"{client} {answer['outcome']}")
