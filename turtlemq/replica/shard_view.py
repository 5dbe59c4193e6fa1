"""A shard as the keys of its cluster tell it: in-sync set, leader, wanted nodes, and the event of a replica. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from turtlemq.replica.cluster_state import Config, Keys, KeyValue, Lead, ShardState, Want, decode
from turtlemq.replica.member_events import Seen

KeyValues = Mapping[str, KeyValue]


def config_of(values: KeyValues, keys: Keys) -> Config | None:
    """The shape of the cluster; None before `cluster init`. Raises `BadValue`, as all functions here."""
    found = values.get(keys.config)
    return None if found is None else decode(keys.config, found.value, Config)


def state_of(values: KeyValues, keys: Keys, shard: int) -> ShardState | None:
    """Leader and in-sync set; None before the shard has begun."""
    found = values.get(keys.state(shard))
    return None if found is None else decode(keys.state(shard), found.value, ShardState)


def lead_of(values: KeyValues, keys: Keys, shard: int) -> Lead | None:
    """The leader at work; None if there is none."""
    found = values.get(keys.lead(shard))
    return None if found is None else decode(keys.lead(shard), found.value, Lead)


def want_of(values: KeyValues, keys: Keys, shard: int) -> Want | None:
    """The nodes that should have the shard; None before a node has joined."""
    found = values.get(keys.want(shard))
    return None if found is None else decode(keys.want(shard), found.value, Want)


def seen_of(values: KeyValues, revision: int, keys: Keys, shard: int, node: str, read: int = 0) -> Seen:
    """The event of a read or a watch that shows these values. `node`: that of the replica which hears it."""
    state, lead, want = state_of(values, keys, shard), lead_of(values, keys, shard), want_of(values, keys, shard)
    first = want is not None and want.nodes[:1] == (node,)
    holder, lease = (None, 0) if lead is None else (lead.replica, values[keys.lead(shard)].lease)
    if state is None:
        return Seen(revision, lead=holder, lease=lease, first=first, read=read)
    at = values[keys.state(shard)].mod_revision
    lost = (replica for replica in state.isr if (key := values.get(keys.rebooted(shard, replica))) and key.mod_revision > at)
    about = state.epoch, state.leader, frozenset(state.isr), state.nonce
    return Seen(revision, at, *about, holder, lease, first, read, frozenset(lost))
