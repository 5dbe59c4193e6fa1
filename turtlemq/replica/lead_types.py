"""Settings of a leader, its notes about a standby, and the refusal of one. `replica.lead` uses them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from turtlemq.replica.copy_source import Copying
from turtlemq.replica.frames import Frame, Hello, Refused
from turtlemq.replica.link import Link
from turtlemq.replica.stream import Entry, Stream

SAID_AGAIN_S = 60.0  # after which the same reason is logged again for one address
_SAID_MAX = 256  # reasons that are remembered
NO_RECORDS = 1 << 63  # an LSN behind all records: nothing is sent to a standby that has it


@dataclass(frozen=True, slots=True)
class LeadOptions:
    """Settings of a leader."""

    acks: str = "isr"  # or "local": answers do not wait for standbys
    min_isr: int = 1  # copies in sync, this one included, below which nothing is written
    heartbeat_s: float = 0.6
    lag_max_s: float = 3.0  # a member that is silent or behind for so long is not in sync
    format: int = 0  # the newest file format that a standby must be able to read

    @property
    def answer_s(self) -> float:
        """The longest wait before an answer: a member that does not come back is let go in half of it."""
        return 2 * self.lag_max_s + 1


@dataclass(slots=True)
class Attached:
    """A standby that is attached."""

    member: str
    hello: Hello
    link: Link
    sent: int  # LSN of the last record that was sent
    acked: int  # LSN of the last record that it has applied
    caught_up_s: float  # when it last had everything
    beat_s: float = 0.0  # when the last heartbeat was sent that it has seen
    copying: Copying | None = None  # its files are not complete
    copied: int = 0  # bytes that it has in place, while it makes its files equal to the leader's
    to_copy: int = 0  # of so many
    between: deque[tuple[int, Frame]] = field(default_factory=deque)  # frames to send behind a record of this LSN

    def send_behind(self, lsn: int, frame: Frame) -> None:
        """Send a frame right behind a record that was not followed by another one in this connection yet."""
        assert lsn >= self.sent, "it is too late"
        self.between.append((lsn, frame))
        self._send_frames()

    def send(self, entries: Sequence[Entry]) -> None:
        """Send the next records, at most up to the next frame that has its place between two of them."""
        if self.between:
            entries = entries[: self.between[0][0] - self.sent]
        self.link.send_records(entries)
        self.sent += len(entries)
        self._send_frames()

    def _send_frames(self) -> None:
        while self.between and self.between[0][0] == self.sent:
            self.link.send(self.between.popleft()[1])


class Refusals:
    """Logs why peers were refused: a peer that tries again and again is named once a minute."""

    def __init__(self, log: Callable[..., None], clock_s: Callable[[], float]) -> None:
        self._log, self._clock_s = log, clock_s
        self._said_s: dict[tuple[str, str], float] = {}  # by host and reason

    def tell(self, peer: str, why: str, **more: str) -> None:
        """Log a refusal, unless this host was refused for the same reason a short time ago."""
        said, now_s = (peer.rpartition(":")[0], why), self._clock_s()
        if now_s - self._said_s.get(said, -SAID_AGAIN_S) < SAID_AGAIN_S:
            return
        if len(self._said_s) >= _SAID_MAX:
            self._said_s.clear()
        self._said_s[said] = now_s
        self._log("standby_refused", peer=peer, why=why, **more)


def refusal(stream: Stream, hello: Hello, shard: int, newest_format: int) -> Refused | None:
    """Why a standby cannot resume; None if it can. Its epoch is not above that of the stream."""
    if hello.shard != shard:
        return Refused(f"this is shard {shard}, not {hello.shard}", stream.epoch)
    if hello.format < newest_format:
        why = f"it reads files up to format {hello.format}, and these have format {newest_format}. Upgrade it first."
        return Refused(why, stream.epoch)
    with stream.lock:
        fits = hello.lsn is not None and hello.chain is not None and stream.resumes(hello.lsn, hello.chain)
    if not hello.complete or not fits:
        why = "its files must be compared with the leader's: its position is not in the ring"
        return Refused(why, stream.epoch, sync=True)
    return None
