"""The picture that `turtlemq cluster status` shows: the topology, the leaders' views of their copies, and each node's own.

A node that does not answer in time is shown as such: the others are asked all the same.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from turtlemq.cli.call import CallFailed, asked, call
from turtlemq.cli.output import console, format_bytes, new_table, print_table, printable
from turtlemq.cli.times import format_duration

if TYPE_CHECKING:
    from turtlemq.cli.cluster_names import Names

ASK_S = 3.0  # for the answer of one node


@dataclass
class Picture:
    """A cluster at one moment, in the JSON of the HTTP interface. A string stands for the answer that did not come."""

    topology: dict[str, Any]
    shards: dict[int, dict[str, Any] | str] = field(default_factory=dict)  # by the leaders
    replicas: dict[str, dict[str, Any] | str] = field(default_factory=dict)  # by node

    def plain(self) -> dict[str, Any]:
        """One JSON object."""
        shards = {str(number): _or_error(shard) for number, shard in self.shards.items()}
        return {**self.topology, "status": shards, "replicas": {node: _or_error(told) for node, told in self.replicas.items()}}


def _or_error(told: dict[str, Any] | str) -> dict[str, Any]:
    return {"error": told} if isinstance(told, str) else told


def look(url: str, names: Names | None) -> Picture:
    """Ask the node at `url`, or the name server, for the topology, and then each node for its own part."""
    picture = Picture(_topology(names) if names is not None else call(url, "GET", "/v1/cluster"))
    for place in picture.topology["leaders"]:
        if place["url"]:
            picture.shards[place["shard"]] = ask(place["url"], f"/v1/cluster/shards/{place['shard']}")
    for node, place in picture.topology["nodes"].items():
        for name, own_url in _processes(picture.topology, node, place["url"]).items():
            picture.replicas[name] = ask(own_url, "/v1/cluster/replica")
    return picture


def _processes(topology: dict[str, Any], node: str, url: str) -> dict[str, str]:
    """The addresses of a node's processes, by name: one for each shard that it has, of several, and for the first."""
    if topology["shards"] <= 1:
        return {node: url}
    from turtlemq.replica.topology import shard_url

    places = topology["leaders"]
    shards = [place["shard"] for place in places if not place["shard"] or node in place["want"] or node in place["isr"]]
    return {f"{node}, shard {shard}": shard_url(url, shard) for shard in shards}


def _topology(names: Names) -> dict[str, Any]:
    import msgspec

    from turtlemq.replica.topology import Topology

    found = names.run(lambda server: server.get(names.keys.prefix, prefix=True))
    topology = Topology.of({key.key: key for key in found.keys}, found.revision)
    return {**msgspec.to_builtins(topology), "cluster": names.options.name}


def ask(url: str, target: str) -> dict[str, Any] | str:
    """The answer of one node, or why there is none."""
    try:
        told = json.loads(asked(url, "GET", target, timeout_s=ASK_S))
    except (CallFailed, ValueError) as error:
        return str(error).partition(". Is the server running?")[0]
    return told if isinstance(told, dict) else "it answers something else"


def problems(picture: Picture) -> list[str]:
    """Sentences about everything that is not as it should be."""
    topology = picture.topology
    said = list(topology.get("problems", ()))
    if not topology["shards"]:
        said.append(f"there is no cluster {topology['cluster']!r} yet: turtlemq cluster init --help")
    for place in topology["leaders"]:
        if place["node"] is None:
            said.append(f"shard {place['shard']} has no leader")
        if len(place["isr"]) < topology["replicas"]:
            in_sync = ", ".join(place["isr"]) or "none"
            said.append(f"shard {place['shard']}: {len(place['isr'])} of {topology['replicas']} copies are in sync ({in_sync})")
    for place in topology["leaders"]:
        gone = [node for node in place["want"] if node not in topology["nodes"]]
        said += [f"node {node} should have a copy of shard {place['shard']}, and its supervisor is gone" for node in gone]
    for node, told in picture.replicas.items():
        if isinstance(told, str):
            said.append(f"node {node} does not answer: {told}")
        elif told["why"]:
            said.append(f"node {node}: {told['why']}")
    return said


def is_healthy(picture: Picture) -> bool:
    """Each shard has a leader, and all its copies are in sync. The leader must say so: a copy that was lost just now may still be
    in the in-sync set of etcd."""
    topology = picture.topology
    led = [place for place in topology["leaders"] if place["node"] is not None and len(place["isr"]) >= topology["replicas"]]
    whole = [place for place in led if _copies_in_sync(picture.shards.get(place["shard"])) >= topology["replicas"]]
    return bool(whole) and len(whole) == topology["shards"]


def _copies_in_sync(shard: dict[str, Any] | str | None) -> int:
    return sum(copy["state"] in ("leads", "in sync") for copy in shard["copies"]) if isinstance(shard, dict) else 0


def print_picture(picture: Picture) -> None:
    """Tables of shards, copies and nodes, and the problems."""
    topology = picture.topology
    if not topology["cluster"]:
        print("this is a single node, without copies on other machines: turtlemq cluster init --help")
        return
    shape = f"{shards_text(topology['shards'])}, {topology['replicas']} replicas, min_isr {topology['min_isr']}"
    print(f"cluster {topology['cluster']}: {shape}, revision {topology['revision']}")
    table = new_table("shard", "leader", "in sync", "epoch", "record", "covered", left=3)
    for place in topology["leaders"]:
        told = picture.shards.get(place["shard"])
        figures = [f"{told[key]:,}" for key in ("lsn", "covered_lsn")] if isinstance(told, dict) else ["-", "-"]
        table.add_row(str(place["shard"]), place["node"] or "none", ", ".join(place["isr"]), str(place["epoch"]), *figures)
    print_table(table)
    _print_copies(picture)
    _print_nodes(picture)
    for line in problems(picture):
        console().print(printable(line), style="red")


def _print_copies(picture: Picture) -> None:
    table = new_table("copy", "node", "state", "in sync", "record", "lag", "behind for", "copied", "clock", left=4)
    rows = 0
    for number, shard in picture.shards.items():
        for copy in shard["copies"] if isinstance(shard, dict) else ():
            table.add_row(f"{number} {copy['replica'][:8]}", copy["node"], copy["state"], _yes(copy["in_sync"]), *_figures(copy))
            rows += 1
    if rows:
        print_table(table)


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _figures(copy: dict[str, Any]) -> list[str]:
    """Record, lag, progress and clock of a copy, as text."""
    made = copy["copying"]
    copied = f"{format_bytes(made['bytes_done'])} of {format_bytes(made['bytes_total'])}" if made else ""
    skew = "-" if copy["clock_skew_ms"] is None else f"{copy['clock_skew_ms']:+d} ms"
    lsn = "-" if copy["lsn"] is None else f"{copy['lsn']:,}"
    return [lsn, format_bytes(copy["lag_bytes"]), format_duration(1000 * copy["lag_s"]), copied, skew]


def shards_text(count: int) -> str:
    """So many shards, in words.

    >>> shards_text(1), shards_text(4)
    ('1 shard', '4 shards')
    """
    return f"{count} shard{'' if count == 1 else 's'}"


def _work_of(picture: Picture, node: str) -> tuple[str, str]:
    """Role and state of a node. Of several shards: those that it leads, and the number of its copies that are in sync."""
    told = picture.replicas.get(node)
    if picture.topology["shards"] <= 1:
        return (told["role"], told["state"]) if isinstance(told, dict) else ("-", "no answer")
    places = picture.topology["leaders"]
    led = ", ".join(str(place["shard"]) for place in places if place["node"] == node)
    own = [told for name, told in picture.replicas.items() if name.startswith(f"{node}, ")]
    state = f"{sum(node in place['isr'] for place in places)} in sync"
    return f"leads {led}" if led else "-", state if any(isinstance(told, dict) for told in own) else "no answer"


def _print_nodes(picture: Picture) -> None:
    table = new_table("node", "url", "zone", "version", "role", "state", "drained", "free", left=7)
    for name, node in picture.topology["nodes"].items():
        role, state = _work_of(picture, name)
        zone, version = printable(node["zone"]) or "-", printable(node["version"]) or "-"
        table.add_row(name, node["url"], zone, version, role, state, _yes(node["drain"]), format_bytes(node["free_bytes"]))
    print_table(table)
