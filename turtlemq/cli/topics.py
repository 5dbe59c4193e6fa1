"""`turtlemq topics …` and `turtlemq groups …`: list, create, change and delete topics and consumer groups."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from turtlemq.cli.call import URL, call, path
from turtlemq.cli.output import confirm, fail, format_bytes, new_table, print_json, print_table
from turtlemq.cli.parameters import STATES, AsJson, GroupName, OneGroup, Settings, Topic, Url, Yes, choice
from turtlemq.cli.placeholders import Verbs
from turtlemq.cli.times import TIME_HELP, parse_time

app = typer.Typer(invoke_without_command=True, cls=Verbs)
groups = typer.Typer(no_args_is_help=True, cls=Verbs)


@app.callback()
def topics(context: typer.Context, url: Url = URL, as_json: AsJson = False) -> None:
    """Topics: list them (without a verb), create, change settings, delete.

    turtlemq topics
    """
    if context.invoked_subcommand is None:
        _list(url, as_json)


@app.command("list")
def list_topics(url: Url = URL, as_json: AsJson = False) -> None:
    """List all topics with their figures."""
    _list(url, as_json)


def _list(url: str, as_json: bool) -> None:
    topics = call(url, "GET", path())["topics"]
    if as_json:
        print_json(topics)
        return
    paused = any(topic.get("paused") for topic in topics)
    table = new_table("topic", *STATES, "size", *(["paused"] if paused else []))
    for topic in topics:
        stats = topic["stats"]
        counts = (f"{stats[state]:,}" for state in STATES)
        table.add_row(topic["topic"], *counts, format_bytes(stats["bytes"]), *([_mark(topic)] if paused else []))
    print_table(table)
    if not topics:
        print("no topics yet; the first put makes one: turtlemq put orders hello")


def _mark(figures: dict[str, Any]) -> str:
    return "paused" if figures.get("paused") else ""


@app.command()
def create(
    topic: Topic,
    settings: Settings = None,
    partitions: Annotated[
        int | None,
        typer.Option(
            min=1, max=64, help="Shards of the server that share its messages; this cannot be changed later.", show_default=False
        ),
    ] = None,
    url: Url = URL,
    as_json: AsJson = False,
) -> None:
    """Create a topic, with settings of its own if you like.

    turtlemq topics create orders ttr=30 max_attempts=5

    turtlemq topics create clicks --partitions 4
    """
    if any(other["topic"] == topic for other in call(url, "GET", path())["topics"]):
        fail(f"there is a topic {topic!r} already; change it with: turtlemq topics set {topic} NAME=VALUE")
    _put(url, topic, [*(settings or []), *([f"partitions={partitions}"] if partitions is not None else [])], as_json)


@app.command("set")
def set_(topic: Topic, settings: Settings = None, url: Url = URL, as_json: AsJson = False) -> None:
    """Change settings of a topic; without any, print those in force.

    turtlemq topics set orders backoff.base=2 backoff.max=600 delivery=at-most-once
    """
    if settings:
        call(url, "GET", path(topic))  # fails if the topic does not exist: a misspelt name must not create one
        _put(url, topic, settings, as_json)
        return
    _print_settings(call(url, "GET", path(topic)), as_json)


def _put(url: str, topic: str, settings: list[str], as_json: bool) -> None:
    _print_settings(call(url, "PUT", path(topic), nested(settings)), as_json)


def nested(settings: list[str]) -> dict[str, Any]:
    """Settings of the command line as the nested object of the HTTP interface.

    >>> nested(["ttr=30", "backoff.base=2", "backoff.jitter=full"])
    {'ttr': 30, 'backoff': {'base': 2, 'jitter': 'full'}}
    """
    out: dict[str, Any] = {}
    for setting in settings:
        name, sign, text = setting.partition("=")
        if not sign or not name:
            fail(f"{setting!r} is no setting; write NAME=VALUE, such as ttr=30", 2)
        try:
            value = json.loads(text)
        except ValueError:
            value = text
        outer, dot, inner = name.partition(".")
        if dot:
            out.setdefault(outer, {})[inner] = value
        else:
            out[outer] = value
    return out


def _print_settings(topic: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(topic)
        return
    table = new_table("setting", topic["topic"], left=2)
    for name, value in topic["settings"].items():
        for inner, inner_value in value.items() if isinstance(value, dict) else [("", value)]:
            table.add_row(f"{name}.{inner}" if inner else name, str(inner_value))
    print_table(table)


@app.command()
def delete(topic: Topic, yes: Yes = False, url: Url = URL, as_json: AsJson = False) -> None:
    """Delete a topic with everything in it, for good.

    turtlemq topics delete orders --yes
    """
    confirm(f"Delete the topic {topic!r} with all its messages?", yes)
    answer = call(url, "DELETE", path(topic))
    print_json(answer) if as_json else print(f"{topic} {answer['outcome']}")


# Groups


@groups.command("list")
def list_groups(topic: Topic, url: Url = URL, as_json: AsJson = False) -> None:
    """List the groups of a topic with their figures.

    turtlemq groups list orders
    """
    stats_by_group = call(url, "GET", path(topic))["groups"]
    print_json(stats_by_group) if as_json else print_table(groups_table(stats_by_group))


def groups_table(stats_by_group: dict[str, Any]) -> Any:
    """A table of groups with their figures."""
    columns = ("ready", "reserve", "history", "dead", "lag")
    paused = any(stats.get("paused") for stats in stats_by_group.values())
    table = new_table("group", *columns, *(["paused"] if paused else []))
    for name, stats in stats_by_group.items():
        table.add_row(name, *(f"{stats[column]:,}" for column in columns), *([_mark(stats)] if paused else []))
    return table


@groups.command()
def place(
    topic: Topic,
    group: GroupName,
    start: Annotated[
        str,
        typer.Option(
            metavar="earliest|latest|TIME",
            help=f"Where it goes on; TIME is {TIME_HELP}.",
            autocompletion=choice("earliest", "latest"),
        ),
    ] = "earliest",
    url: Url = URL,
    as_json: AsJson = False,
) -> None:
    """Create a group, or move it.

    turtlemq groups place orders audit --start latest
    """
    position = start if start in ("earliest", "latest") else {"ready_ms": parse_time(start)}
    answer = call(url, "PUT", path(topic, "groups", group), {"start": position})
    stats = answer["stats"]
    print_json(answer) if as_json else print(f"{group} stands at {stats['offset']:,}, {stats['lag']:,} before the end")


@groups.command()
def replay(
    topic: Topic,
    group: GroupName,
    since: Annotated[str, typer.Option(metavar="TIME", help=f"From when on: {TIME_HELP}.", show_default=False)],
    url: Url = URL,
    as_json: AsJson = False,
) -> None:
    """Let a group see again all messages that became ready since a time, as far as history is kept. The group must exist.

    turtlemq groups replay orders audit --since -2h
    """
    call(url, "GET", path(topic, "groups", group))  # fails if it does not exist: a misspelt name must not create one
    place(topic, group, start=str(parse_time(since)), url=url, as_json=as_json)


@groups.command("delete")
def delete_group(topic: Topic, group: GroupName, yes: Yes = False, url: Url = URL, as_json: AsJson = False) -> None:
    """Forget a group, so that it holds nothing back.

    turtlemq groups delete orders audit --yes
    """
    confirm(f"Forget the group {group!r} of {topic!r}, and where it stands?", yes)
    answer = call(url, "DELETE", path(topic, "groups", group))
    print_json(answer) if as_json else print(f"{group} {answer['outcome']}")


# Pauses


def pause(topic: Topic, group: OneGroup = None, url: Url = URL, as_json: AsJson = False) -> None:
    """Deliver no messages of a topic, or to one of its groups, until it is resumed. Messages still come due, and consumers wait.

    turtlemq pause orders --group mails
    """
    _set_paused(url, topic, group, "pause", as_json)


def resume(topic: Topic, group: OneGroup = None, url: Url = URL, as_json: AsJson = False) -> None:
    """Deliver messages of a paused topic, or to a paused group, again.

    turtlemq resume orders
    """
    _set_paused(url, topic, group, "resume", as_json)


def _set_paused(url: str, topic: str, group: str | None, verb: str, as_json: bool) -> None:
    place = path(topic) if group is None else path(topic, "groups", group)
    answer = call(url, "POST", f"{place}/{verb}")
    if as_json:
        print_json(answer)
        return
    print(f"{topic if group is None else f'{topic} {group}'} is {'paused' if answer['paused'] else 'resumed'}")
    if group is not None and not answer["paused"] and call(url, "GET", path(topic)).get("paused"):
        print(f"its topic is paused, though: turtlemq resume {topic}")
