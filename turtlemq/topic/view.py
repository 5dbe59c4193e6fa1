"""The read-only face of a topic: messages, groups, dead letters, figures, damage. Nothing here changes anything.

The questions are answered by the modules of this package that read the stores: `message_view`, `listing`, `stats`, `check`.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence

from turtlemq.broker.priorities import HIGH, weights_of
from turtlemq.histogram import GroupTally, Histogram
from turtlemq.lateness_slo import Deliveries
from turtlemq.model import DUE_MS_MAX, Damage, Forecast, StoredMessage
from turtlemq.topic import copies, event_feed, listing, message_view, past, stats
from turtlemq.topic.check import check_topic
from turtlemq.topic.dead_letters import DeadLetter, DeadLetters, read_letter
from turtlemq.topic.handoff import Handoff
from turtlemq.topic.maintenance import Maintenance
from turtlemq.topic.message_view import MessageView
from turtlemq.topic.past import PastView
from turtlemq.topic.punctuality import Punctuality, overdue
from turtlemq.topic.stats import GroupStats, TopicStats, TopicTotals
from turtlemq.topic.stores import Stores


class TopicView:
    """Everything that can be asked about one topic. Same thread as the topic."""

    def __init__(self, stores: Stores, handoff: Handoff, maintenance: Maintenance, punctuality: Punctuality) -> None:
        self._stores, self._index, self._broker = stores, stores.index, stores.broker
        self._handoff, self._maintenance, self._punctuality = handoff, maintenance, punctuality

    # Messages

    def message(self, id_: str) -> MessageView | None:
        """One message, in whatever state: its state in every group, and its timeline. None if it is unknown."""
        return message_view.message(self._stores, id_)

    def message_at(self, id_: str, at_ms: int) -> Generator[None, None, PastView]:
        """One message as it was at a past moment; yields between steps. Raises `UnknownMessage` or `NotKept`."""
        return past.message_at(self._stores, id_, at_ms)

    def messages(
        self,
        state: str,
        from_ms: int = 0,
        to_ms: int = DUE_MS_MAX,
        limit: int = 100,
        cursor: str | None = None,
        places: listing.Places | None = None,
        prefix: str = "",
        newest: bool = False,
    ) -> tuple[list[MessageView], str | None]:
        """Messages in one state, a page at a time, without their timelines. A page may be short, or empty, and still have a
        cursor: None means that there is no more. `places`, `newest`: see `listing.browse`."""
        return listing.browse(self._stores, state, from_ms, to_ms, limit, cursor, places, prefix, newest)

    def sleeper(self, id_: str) -> StoredMessage | None:
        """One sleeping message, or one that was handed off and is still in a file of the Index."""
        return self._index.get(id_)

    def sleepers(self, from_ms: int, to_ms: int, limit: int, cursor: str | None = None) -> tuple[list[StoredMessage], str | None]:
        """Sleepers by due time, a page at a time."""
        return self._index.browse(from_ms, to_ms, limit=limit, cursor=cursor)

    def offsets_between(self, from_ms: int, to_ms: int) -> tuple[int, int]:
        """The ready offsets of the messages that became ready in [from_ms, to_ms)."""
        return copies.offsets_between(self._stores, from_ms, to_ms)

    def copies(self, first: int, end: int, wanted: copies.Wanted, due_ms: int) -> copies.Page:
        """The next page of copies of delivered messages, for another topic."""
        return copies.page(self._stores, first, end, wanted, due_ms)

    def events(self, cursor: str | None = None, since_ms: int | None = None) -> event_feed.Feed:
        """The events behind a cursor, or from about a time on."""
        return event_feed.feed(self._stores, cursor, since_ms)

    @property
    def event_ends(self) -> Sequence[event_feed.Place]:
        """Changes with every event. O(1)."""
        return event_feed.ends_of(self._stores)

    def forecast(self, now_ms: int, bucket_ms: int, buckets: int) -> Forecast:
        """Numbers of sleepers by due time, from the index alone."""
        return self._index.forecast(now_ms, bucket_ms=bucket_ms, buckets=buckets)

    # Groups

    def has_group(self, name: str) -> bool:
        return name in self._broker.groups

    @property
    def group_count(self) -> int:
        return len(self._broker.groups)

    def has_ready(self, name: str, now_ms: int) -> bool:
        """May a fetch of a group, existing or new, find a message? O(1)."""
        return not self.is_paused(name) and self._broker.has_ready(name, now_ms)

    def ready_bound(self, name: str) -> int:
        """How many messages a fetch of a group may find at most, retries that are not due yet included. O(1)."""
        group = self._broker.groups.get(name)
        return 0 if group is None else group.unfetched + len(group.retries)

    def is_paused(self, name: str | None = None) -> bool:
        """Whether a group is given no messages, since it or the topic is paused; without a name, whether the topic is."""
        pauses = self._stores.pauses
        return pauses.topic if name is None else pauses.holds(name)

    @property
    def high_weight(self) -> float | None:
        """The highest weight that high priority has in a group now; None unless the topic has a goal for its waits. O(groups)."""
        settings, groups = self._broker.settings, self._broker.groups.values()
        if not settings.priority_high_p95_ms:
            return None
        return max((weights_of(settings, group.weight)[HIGH] for group in groups), default=float(settings.priority_high))

    @property
    def in_flight(self) -> int:
        """Messages under a lease, over all groups. O(groups)."""
        return sum(group.in_flight for group in self._broker.groups.values())

    # Dead letters

    @property
    def dead_letters(self) -> DeadLetters:
        """The dead letters, for reading: changes go through `Topic.requeue` and `Topic.delete_dead`, which journal them."""
        return self._stores.dead_letters

    def letters_of(self, ids: Sequence[str], group: str | None = None) -> dict[str, list[DeadLetter]]:
        """The dead letters of messages, by id: of one group, or of all, also of groups that are gone."""
        letters: dict[str, list[DeadLetter]] = {id_: [] for id_ in ids}
        if group is not None:
            documents = list(self.dead_letters.find_many([(group, id_) for id_ in letters]).values())
        else:
            found, _ = self.dead_letters.find_of_groups(ids, self._broker.groups_with_dead_letters, bodies=True)
            documents = [letter.document for letter in found.values() if letter.document is not None]
        for document in documents:
            letter = read_letter(document)
            letters[letter.id].append(letter)
        return letters

    @property
    def dead_group_count(self) -> int:
        """The number of groups that have dead letters, deleted groups included."""
        return len(self._broker.groups_with_dead_letters)

    # Figures

    def stats(self, oldest: bool = True) -> TopicStats:
        """Figures of this topic, exact. O(segments + groups). `oldest=False` leaves out the time of the oldest ready message,
        which is read from its file and costs four times as much as all the rest."""
        return stats.topic_stats(self._stores, oldest)

    def group_stats(self) -> dict[str, GroupStats]:
        """Figures of every group."""
        return stats.group_stats(self._stores)

    def totals(self) -> TopicTotals:
        """Counters since the topic was opened."""
        return stats.topic_totals(self._stores)

    def group_tallies(self) -> dict[str, GroupTally]:
        """Counters of every group since the topic was opened."""
        return {name: group.tally for name, group in self._broker.groups.items()}

    @property
    def activity(self) -> int:
        """Messages produced and handed off since the topic was opened, plus sleepers: for ranking topics."""
        counters = self._index.counters
        return counters.appended + counters.handed_off + self._index.stats().sleep

    @property
    def lateness(self) -> Histogram:
        """Delays of handoffs, in ms."""
        return self._handoff.lateness

    @property
    def wait(self) -> Histogram:
        """Times from ready to the first delivery, in ms, over all groups."""
        return self._broker.wait

    @property
    def deliveries(self) -> Deliveries:
        """First deliveries, in time and late by `lateness_slo`, since the topic was opened."""
        return self._punctuality.deliveries

    def overdue(self, goal_ms: int, now_ms: int) -> int:
        """How many messages wait for a consumer and are late already. O(groups)."""
        return overdue(self._stores, goal_ms, now_ms)

    @property
    def unsynced_handoffs(self) -> int:
        """Documents of the ready log that a power cut could take; their messages would come due again."""
        return self._broker.unsynced_documents

    # Health

    def check(self) -> list[str]:
        """Every broken invariant, a line each. Costs a scan of all files."""
        return check_topic(self._stores)

    def damage(self) -> list[Damage]:
        """All damage found so far."""
        return self._stores.damage()

    @property
    def unsealable(self) -> dict[int, str]:
        """Segments whose seal failed, and why."""
        return self._maintenance.unsealable
