"""`turtlemq cluster …`: make a cluster, look at it, and act on it. Tables of `status` are made in `cluster_status`.

Verbs that servers carry out go to one of them by HTTP. Verbs that must work without a leader change keys of the name server.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import typer

from turtlemq.cli.call import URL, CallFailed, asked, call
from turtlemq.cli.cluster_names import Endpoints, File, Name, Names, signed, time_of_note
from turtlemq.cli.cluster_status import Picture, is_healthy, look, print_picture, shards_text
from turtlemq.cli.output import confirm, console, fail, format_bytes, new_table, print_json, print_table, printable
from turtlemq.cli.parameters import AsJson, Url, Yes, duration_option
from turtlemq.cli.placeholders import Verbs
from turtlemq.cli.times import format_time

if TYPE_CHECKING:
    from turtlemq.replica.cluster_view import ClusterView
    from turtlemq.replica.interventions import Plan

app = typer.Typer(no_args_is_help=True, cls=Verbs)

Shard = Annotated[int, typer.Argument(help="The number of the shard, from 0 on.", min=0, show_default=False)]


def _a_name(given: str) -> str:
    if not given.strip():
        raise typer.BadParameter("the name of a node is missing; 'turtlemq cluster status' shows all names")
    return given


Node = Annotated[str, typer.Argument(help="The name of a node.", show_default=False, callback=_a_name)]
ASK_S = 3.0  # for the answer of one node
LEAD_S = 30.0  # in which a forced leader should lead
STUCK = "stuck"  # state of a replica that does nothing until its process is started again


@app.command()
def init(
    replicas: Annotated[int, typer.Option(help="Copies of each shard, on as many nodes.", show_default=False)],
    min_isr: Annotated[
        int, typer.Option("--min-isr", help="Copies in sync without which nothing is written. (default: half, rounded up)")
    ] = 0,
    shards: Annotated[int, typer.Option(help="Parts of the topics, each led by a node of its own; fixed for good.")] = 1,
    data: Annotated[
        Path | None,
        typer.Option("--from", metavar="DIR", help="A stopped single node's data folder: it becomes the first copy, here."),
    ] = None,
    config: File = None,
    etcd: Endpoints = None,
    name: Name = "",
    as_json: AsJson = False,
) -> None:
    """Make a cluster: its shape is written to etcd, once, and never changes. Nodes join when they start.

    turtlemq cluster init --replicas 3 --config node-a.toml

    turtlemq cluster init --shards 4 --replicas 2 --config node-a.toml

    turtlemq cluster init --replicas 2 --from data --config node-a.toml
    """
    from turtlemq.errors import InvalidArgument
    from turtlemq.replica.cluster_init import Shape, init_cluster

    names, shape = Names(config, etcd, name), Shape(shards, replicas, min_isr)
    try:
        shape.config("0")
    except InvalidArgument as error:
        fail(str(error), 2)
    if data is not None and shards > 1:
        fail("--from works with one shard only: a folder of messages becomes the first copy of that shard", 2)
    first = "" if data is None else _adopt(names, data)
    made = names.run(lambda server: init_cluster(server, names.options.name, shape, first))
    shown = {key: getattr(made.config, key) for key in ("shards", "replicas", "min_isr")}
    told = f"{shards_text(shown['shards'])}, {shown['replicas']} replicas, min_isr {shown['min_isr']}"
    if not made.is_new:
        fail(f"cluster {names.options.name!r} exists already: {told}. Nothing was done.")
    if as_json:
        print_json({"cluster": names.options.name, "id": made.config.id, **shown, "first": first or None})
        return
    print(f"cluster {names.options.name}: {told}")
    print("start each node with: turtlemq serve --config FILE")


def _adopt(names: Names, data: Path) -> str:
    """Let a single node's folder become the first copy. Returns the node that has it."""
    from turtlemq.errors import TurtleError
    from turtlemq.replica import first_copy
    from turtlemq.storage.door import Door

    if names.config is None:
        fail("--from needs --config: the first copy belongs to that node, in its data folder", 2)
    found = names.run(lambda server: server.get(names.keys.config)).keys
    if found:
        fail(f"cluster {names.options.name!r} exists already. Nothing was done.")
    door = Door(folder_mode=int(names.config.data_mode, 8))
    try:
        copy = first_copy.adopt(door, data, Path(names.config.data), names.options.name)
    except TurtleError as error:
        fail(str(error))
    except OSError as error:
        fail(f"{error.filename or data}: {error.strerror or error}")
    console(stderr=True).print(f"the messages of {data} are in {copy} now: start node {names.options.node} first")
    return str(names.options.node)


@app.command()
def status(
    watch: Annotated[bool, typer.Option("--watch", help="Show it again every second, until Ctrl-C.")] = False,
    every: Annotated[float, duration_option("With --watch: how often.", show_default=True)] = 1,
    check: Annotated[
        bool, typer.Option("--check", help="Exit with 1 unless each shard has a leader and all its copies are in sync.")
    ] = False,
    config: File = None,
    etcd: Endpoints = None,
    name: Name = "",
    url: Url = URL,
    as_json: AsJson = False,
) -> None:
    """Nodes, shards, leaders, copies in sync, lag, progress of copies, clocks.

    Any node is asked, at --url; with --config or --etcd, the name server, which also works if no node answers.

    turtlemq cluster status

    turtlemq cluster status --etcd http://127.0.0.1:2379 --name prod --json
    """
    names = Names(config, etcd, name) if config or etcd or name else None
    if not watch:
        picture = look(url, names)
        if names is not None and not picture.topology["shards"]:
            fail(f"etcd holds no cluster {names.options.name!r}. Correct the name, or make it: turtlemq cluster init --help")
        print_json(picture.plain()) if as_json else print_picture(picture)
        raise typer.Exit(0 if not check or is_healthy(picture) else 1)
    try:
        while True:
            _show_again(look(url, names), as_json)
            time.sleep(max(every, 0.1))
    except KeyboardInterrupt:
        return


def _show_again(picture: Picture, as_json: bool) -> None:
    if as_json:
        print_json(picture.plain())
        return
    out = console()
    if out.is_terminal:
        out.clear()
    print_picture(picture)


@app.command()
def handover(shard: Shard, node: Node, url: Url = URL, as_json: AsJson = False) -> None:
    """Let another node lead a shard. It must be in sync; nothing is lost, and requests wait for less than a second.

    turtlemq cluster handover 0 node-b
    """
    answer = call(url, "POST", f"/v1/cluster/shards/{shard}/handover", {"to": node})
    print_json(answer) if as_json else print(f"{node} leads shard {shard}")


@app.command()
def drain(
    node: Node,
    wait: Annotated[float, duration_option("How long to wait until it leads nothing.", show_default=True)] = 30,
    url: Url = URL,
    as_json: AsJson = False,
) -> None:
    """Let a node lead nothing, as before its upgrade or removal. Its copies stay. Exits with 1 if it still leads in the end.

    turtlemq cluster drain node-a
    """
    answer = call(url, "POST", f"/v1/cluster/nodes/{quote(node, safe='')}/drain")
    end = time.monotonic() + wait
    while answer["leads"] and time.monotonic() < end:
        time.sleep(0.2)
        places = call(url, "GET", "/v1/cluster")["leaders"]
        answer["leads"] = [place["shard"] for place in places if place["node"] == node or place["node"] is None]
    print_json(answer) if as_json else print(_drained(node, answer))
    raise typer.Exit(1 if answer["leads"] else 0)


@app.command()
def undrain(node: Node, url: Url = URL, as_json: AsJson = False) -> None:
    """Let a drained node lead again.

    turtlemq cluster undrain node-a
    """
    answer = call(url, "DELETE", f"/v1/cluster/nodes/{quote(node, safe='')}/drain")
    print_json(answer) if as_json else print(f"{node} {answer['outcome']}")


def _drained(node: str, answer: dict[str, Any]) -> str:
    shards = ", ".join(map(str, answer["leads"]))
    return f"{node} {answer['outcome']}" + (f"; no other node leads shard {shards} yet: is one in sync?" if shards else "")


@app.command()
def remove(
    node: Node,
    yes: Yes = False,
    config: File = None,
    etcd: Endpoints = None,
    name: Name = "",
    as_json: AsJson = False,
) -> None:
    """Take a node out of the cluster. It must not lead, nor be needed for min_isr, unless it is gone for good.

    In a cluster of several shards, its copies are made on other nodes first: 'turtlemq cluster status' shows when it has none.

    turtlemq cluster remove node-c --config node-a.toml
    """
    from turtlemq.replica.intervene import intervene
    from turtlemq.replica.interventions import plan_leave, plan_remove

    def plan_of(view: ClusterView) -> Plan | None:
        is_sharded = view.config is not None and view.config.shards > 1
        return plan_leave(view, node, by) if is_sharded else plan_remove(view, 0, node, by)

    names = Names(config, etcd, name)
    confirm(f"Take the node {node!r} out of cluster {names.options.name!r}? Its copy no longer counts.", yes)
    by = signed("remove", time_of_note(names), node=node)
    done = names.run(lambda server: intervene(server, names.keys, plan_of))
    moves = done.view.config is not None and done.view.config.shards > 1
    outcome = "not part of it" if done.plan is None else "leaves" if moves else "removed"
    alive = node in done.view.nodes
    if as_json:
        print_json({"node": node, "outcome": outcome, "alive": alive})
        return
    print(f"{node} {outcome}")
    if done.plan is not None and moves:
        print("its copies are made on other nodes: stop it when 'turtlemq cluster status' shows none of them there")
    elif done.plan is not None and alive:
        print(f"it is drained, too, so that it does not come back by itself: stop it, or 'turtlemq cluster undrain {node}'")


@app.command()
def verify(shard: Shard, url: Url = URL, as_json: AsJson = False) -> None:
    """Compare every byte of all copies of a shard, at the same record. Exits with 1 if one differs, or was not reached.

    turtlemq cluster verify 0
    """
    target = f"/v1/cluster/shards/{shard}/verify"
    answer = call(url, "POST", target)
    while answer["state"] == "running":
        out = console(stderr=True)
        if out.is_terminal:
            out.print(f"{format_bytes(answer['bytes'])} of {format_bytes(answer['bytes_total'])} compared")
        time.sleep(1)
        answer = call(url, "GET", target)
    equal = answer["state"] == "done" and all(copy["state"] == "equal" for copy in answer["copies"])
    print_json(answer) if as_json else _print_comparison(answer)
    raise typer.Exit(0 if equal else 1)


def _print_comparison(answer: dict[str, Any]) -> None:
    if answer["state"] != "done":
        fail(f"the comparison failed: {answer['why']}")
    print(f"{answer['files']:,} files, {format_bytes(answer['bytes'])}, at record {answer['last_lsn']:,}")
    table = new_table("node", "copy", "state", "", left=4)
    for copy in answer["copies"]:
        table.add_row(copy["node"], copy["replica"][:8], copy["state"], printable(copy["why"]))
    print_table(table)
    for copy in answer["copies"]:
        for file in copy["files"]:
            ranges = ", ".join(f"{start:,} to {end:,}" for start, end in file["ranges"])
            console().print(printable(f"{copy['node']}: {file['path']}: {file['why']} ({ranges})"), style="red")


@app.command()
def offsets(
    config: File = None,
    etcd: Endpoints = None,
    name: Name = "",
    as_json: AsJson = False,
) -> None:
    """Committed offsets of all groups, as leaders wrote them to the name server: at most some seconds old.

    turtlemq cluster offsets --config node-a.toml
    """
    from turtlemq.replica.intervene import read_view

    names = Names(config, etcd, name)
    view = names.run(lambda server: read_view(server, names.keys))
    seen = {number: shard.seen for number, shard in view.shards.items() if shard.seen is not None}
    if as_json:
        rows = {
            n: {"lsn": one.lsn, "at_ms": one.at_ms, "topics": one.topics, "left_out": one.left_out} for n, one in seen.items()
        }
        print_json({"cluster": names.options.name, "shards": {str(number): row for number, row in rows.items()}})
        return
    table = new_table("topic", "group", "shard", "offset", left=2)
    for number, one in seen.items():
        for topic, groups in one.topics.items():
            for group, offset in groups.items():
                table.add_row(topic, group, str(number), f"{offset:,}")
    print_table(table)
    for number, one in seen.items():
        left = f"; {one.left_out:,} topics did not fit" if one.left_out else ""
        print(f"shard {number}: at record {one.lsn:,}, {format_time(one.at_ms)}{left}")
    if not seen:
        print("no leader has written any yet")


@app.command("force-leader")
def force_leader(
    shard: Shard,
    node: Node,
    accept: Annotated[bool, typer.Option("--i-accept-loss", help="Answers that only lost copies have are gone.")] = False,
    config: File = None,
    etcd: Endpoints = None,
    name: Name = "",
    url: Url = URL,
    as_json: AsJson = False,
) -> None:
    """The last resort: let a copy lead that is not in sync, when all copies in sync are lost for good.

    Says which messages may be lost; does nothing without --i-accept-loss. Switch off the lost nodes for good first: if they are
    only cut off, they may still answer. It is written down: see 'turtlemq cluster audit'.

    turtlemq cluster force-leader 0 node-c --config node-a.toml --i-accept-loss
    """
    from turtlemq.errors import TurtleError
    from turtlemq.replica.intervene import carry_out, read_view
    from turtlemq.replica.interventions import plan_force

    names = Names(config, etcd, name)
    view = names.run(lambda server: read_view(server, names.keys))
    by, copies = signed("force-leader", time_of_note(names), shard=str(shard), node=node), _copies(view, shard)
    try:
        forced = plan_force(view, shard, node, copies, by)
    except TurtleError as error:
        fail(str(error))
    for line in forced.losses:
        console(stderr=True).print(printable(line), style="yellow")
    if not accept:
        fail("nothing was done. Say --i-accept-loss if this copy shall lead.", 2)
    if not names.run(lambda server: carry_out(server, forced.plan)):
        fail("the shard has changed meanwhile; nothing was done. Look at 'turtlemq cluster status', and try again.")
    is_stuck = copies[node].state == STUCK
    leader = None if is_stuck else _wait_for_leader(names, shard)
    if as_json:
        told = {"shard": shard, "node": node, "epoch": forced.epoch, "losses": forced.losses, "leader": leader}
        print_json({**told, "restart": is_stuck})
    elif leader is not None:
        print(f"{leader} leads shard {shard}")
    elif is_stuck:
        print(f"{node} leads shard {shard} when it is started again: restart all nodes, for their replicas have stopped")
    if leader != node and not is_stuck:
        fail(f"{node} does not lead after {LEAD_S:.0f} s: its log says why")


def _copies(view: ClusterView, shard: int) -> dict[str, Any]:
    """The copies of a shard whose processes answer, by node."""
    from turtlemq.replica.interventions import CopyFacts
    from turtlemq.replica.topology import shard_url

    copies = {}
    for name, node in view.nodes.items():
        url = node.url if view.config is None or view.config.shards == 1 else shard_url(node.url, shard)
        try:
            told = json.loads(asked(url, "GET", "/v1/cluster/replica", timeout_s=ASK_S))
        except (CallFailed, ValueError):
            continue
        copies[name] = CopyFacts(told["replica"], told["complete"], told["healthy"], told["epoch"], told["lsn"], told["state"])
    return copies


def _wait_for_leader(names: Names, shard: int) -> str | None:
    """The node that leads within LEAD_S."""
    from turtlemq.replica.intervene import read_view

    end = time.monotonic() + LEAD_S
    while time.monotonic() < end:
        lead = names.run(lambda server: read_view(server, names.keys)).shard(shard).lead
        if lead is not None:
            return lead.node
        time.sleep(0.2)
    return None


@app.command()
def audit(
    config: File = None,
    etcd: Endpoints = None,
    name: Name = "",
    as_json: AsJson = False,
) -> None:
    """Interventions that were written down, the oldest first.

    turtlemq cluster audit --config node-a.toml
    """
    from turtlemq.replica.cluster_state import Audit, decode

    names = Names(config, etcd, name)
    found = names.run(lambda server: server.get(names.keys.audits, prefix=True)).keys
    notes = [decode(one.key, one.value, Audit) for one in found]
    if as_json:
        for note in notes:
            print_json(
                {"at_ms": note.at_ms, "node": note.node, "user": note.user, "action": note.action, "details": note.details}
            )
        return
    for note in notes:
        details = ", ".join(f"{key}: {value}" for key, value in note.details.items())
        print(printable(f"{format_time(note.at_ms)}  {note.user}@{note.node}  {note.action}  {details}"))
    if not notes:
        print("none")
