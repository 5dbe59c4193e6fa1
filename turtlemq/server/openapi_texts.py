"""Texts of the OpenAPI document about types and fields. Those of operations stand in `operations`.

They are part of the interface, so docstrings of the Python classes are not used: these may be changed without a word to users.
"""

from __future__ import annotations

ABOUT = """Messages that sleep until they are due, and are then fetched and acknowledged by groups of consumers.

Times are epoch milliseconds in every field that ends in `_ms`; `delay`, `ttr` and `wait` are seconds. A refused batch changes
nothing. Bodies may come with `Content-Encoding: gzip` or `zstd`. Every answer has an
`X-Request-Id`; send your own to have it used."""

# Sections of the document, in their order.
TAGS = {
    "Produce": "Store messages, and change or cancel them while they wait.",
    "Consume": "Fetch due messages under a lease, and acknowledge them.",
    "Look": "Messages by state and by due time.",
    "Topics": "Topics, their settings, and groups of consumers.",
    "Dead letters": "Messages that failed for the last time, or expired.",
    "Operate": "Health, figures, backups, and this document.",
    "Cluster": "Nodes, leaders and copies.",
}

# By name of the schema.
SCHEMAS = {
    "Delivered": "A message as a consumer gets it.",
    "ErrorAnswer": "Every refusal.",
    "Refusal": "What is wrong and what to do. `index` is the first bad item, `state` the one that a message is in; "
    "others may come.",
    "Letter": "A dead letter.",
    "MessageBatch": "Many messages: all of them are stored, or none.",
    "JsonMessage": "A message in JSON.",
    "BsonMessage": "A message in BSON. Its body is a binary, or a value that JSON has as well.",
    "Stored": "A batch is durable: ids in the order sent.",
    "MessageAnswer": "Everything about one message.",
    "AttemptAnswer": "A delivery to a consumer of a group, and how it ended: `expired` if its lease ran out, `given back` if it "
    "did not reach the consumer, `dead` if it was the last one; null while it runs.",
    "Retry": "In which group to try it again: without, in each that waits for its next attempt or has a dead letter of it.",
    "TimelineEntry": "Something that happened to a message.",
    "Patch": "What to change of a sleeper.",
    "Changed": "A sleeper was changed.",
    "Outcome": "What was done.",
    "Cancel": "Which messages to cancel.",
    "Cancelled": "Messages that will never come, and the state of each that could not be cancelled.",
    "Fetch": "The body of a fetch.",
    "Messages": "What a fetch brought; nothing is an empty list.",
    "Ack": "The long form of an ack.",
    "Acked": "The answer to a grouped ack list.",
    "Extend": "The body of an extend.",
    "Extended": "Leases that got more time.",
    "Listing": "A page of messages; `cursor` asks for the next one. A page may be short, or empty, though there is a next one.",
    "Listed": "A line of a listing; one that sleeps before another attempt of a group, or is dead in one, names it.",
    "Found": "Messages with that id, by topic.",
    "FoundMessage": "A message of some topic.",
    "Forecast": "How much comes due when: counts[i] are due in [from_ms + i * bucket_ms, from_ms + (i + 1) * bucket_ms).",
    "AuditAnswer": "Changes that were asked for, the newest last.",
    "AuditEvent": "A change: by which token (its name; empty where none is needed), from which address, of how many messages. "
    "`target`: a group, message, node or shard of the path.",
    "Paused": "Whether that topic, or that group itself, is paused now.",
    "History": "Columns of equal length, a row for each minute, oldest first. The last row is the minute that has not ended: it "
    "has `seconds` so far. `sleep`, `ready`, `reserve` and `dead` are counts at its end `at_ms`; `produced`, `delivered`, "
    "`acked`, `failed` and `refused` (429 and 507, of the whole server only) happened in it. "
    "Quantiles are null if nothing came due.",
    "Topics": "All topics.",
    "TopicAnswer": "A topic.",
    "Settings": "The body of PUT /v1/topics/{topic}: what is left out stays as it is.",
    "Backoff": "How long a failed message waits: base × factor^n seconds, up to max.",
    "Retention": "How long, and in how much room, settled messages are kept.",
    "Dead": "How long, and how many, dead letters are kept.",
    "Rate": "Messages a second: taken in (with a burst that was saved up), and given to each group. 0: no limit.",
    "TopicStats": "Figures of a topic. ready, reserve and history are summed over groups; without any, "
    "what is ready waits for the first.",
    "GroupStats": "Figures of a group. `offset`: everything before it is settled.",
    "Compacted": 'What compaction freed; "running": it goes on by itself.',
    "GroupStart": "Where a group starts. Nothing: a new one at the oldest message, one that is there stays where it is.",
    "GroupStartAt": "A group's start by time.",
    "GroupAnswer": "A group.",
    "Letters": "A page of dead letters.",
    "DeadFilter": "Which dead letters: every field that is given must match. Times are when they died.",
    "Causes": "Dead letters by error, the most common first.",
    "DeadRequeue": "Which of them shall sleep again, until when.",
    "Requeued": "Dead letters that sleep again.",
    "DeadChoice": "Some of them, by id (in `group`, or in any) or by filter.",
    "Deleted": "Dead letters that are gone.",
    "Alive": "The process lives.",
    "Ready": "It serves; topics that are not well are counted.",
    "Status": "The whole server. `topics` are those asked for; `states`, `totals` (since the start) and `bytes` are sums over "
    "all that match and the token may see; `damage` names the first few.",
    "Lateness": "Counts by bucket since the start: of at most bounds_ms[i] each, and one more for what is above. "
    "Differences of two looks\n    give the lateness of the time between.",
    "TopicStatus": "A topic: messages in each state, totals since the start, its groups and how late it is.",
    "DamageFound": "Damage.",
    "Command": "One command.",
    "CommandAnswer": "Its answer.",
    "Pinned": "Files that are kept for a backup.",
    "ReplicaStatus": "The process that answers, and its copy of a shard. A single node has neither cluster nor replica.",
    "ShardStatus": "A shard, as its leader knows it. The first copy is its own.",
    "CopyStatus": "One copy: `leads`, `in sync`, `follows`, `copies` (its files are made equal to the leader's) or `away`.",
    "Copied": "Bytes in place, of those that this round of the copy needs.",
    "HandoverTo": "The node that should lead.",
    "HandedOver": "Another node leads.",
    "Drained": "A node leads nothing from now on, or may lead again.",
    "Comparison": "All copies of a shard, compared with the leader's. `lsn` to `last_lsn`: the records at which topics were.",
    "ComparedCopy": "One copy. Of one that was not reached, `why` tells the reason.",
    "DifferingFile": "A file that is not as the leader's. `ranges` are bytes, from and to, by pieces of 4 MiB.",
    "ClusterAnswer": "A cluster at one revision of its name server. `topics` are those of several partitions; `problems` names "
    "values of the name server that this version cannot read.",
    "ClusterNode": "A node at work.",
    "ClusterShard": "A shard: its leader, null while there is none, nodes in sync, and nodes that should have a copy.",
}

# By name of the field, or by schema and field where the field has several meanings.
FIELDS = {
    "after_ms": "Only rows that ended after this time, in epoch milliseconds.",
    "acks": "Ids; `-` before each that failed.",
    "attempt": "Deliveries, this one included.",
    "AttemptAnswer.attempt": "Its number; a requeue begins with 1 again.",
    "MessageAnswer.attempts": "The last 16 of each group, oldest first.",
    "last_attempts": "The last 16, oldest first.",
    "next_ms": "When the next attempt was to come, as planned then.",
    "reserved_ms": "When it was handed out.",
    "ended_ms": "When it ended.",
    "body": "Any JSON value; it comes back as it was sent.",
    "body_base64": "Instead of `body`, for bytes.",
    "bucket": "Seconds in one count.",
    "Refusal.code": "A word for programs. The description of each status lists its codes.",
    "consumer": "A name for the record.",
    "copies": "In a cluster: copies that have it, the leader's included.",
    "ShardStatus.copies": "All known copies of the shard.",
    "Comparison.copies": "All known copies of the shard.",
    "cursor": "Of the page before.",
    "delay": "Seconds from now, or a text with a unit: `90s`, `15m`, `3d`.",
    "due": "When it is due, as RFC 3339 text with its zone.",
    "due_ms": "When it is due, in epoch milliseconds.",
    "duplicate_indexes": "Positions of the duplicates in the request, if there are any.",
    "duplicates": "Ids that the topic knew already; they were not stored again.",
    "error": "Why it failed.",
    "expires_ms": "What is not delivered by then is dead; after the due time.",
    "DeadRequeue.expires_ms": "Letters that are not delivered by then are dead again; without it they do not expire any more.",
    "from_ms": "From this time on, in epoch milliseconds.",
    "headers": "Names and texts.",
    "hours": "How far to look ahead.",
    "JsonMessage.id": "Your own id; else the server gives one.",
    "BsonMessage.id": "Your own id; else the server gives one.",
    "index": "The first bad item.",
    "Ack.lease": "The lease that the fetch named: one for all entries, or a list with one for each.",
    "Extend.lease": "The lease that the fetch named: one for all ids, or a list with one for each.",
    "Messages.lease": "The name of the lease under which these messages are held; missing if none is.",
    "lead": "503 unless this node leads.",
    "late": "Ids that are held under another lease than the named one; nothing happened to them.",
    "lease_until_ms": "What is not acknowledged by then comes again; 0: it is settled already.",
    "limit": "At most so many.",
    "live_ratio": "Sleeping documents among all in the delay segments.",
    "Fetch.max": "At most so many messages.",
    "Backoff.max": "Seconds at most.",
    "newest": "The newest first; for ready, reserve, history and cancelled.",
    "per_s": "So many a second.",
    "prefix": "Only ids that begin with this.",
    "priority": "`high` comes first, but never alone.",
    "reset_attempts": "Count attempts from 1 again.",
    "request_id": "Also in the header X-Request-Id, and in the log.",
    "to_ms": "Up to this time, in epoch milliseconds.",
    "ttr": "Seconds that a consumer may take.",
    "wait": "Seconds to wait for the first message.",
}
