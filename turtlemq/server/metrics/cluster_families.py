"""Metric families of a node in a cluster: role, lag of copies, progress of copies under way. A single node has none of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from turtlemq.replica.records import Kind
from turtlemq.server.metrics import exposition
from turtlemq.server.metrics.exposition import Labels
from turtlemq.server.metrics.meter import CopyFigures
from turtlemq.server.service import Service

if TYPE_CHECKING:
    from turtlemq.replica.lead import Lead
    from turtlemq.replica.standby import Standby

_ROLES = ("leader", "standby", "spare", "starting")
_NONE: Labels = {}


def cluster_families(service: Service) -> Iterator[str]:
    """All families of a node in a cluster."""
    lead, standby, family = service.lead, service.standby, exposition.family
    if service.siblings is not None:
        yield from proxied_family(service)
    if service.cluster is not None:
        yield from _part_families(service)
    stream = lead.stream if lead is not None else standby.stream if standby is not None else None
    if stream is None:
        return
    if service.cluster is None:
        roles = [({"role": "leader"}, int(lead is not None)), ({"role": "standby"}, int(lead is None))]
        yield from family("turtlemq_role", "gauge", "1 for the role of this node.", roles)
    yield from family("turtlemq_epoch", "gauge", "The number of the leader's time in office.", [(_NONE, stream.epoch)])
    yield from family("turtlemq_lsn", "gauge", "The last record that was made or applied here.", [(_NONE, stream.lsn)])
    yield from _care_families(service.meter.copies)
    if standby is not None:
        yield from _follower_families(standby)
    if lead is not None:
        sent = [({"kind": Kind(kind).name.lower()}, size) for kind, size in stream.shipped.items()]
        yield from family("turtlemq_shipped_bytes_total", "counter", "Bytes of records made, by kind.", sent)
        yield from _lead_families(service, lead)


def proxied_family(service: Service) -> Iterator[str]:
    """Requests that came to a process which has to pass them on: in a cluster, or with several shards."""
    text = "Requests that were passed on, to the leader or to the process of a shard, by outcome."
    counts = [({"outcome": outcome}, count) for outcome, count in sorted(service.meter.proxied.items())]
    yield from exposition.family("turtlemq_proxied_total", "counter", text, counts)


def _part_families(service: Service) -> Iterator[str]:
    """Families of every node of a cluster, in any role."""
    part, meter, family = service.cluster, service.meter, exposition.family
    assert part is not None
    topology, role = part.topology(), part.role
    roles = [({"role": name}, int(name == role)) for name in _ROLES]
    yield from family("turtlemq_role", "gauge", "1 for the role of this node.", roles)
    yield from family("turtlemq_replicas", "gauge", "Copies that the shard should have.", [(_NONE, topology.replicas)])
    known = int(topology.leader(part.shard) is not None)
    yield from family("turtlemq_leader_known", "gauge", "1 if the name server names a leader at work.", [(_NONE, known)])
    text = "1 while the name server answers this node."
    yield from family("turtlemq_name_server_up", "gauge", text, [(_NONE, int(part.view.is_fresh))])
    yield from proxied_family(service)
    yield from family("turtlemq_elections_total", "counter", "Times that this process was elected.", [(_NONE, meter.elections)])
    yield from family("turtlemq_handovers_total", "counter", "Times that this process handed over.", [(_NONE, meter.handovers)])
    text = "Changes of the in-sync set by this process."
    yield from family("turtlemq_isr_changes_total", "counter", text, [(_NONE, meter.isr_changes)])
    yield from exposition.histogram("turtlemq_etcd_seconds", "A request to the name server.", [(_NONE, meter.etcd)])


def _follower_families(standby: Standby) -> Iterator[str]:
    """Families of a standby: how long its work takes."""
    figures, histogram = standby.figures, exposition.histogram
    text = "A standby applies a batch of records, with the wait for their syncs."
    yield from histogram("turtlemq_apply_seconds", text, [(_NONE, figures.batches)])
    yield from histogram("turtlemq_standby_sync_seconds", "A standby syncs a file or folder.", [(_NONE, figures.syncs)])


def _lead_families(service: Service, lead: Lead) -> Iterator[str]:
    """Families of a leader: its copies, by member."""
    family, source = exposition.family, lead.source
    text = "The last record that all required members have applied."
    yield from family("turtlemq_covered_lsn", "gauge", text, [(_NONE, lead.covered_lsn)])
    yield from family("turtlemq_isr", "gauge", "Copies in sync, the leader's included.", [(_NONE, lead.in_sync())])
    members = sorted(lead.members)
    lag = [({"member": member}, lead.lag_bytes(member)) for member in members]
    yield from family("turtlemq_replica_lag_bytes", "gauge", "Bytes of records that a copy lacks.", lag)
    late = [({"member": member}, lead.lag_s(member)) for member in members]
    yield from family("turtlemq_replica_lag_seconds", "gauge", "For how long a copy has lacked records.", late)
    text = "Bytes of sealed segments sent beside the records."
    yield from family("turtlemq_ferried_bytes_total", "counter", text, [(_NONE, lead.ferried_bytes)])
    text = "Bytes of files sent to copies whose files were compared with the leader's."
    sent = 0 if source is None else source.sent_bytes
    yield from family("turtlemq_reconcile_bytes_total", "counter", text, [(_NONE, sent)])
    text = "The part of its bytes that a copy under way has in place, from 0 to 1."
    done = [({"member": member}, each.copied / max(each.to_copy, 1)) for member, each in sorted(lead.copying.items())]
    yield from family("turtlemq_reconcile_progress", "gauge", text, done)
    text = "Copies that differed from the leader's in the last comparison."
    differing = 0 if service.care is None else service.care.differing
    yield from family("turtlemq_copies_differ", "gauge", text, [(_NONE, differing)])
    text = "The wait of an answer for the copies of a cluster."
    yield from exposition.histogram("turtlemq_answer_wait_seconds", text, [(_NONE, service.meter.answer_wait)])


def _care_families(copies: CopyFigures | None) -> Iterator[str]:
    """Families of a replica's care for its copy."""
    if copies is None:
        return
    family = exposition.family
    text = "Bytes of the own files, read to find those that have rotted."
    yield from family("turtlemq_scrubbed_bytes_total", "counter", text, [(_NONE, copies.scrubbed_bytes)])
    text = "Files with damage that were replaced by those of another copy."
    yield from family("turtlemq_healed_files_total", "counter", text, [(_NONE, copies.healed_files)])
    skews = [({"node": node}, seconds) for node, seconds in sorted(copies.skews_s.items())]
    yield from family("turtlemq_clock_skew_seconds", "gauge", "The distance of a node's clock from the others'.", skews)
