"""Frames: messages between two replicas beside the records, on one connection, and the parser of both. Pure.

A frame has the head of a record, with a kind from 64 on, LSN 0, no path, and JSON as its data. A peer proves that it knows the
cluster's secret before anything else is read from it, and until then may send small frames only.

>>> parser = Parser()
>>> data = encode(Ack(lsn=7, beat=3, clock_ms=1_000))
>>> parser.feed(data[:50]), parser.feed(data[50:])
([], [Ack(lsn=7, beat=3, clock_ms=1000, copied=0, to_copy=0)])
"""

from __future__ import annotations

import hmac
from typing import Annotated, Literal, TypeAlias

import msgspec
import xxhash
from msgspec import Meta, Struct

from turtlemq.errors import TurtleError
from turtlemq.replica.manifest import FileState, UnitState
from turtlemq.replica.records import DATA_BYTES_MAX, HEAD_BYTES, Head, OutOfStep, Record, parse_head, seal

PROTOCOL = 1  # of this version; peers of another one are refused
STRANGER_BYTES_MAX = 4_096  # of a frame from a peer that has proved nothing yet
_CONTROL = 64  # kinds from here on are frames

Text = Annotated[str, Meta(max_length=1_000)]
Count = Annotated[int, Meta(ge=0)]


class BadPeer(TurtleError):
    """The other side of a connection does not speak the protocol of replicas, or does not know the cluster's secret."""


class Challenge(Struct, frozen=True):
    """The first frame of each side: a nonce for the other side's proof. That of the leader has its own proof."""

    protocol: int
    cluster: Text
    nonce: Text
    proof: Text = ""


class Proof(Struct, frozen=True):
    """The standby's proof."""

    proof: Text


class Hello(Struct, frozen=True):
    """The standby's position and facts. `lsn` and `chain` are None if it does not know which records it has applied."""

    shard: Count
    node: Text
    replica: Text
    epoch: Count
    lsn: Count | None
    chain: Count | None
    complete: bool
    format: Count
    version: Text
    bulk: bool = False  # this is the second connection of a standby that is attached, for files


class Welcome(Struct, frozen=True):
    """Records follow, from behind `lsn` on; or, with `sync`, the standby must make its files equal to the leader's first."""

    epoch: Count
    mode: Literal["resume", "sync"]
    lsn: Count
    heartbeat_ms: Count


class Refused(Struct, frozen=True):
    """The leader does not take this standby. `sync`: its files would have to be compared with those of the leader."""

    why: Text
    epoch: Count = 0
    leader: Text = ""
    sync: bool = False


class Ack(Struct, frozen=True):
    """The standby has applied all records up to `lsn`. `beat`: the last one that it has seen. `copied` of `to_copy` bytes are in
    place, while it makes its files equal to the leader's."""

    lsn: Count
    beat: Count
    clock_ms: Count
    copied: Count = 0
    to_copy: Count = 0


class Beat(Struct, frozen=True):
    """The leader's heartbeat. `covered`: all required members have applied the records up to it. `promise`: a standby that
    acknowledges it will not run for leader for a while (`replica.tenure`). `skew_ms`: the distance of the standby's clock from
    the reference (`replica.clock_skew`), as far as it is known."""

    epoch: Count
    n: Count
    lsn: Count
    covered: Count
    clock_ms: Count
    promise: bool = False
    skew_ms: float | None = None
    skew_error_ms: float = 0.0


class Full(Struct, frozen=True):
    """The standby's disk is full: it stops here, and comes back."""

    why: Text
    file: Text = ""


class Broken(Struct, frozen=True):
    """The standby cannot apply the next record, or does not trust its own files any more."""

    why: Text
    file: Text = ""


class Sync(Struct, frozen=True):
    """The standby is ready to compare its files, and asks for the manifest of the leader's."""

    round: Count
    changed: Text = ""  # a file whose bytes were not those of the manifest before: its noted checksums do not count


class Manifest(Struct, frozen=True):
    """A part of the manifest (`replica.manifest`). Records behind `lsn` will follow, once its files are in place."""

    lsn: Count
    chain: Count
    files: list[FileState]
    units: list[UnitState]
    folders: list[Text]
    last: bool


class Pull(Struct, frozen=True):
    """The standby asks for bytes of a file of the manifest."""

    file: Count
    offset: Count
    length: Annotated[int, Meta(ge=1, le=DATA_BYTES_MAX)]


class Piece(Struct, frozen=True):
    """The bytes that were asked for: fewer if the file has become shorter. Its data are not JSON, but these bytes."""

    file: Count
    offset: Count
    data: bytes


class Done(Struct, frozen=True):
    """The standby's files are those of the manifest, durably."""

    lsn: Count


class File(Struct, frozen=True):
    """A file follows, apart from the stream: records of kind WRITE whose LSN is the number of this file. `path`: its unfinished
    name on the leader."""

    number: Count
    path: Text
    size: Count
    sum: Count


class FileOk(Struct, frozen=True):
    """The standby has the whole file, synced."""

    number: Count


class Need(Struct, frozen=True):
    """The standby has met a record that gives this file its name, `target`, and lacks it."""

    path: Text
    target: Text
    size: Count
    sum: Count


class NoFile(Struct, frozen=True):
    """The leader does not have a needed file any more: the standby's files must be compared with the leader's."""

    path: Text
    sum: Count


class Handover(Struct, frozen=True):
    """The leader has closed its files behind this record, and offers to hand over to the standby that has them all."""

    epoch: Count
    lsn: Count
    chain: Count


class Ready(Struct, frozen=True):
    """The standby takes over. The leader names it in etcd, with this lease, and with the addresses of its process."""

    epoch: Count
    lease: Count
    url: Text
    peer: Text


class Verify(Struct, frozen=True):
    """The leader asks for checksums of these units, as they are behind record `lsn`: the frame stands behind it."""

    number: Count
    units: list[Text]
    lsn: Count
    bytes_per_s: float = 0  # at most, for reading; 0: as fast as the standby likes


class Verified(Struct, frozen=True):
    """A part of the checksums. `why`: they cannot be told."""

    number: Count
    lsn: Count
    files: list[FileState]
    last: bool
    why: Text = ""


class Examine(Struct, frozen=True):
    """A question to the other side: do the bytes of this file from `start` to `end` pass their own checksums there?"""

    number: Count
    path: Text
    start: Count
    end: Count


class Examined(Struct, frozen=True):
    """The answer. `why`: the damage, or why the file could not be read."""

    number: Count
    good: bool
    why: Text = ""


class Distrust(Struct, frozen=True):
    """The leader tells a standby that these files of its copy are wrong: it compares its files again."""

    paths: list[Text]


_Care: TypeAlias = Verify | Verified | Examine | Examined | Distrust
_Following: TypeAlias = Challenge | Proof | Hello | Welcome | Refused | Ack | Beat | Full | Broken | Handover | Ready
Frame: TypeAlias = _Following | Sync | Manifest | Pull | Piece | Done | File | FileOk | Need | NoFile | _Care
KINDS: dict[int, type[Frame]] = {
    64: Challenge,
    65: Proof,
    66: Hello,
    67: Welcome,
    68: Refused,
    69: Ack,
    70: Beat,
    71: Full,
    72: Broken,
    73: Sync,
    74: Manifest,
    75: Pull,
    76: Piece,
    77: Done,
    80: File,
    81: FileOk,
    82: Need,
    83: NoFile,
    84: Handover,
    85: Ready,
    90: Verify,
    91: Verified,
    92: Examine,
    93: Examined,
    94: Distrust,
}
_KIND_OF = {kind: number for number, kind in KINDS.items()}
_encoder = msgspec.json.Encoder()
_DECODERS = {number: msgspec.json.Decoder(kind) for number, kind in KINDS.items()}


def encode(frame: Frame) -> bytes:
    """A frame as bytes."""
    if isinstance(frame, Piece):
        head = Head(_KIND_OF[Piece], frame.file, 0, frame.offset, 0, len(frame.data), xxhash.xxh3_64_intdigest(frame.data))
        return seal(head, 0)[0] + frame.data
    data = _encoder.encode(frame)
    head = Head(_KIND_OF[type(frame)], 0, 0, 0, 0, len(data), xxhash.xxh3_64_intdigest(data))
    return seal(head, 0)[0] + data


class Parser:
    """Cuts the bytes of a connection into records and frames. Raises `BadPeer` for anything else.

    `trusted`: whether the peer has proved that it knows the secret."""

    def __init__(self) -> None:
        self.trusted = False
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[Record | Frame]:
        """The records and frames that are whole now."""
        self._rest += data
        found: list[Record | Frame] = []
        at, end = 0, len(self._rest)
        with memoryview(self._rest) as view:
            while end - at >= HEAD_BYTES:
                head, chain = self._head(view[at : at + HEAD_BYTES])
                body = at + HEAD_BYTES
                following = body + head.path_bytes + head.data_bytes
                if following > end:
                    break
                found.append(_item(head, chain, bytes(view[body:following])))
                at = following
        del self._rest[:at]
        return found

    def _head(self, data: memoryview) -> tuple[Head, int]:
        try:
            head, chain = parse_head(data)
        except OutOfStep as error:
            raise BadPeer(str(error)) from None
        if head.kind < _CONTROL:
            if not self.trusted:
                raise BadPeer("a record came before the proof that the peer knows the secret")
        elif head.kind not in KINDS or head.path_bytes:
            raise BadPeer(f"a frame of kind {head.kind} is not known here")
        if head.data_bytes > (DATA_BYTES_MAX if self.trusted else STRANGER_BYTES_MAX):
            raise BadPeer(f"a frame of {head.data_bytes:,} bytes is too long")
        return head, chain


def _item(head: Head, chain: int, body: bytes) -> Record | Frame:
    if head.kind < _CONTROL:
        try:
            return Record(head, chain, body[: head.path_bytes].decode(), body[head.path_bytes :])
        except UnicodeDecodeError:
            raise BadPeer(f"the path of record {head.lsn:,} is no text") from None
    if xxhash.xxh3_64_intdigest(body) != head.sum:
        raise BadPeer("a frame was changed on its way")
    if KINDS[head.kind] is Piece:
        return Piece(head.epoch, head.offset, body)
    try:
        frame: Frame = _DECODERS[head.kind].decode(body)
    except msgspec.DecodeError as error:
        raise BadPeer(f"a frame of kind {head.kind} cannot be read: {error}") from None
    return frame


def proof(secret: bytes, role: Literal["leader", "standby"], cluster: str, own: str, other: str) -> str:
    """The proof that a peer knows the secret: an HMAC over its role, the cluster, and the nonces of both sides. With the role in
    it, a proof cannot be sent back as that of the other side.

    >>> proof(b"secret", "leader", "prod", "1", "2") == proof(b"secret", "standby", "prod", "2", "1")
    False
    """
    text = msgspec.json.encode([PROTOCOL, role, cluster, own, other])
    return hmac.new(secret, text, "sha256").hexdigest()


def is_proof(given: str, expected: str) -> bool:
    """Are both equal? Takes the same time wherever they differ."""
    return hmac.compare_digest(given.encode(), expected.encode())
