"""The table of HTTP operations on a cluster: nodes, leaders, copies. Its entries belong to the table in `operations`."""

from __future__ import annotations

from turtlemq.server.auth import ADMIN, INSPECT, TOKEN
from turtlemq.server.handlers import cluster, copies, operators
from turtlemq.server.operation import Operation
from turtlemq.server.outgoing import answers

_SHARD = "/v1/cluster/shards/{shard}"
_COMPARED = {
    "shard": 0,
    "state": "done",
    "lsn": 51_400,
    "last_lsn": 51_422,
    "files": 31,
    "bytes": 4_200_000,
    "bytes_total": 4_200_000,
    "seconds": 0.2,
    "why": "",
    "copies": [
        {"node": "b", "replica": "5f0c", "state": "equal", "why": "", "files": []},
        {
            "node": "c",
            "replica": "91aa",
            "state": "differs",
            "why": "its files are not as the leader's",
            "files": [{"path": "topic/orders/delay_0000000000.bson", "ranges": [[0, 4_194_304]], "why": "its bytes differ"}],
        },
    ],
}
_PLACE = {"peer": "10.0.0.1:8900", "grpc": "10.0.0.1:8879", "zone": ""}
_NODE = {**_PLACE, "version": "0.1.0", "drain": False, "format": 1, "free_bytes": 9 * 10**9}
_TOPOLOGY = {
    "cluster": "prod",
    "revision": 1042,
    "shards": 1,
    "replicas": 2,
    "min_isr": 1,
    "hash": "xxh3_64",
    "nodes": {"a": {"url": "http://10.0.0.1:8878", **_NODE, "clock_ms": 1_790_000_000_000}},
    "leaders": [{"shard": 0, "epoch": 3, "node": "a", "url": "http://10.0.0.1:8878", "isr": ["a", "b"], "want": ["a", "b"]}],
    "topics": {},
    "problems": [],
}

_DRAIN = "/v1/cluster/nodes/{node}/drain"
_OWN = {"cluster": "prod", "node": "b", "shard": 0, "replica": "5f0c", "role": "standby", "state": "in sync", "epoch": 3}
_OWN |= {"lsn": 51_400, "complete": True, "healthy": True, "why": "", "clock_ms": 1_790_000_000_000, "name_server": True}
_COPY = {"replica": "5f0c", "node": "b", "state": "in sync", "in_sync": True, "lsn": 51_400, "lag_bytes": 2_048, "lag_s": 0.01}
_STATUS = {"shard": 0, "node": "a", "epoch": 3, "lsn": 51_422, "covered_lsn": 51_400}

CLUSTER = [
    Operation(
        "GET /v1/cluster/replica",
        operators.replica,
        TOKEN,
        "replica",
        "The process that answers, and its copy",
        operators.ReplicaStatus,
        "Never forwarded. `state` is that of its state machine; `why` tells why a copy needs an operator. A single node answers "
        "with the role `single`.",
        answer_example=_OWN | {"copying": None},
    ),
    Operation(
        f"GET {_SHARD}",
        operators.shard,
        TOKEN,
        "shard",
        "The copies of a shard, as its leader knows them",
        operators.ShardStatus,
        "`lag_bytes` and `lag_s`: records that a copy lacks, and for how long. `copying`: its files are being made equal to the "
        "leader's. `clock_skew_ms`: its clock less the leader's.",
        errors=(404, 409),
        answer_example=_STATUS | {"copies": [_COPY | {"clock_skew_ms": 2, "copying": None}]},
    ),
    Operation(
        f"POST {_SHARD}/handover",
        operators.handover,
        ADMIN,
        "handover",
        "Let another node lead",
        answers.HandedOver,
        "The node must be in sync: nothing is lost. Requests meanwhile wait, or are to be sent again.",
        body=operators.HandoverTo,
        body_example={"to": "b"},
        errors=(408, 413, 415, 404, 409),
        answer_example={"outcome": "handed over", "shard": 0, "node": "b"},
        audit="handover",
    ),
    Operation(
        f"POST {_DRAIN}",
        operators.drain,
        ADMIN,
        "drain",
        "Let a node lead nothing",
        answers.Drained,
        "Its leader hands over to a node in sync as soon as there is one; its copies stay. `leads`: shards that it led when this "
        "was noted.",
        errors=(404, 409),
        answer_example={"outcome": "drained", "node": "a", "leads": [0]},
        audit="drain",
    ),
    Operation(
        f"DELETE {_DRAIN}",
        operators.undrain,
        ADMIN,
        "undrain",
        "Let a drained node lead again",
        answers.Drained,
        errors=(404, 409),
        answer_example={"outcome": "may lead", "node": "a", "leads": []},
        audit="undrain",
    ),
    Operation(
        "GET /v1/cluster",
        cluster.topology,
        TOKEN,
        "cluster",
        "The nodes of a cluster, and the leader of each shard",
        answers.ClusterAnswer,
        "Answered by every node from its own copy of the name server's keys. A single node has one shard, which it leads. With "
        "`revision` of an earlier answer, from any node, and `wait`: a long poll, answered when something else than free space "
        "and clocks has changed since.",
        query=cluster.ClusterQuery,
        answer_example=_TOPOLOGY,
    ),
    Operation(
        f"POST {_SHARD}/verify",
        copies.verify,
        ADMIN,
        "verifyCopies",
        "Compare the files of all copies",
        copies.Comparison,
        "Every byte is read from the disks, of each copy at the same record, while requests are served. Answered when it is "
        "done, or after half a minute with `state` `running`: then ask with GET. One that is under way is joined.",
        errors=(404, 409),
        answer_example=_COMPARED,
    ),
    Operation(
        f"GET {_SHARD}/verify",
        copies.verification,
        INSPECT,
        "verification",
        "The comparison under way, or the last one",
        copies.Comparison,
        errors=(404, 409),
        answer_example=_COMPARED,
    ),
]
