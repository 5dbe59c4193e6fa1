"""The leader's book of the in-sync set, its right to answer, and the state machine of a replica, row by row."""

from __future__ import annotations

from typing import Any

import pytest

from turtlemq.replica.member import TABLE, Member
from turtlemq.replica.member_events import (
    Action,
    Beat,
    Begin,
    BidAnswered,
    Copied,
    Do,
    Drained,
    Event,
    Failed,
    GaveUp,
    HandoverAsked,
    HandoverOffered,
    Health,
    Lost,
    Marked,
    Met,
    Opened,
    PatienceOver,
    Refused,
    Retired,
    RetryNow,
    Seen,
    State,
    Welcomed,
)
from turtlemq.replica.membership import Book, Change, Greeting
from turtlemq.replica.tenure import NotLeading, Tenure

# ── the book ─────────────────────────────────────────────────────────────────────────────────────────────


def test_a_wanted_standby_comes_in_with_the_whole_stream() -> None:
    book = Book("a", 5, {"a", "b"})
    assert book.greet("c", 70) is Greeting.RESUME
    book.want("c", 100)
    assert book.required() == {"a", "b", "c"}
    book.acknowledge("b", 100)
    assert (book.covered(100), book.take_in()) == (70, None)
    book.acknowledge("c", 99)
    assert book.take_in() is None
    book.acknowledge("c", 100)
    change = book.take_in()
    assert change == Change(5, isr("a", "b", "c"))
    book.withdraw("c")
    assert "c" in book.required(), "the transaction is on its way"
    book.know(6, change.isr)
    assert (book.isr, book.revision, book.covered(100)) == (isr("a", "b", "c"), 6, 100)


def test_a_transaction_in_doubt_counts_until_a_newer_revision_is_read() -> None:
    book = Book("a", 5, {"a"})
    book.greet("b", 10)
    book.want("b", 10)
    assert book.take_in() is not None
    book.withdraw("b")
    book.know(5, {"a"})
    assert "b" in book.required(), "it compares with 5, and may still be applied"
    book.know(7, {"a"})
    assert book.required() == {"a"}
    book.know(6, {"a", "b"})
    assert book.required() == {"a"}, "an old read changes nothing"


def test_a_member_that_is_let_go_counts_until_etcd_says_so() -> None:
    book = Book("a", 5, {"a", "b", "c"})
    assert book.let_go({"a", "b", "c"}, min_isr=2) == Change(5, isr("a", "c"))
    assert book.required() == {"a", "b", "c"}
    book.know(6, {"a", "c"})
    assert book.required() == {"a", "c"}
    assert book.let_go({"c"}, min_isr=2) is None
    assert book.let_go({"c"}, min_isr=1) == Change(6, isr("a"))


def test_a_lost_transaction_is_settled_by_the_next_one() -> None:
    book = Book("a", 5, {"a"})
    book.greet("b", 10)
    book.want("b", 10)
    assert book.take_in() == Change(5, isr("a", "b"))
    book.know(5, {"a"})
    assert book.greet("b", None) is Greeting.LATER, "the transaction may still come"
    assert book.let_go({"b"}, min_isr=1) == Change(5, isr("a"))
    assert book.greet("b", None) is Greeting.LATER
    book.know(6, {"a"})
    assert book.required() == {"a"}
    assert book.greet("b", None) is Greeting.SYNC
    assert book.let_go({"b"}, min_isr=1) is None


def test_files_of_a_required_replica_are_not_replaced() -> None:
    book = Book("a", 5, {"a", "b"})
    assert book.greet("b", None) is Greeting.LATER
    assert book.applied("b") is None
    assert book.let_go({"b"}, min_isr=1) is not None
    assert book.greet("b", None) is Greeting.LATER
    book.know(6, {"a"})
    assert book.greet("b", None) is Greeting.SYNC
    book.greet("b", 3)
    book.want("b", 9)
    assert book.greet("b", None) is Greeting.SYNC, "a new HELLO ends the wish"
    assert book.required() == {"a"}


def test_an_answer_needs_the_lease_or_every_promise() -> None:
    tenure = Tenure("a")
    with pytest.raises(NotLeading):
        tenure.check_may_answer(0, {"a"})
    tenure.kept_alive(1_000)
    tenure.kept_alive(500)
    tenure.check_may_answer(3_399, {"a"})
    with pytest.raises(NotLeading):
        tenure.check_may_answer(3_400, {"a"})
    assert (tenure.asks_promise(2_200), tenure.asks_promise(2_201)) == (False, True)
    tenure.lease_lost()
    tenure.promised("b", 3_000)
    tenure.check_may_answer(4_199, {"a", "b"})
    for now, required in ((4_200, {"a", "b"}), (4_000, {"a", "b", "c"}), (4_000, {"a"})):
        with pytest.raises(NotLeading):
            tenure.check_may_answer(now, required)


# ── the state machine ────────────────────────────────────────────────────────────────────────────────────


def isr(*names: str) -> frozenset[str]:
    return frozenset(names)


def told(member: Member, *events: Event) -> list[Do]:
    """The actions of the last of these events, without the note of a newer `state`, which is always the first one."""
    actions: list[Action] = []
    for event in events:
        known = member.epoch, member.revision
        actions = member.handle(event, 0.5)
        is_newer = isinstance(event, Seen) and (event.epoch, event.revision) > known
        assert [n for n, action in enumerate(actions) if action.do is Do.NOTE_STATE] == [0] * is_newer
        actions = actions[is_newer:]
    return [action.do for action in actions]


def seen(member: Member, **changes: Any) -> Seen:
    """An answer to the member's last READ, a little later than the last one."""
    return member.seen._replace(at=member.seen.at + 1, read=member.reads, **changes)


def attached(state: State = State.IN_SYNC) -> Member:
    """A standby `b` of leader `a`."""
    member = Member("b", "process", complete=True)
    told(member, Begin())
    told(member, Seen(9, 5, 3, "a", isr("a", "b"), "n", "a", read=1))
    assert told(member, seen(member)) == [Do.HELLO]
    assert told(member, Welcomed(3, resume=True)) == [Do.PATIENCE, Do.NOTE, Do.FOLLOW]
    told(member, member.seen._replace(at=11, read=0, isr=isr("a", "b") if state is State.IN_SYNC else isr("a"), revision=6))
    assert member.state is state
    assert told(member, Beat(3)) == [Do.PATIENCE]
    return member


def leader() -> Member:
    member = attached()
    told(member, Lost())
    told(member, seen(member, lead=None), Drained(), BidAnswered(won=True, nonce="process/6"), Opened())
    assert (member.state, member.term) == (State.LEAD, 4)
    return member


def test_a_member_of_the_isr_runs_when_the_leader_is_gone() -> None:
    member = attached()
    assert told(member, Lost()) == [Do.READ]
    assert told(member, seen(member, lead=None)) == [Do.STOP]
    assert told(member, Drained()) == [Do.BID]
    assert member.bid is not None
    assert member.bid == (6, 4, isr("b"), "process/6")
    assert told(member, BidAnswered(won=False, nonce="process/5")) == [], "an earlier bid"
    assert told(member, BidAnswered(won=True, nonce="process/6")) == [Do.NOTE, Do.OPEN]
    assert (member.epoch, member.term) == (4, 4)
    assert told(member, Opened()) == [Do.SERVE, Do.READ]


@pytest.mark.parametrize("change", [{"isr": isr("a")}, {"lead": "a"}], ids=["not in the isr", "a leader is there"])
def test_others_do_not_run(change: dict[str, object]) -> None:
    member = attached()
    told(member, Lost())
    told(member, seen(member, **{"lead": None, **change}))
    assert member.state is State.ATTACH


def test_neither_incomplete_nor_sick_replicas_run() -> None:
    incomplete, sick = attached(), attached()
    told(incomplete, Marked(complete=False))
    told(sick, Health(good=False))
    for member in (incomplete, sick):
        told(member, Lost())
        told(member, seen(member, lead=None))
        assert member.state is State.ATTACH
    assert told(sick, Health(good=True)) == [Do.READ]
    assert told(sick, seen(sick)) == [Do.STOP]


def test_a_promise_outlasts_the_connection() -> None:
    member = attached()
    (patience,) = member.handle(Beat(3, promise=True), 0.0)
    assert patience == Action(Do.PATIENCE, wait_ms=1_500)
    told(member, Lost())
    assert told(member, seen(member, lead=None)) == []
    assert told(member, PatienceOver()) == [Do.READ]
    assert told(member, seen(member)) == [Do.STOP]


def test_a_process_that_starts_keeps_promises_of_the_one_before() -> None:
    member = Member("b", "process", complete=True)
    told(member, Begin())
    assert told(member, Seen(9, 5, 3, "a", isr("a", "b"), "n", None, read=1)) == [Do.PATIENCE, Do.READ]
    told(member, seen(member), Refused(), Lost())
    assert told(member, RetryNow()) == [Do.READ]
    assert told(member, seen(member)) == []
    told(member, PatienceOver())
    assert told(member, seen(member)) == [Do.STOP]
    alone = Member("b", "process", complete=True)
    told(alone, Begin())
    assert told(alone, Seen(9, 5, 3, "b", isr("b"), "n", None, read=1)) == [Do.STOP]


def test_a_bid_in_doubt_is_settled_by_nonce_revision_or_lease() -> None:
    def doubtful() -> Member:
        member = attached()
        told(member, Lost())
        told(member, seen(member, lead=None), Drained())
        assert told(member, BidAnswered(won=None, nonce="process/6")) == [Do.READ]
        return member

    member = doubtful()
    assert told(member, seen(member, revision=7, epoch=4, leader="b", nonce="process/6", lead="b")) == [Do.NOTE, Do.OPEN]
    member = doubtful()
    told(member, seen(member, revision=7, epoch=4, leader="b", nonce="another process", lead="b"))
    assert member.state is State.ATTACH
    assert told(member, seen(member)) == [Do.REVOKE_LEAD, Do.READ]
    member = doubtful()
    assert told(member, seen(member)) == [Do.GIVE_UP]
    early = seen(member)
    assert told(member, GaveUp()) == [Do.READ]
    assert told(member, early) == [], "it was read before the lease was gone"
    told(member, seen(member))
    assert member.state is State.ATTACH


def test_files_are_replaced_only_outside_of_the_isr() -> None:
    member = attached(State.FOLLOW)
    told(member, Lost())
    told(member, seen(member))
    early = seen(member)
    assert told(member, Welcomed(3, resume=False)) == [Do.READ]
    assert told(member, early) == [], "it was read before WELCOME"
    assert told(member, seen(member, isr=isr("a", "b"))) == [Do.HANG_UP, Do.RETRY]
    assert told(member, RetryNow()) == [Do.READ]
    assert told(member, seen(member)) == [Do.HELLO]
    told(member, Welcomed(3, resume=False))
    assert told(member, seen(member, isr=isr("a"))) == [Do.MARK_INCOMPLETE]
    assert told(member, Marked(complete=False)) == [Do.COPY]
    assert told(member, Copied(applied_lsn=9, pin_lsn=10)) == []
    assert told(member, Copied(applied_lsn=10, pin_lsn=10)) == [Do.MARK_COMPLETE]
    assert told(member, Marked(complete=True)) == [Do.PATIENCE, Do.NOTE, Do.FOLLOW]
    assert (member.state, member.complete) == (State.FOLLOW, True)


def test_a_handover_is_over_when_etcd_says_so() -> None:
    member = attached()
    assert told(member, HandoverOffered(3, equal=False)) == []
    assert told(member, HandoverOffered(3, equal=True)) == [Do.LEASE]
    assert member.state is State.IN_SYNC
    told(member, Lost())
    assert told(member, seen(member, revision=7, epoch=4, leader="b", nonce="of a", lead="b")) == [Do.STOP]
    assert told(member, Drained()) == [Do.NOTE, Do.OPEN]
    assert member.term == 4


def test_a_leader_hands_over_to_members_of_the_isr() -> None:
    member = leader()
    told(member, seen(member, revision=7, epoch=4, leader="b", lead="b", isr=isr("b", "c")))
    assert told(member, HandoverAsked("b")) == told(member, HandoverAsked("d")) == []
    assert told(member, HandoverAsked("c")) == [Do.RETIRE]
    assert told(member, Retired()) == [Do.EXEC]


def test_a_leader_stops_at_a_higher_epoch_only() -> None:
    member = leader()
    assert told(member, seen(member, revision=7, epoch=4, leader="b", lead=None)) == [Do.CLAIM]
    assert told(member, Met(4)) == []
    assert told(member, Met(5)) == [Do.EXEC]
    member = leader()
    assert told(member, seen(member, epoch=5, leader="c", lead="c")) == [Do.EXEC]


def test_etcd_that_went_back_stops_everything() -> None:
    member = attached()
    late = seen(member)
    told(member, Lost())
    told(member, member.seen._replace(at=30, epoch=4, read=0))
    assert told(member, late) == [], "this read was under way"
    told(member, RetryNow())
    actions = member.handle(seen(member, epoch=3), 0.5)
    assert [action.do for action in actions] == [Do.ALARM]
    assert "went back" in actions[0].text
    assert member.state is State.STUCK
    member = leader()
    assert told(member, Seen(2, 1, 1, "a", isr("a"), read=member.reads)) == [Do.ALARM, Do.EXEC]


def test_each_state_of_etcd_is_noted_once() -> None:
    member = attached()
    news = seen(member, revision=member.seen.revision + 1)
    assert Do.NOTE_STATE in [action.do for action in member.handle(news, 0.5)]
    assert Do.NOTE_STATE not in [action.do for action in member.handle(news._replace(at=news.at + 1), 0.5)]


@pytest.mark.parametrize("epoch", [4, 5])
def test_a_later_process_knows_that_etcd_went_back_within_an_epoch(epoch: int) -> None:
    """A process that has started knows the revision from its disk. A forced epoch counts with any revision."""
    member = Member("b", "process", complete=True, epoch=4, revision=7)
    told(member, Begin())
    actions = member.handle(Seen(6, revision=6, epoch=epoch, leader="b", isr=isr("b"), read=1), 0.5)
    if epoch == 4:
        assert [action.do for action in actions] == [Do.ALARM]
        assert "force-leader" in actions[0].text
        assert member.state is State.STUCK
    else:
        assert Do.ALARM not in [action.do for action in actions]
        assert member.state is State.RUN


def test_the_first_node_begins_a_shard_once() -> None:
    member = Member("b", "process", complete=False, fresh=True)
    told(member, Begin())
    assert told(member, Seen(9, first=True, read=1)) == [Do.MARK_COMPLETE]
    told(member, Marked(complete=True))
    assert told(member, seen(member)) == [Do.STOP]
    assert told(member, Drained()) == [Do.BID]
    assert member.bid is not None
    assert member.bid == (0, 1, isr("b"), "process/0")
    late, used = Member("b", "process", complete=False, fresh=True), Member("b", "process", complete=False)
    told(late, Begin(), Seen(9, revision=3, epoch=1, leader="a", isr=isr("a"), first=True, read=1))
    told(used, Begin(), Seen(9, first=True, read=1))
    assert late.state is used.state is State.ATTACH


def test_a_broken_copy_is_marked_and_needs_an_operator() -> None:
    member = attached()
    assert told(member, Failed("fsync: EIO", copy_lost=True)) == [Do.MARK_INCOMPLETE, Do.ALARM]
    assert told(member, Failed("again", copy_lost=True)) == told(member, Lost()) == []
    assert member.state is State.STUCK


def test_every_state_but_the_last_has_a_way_out() -> None:
    assert {state for row in TABLE for state in row.states if row.then is not state} == set(State) - {State.STUCK}


def test_a_candidate_that_lost_has_an_election_timer() -> None:
    """A process that is alone in the in-sync set runs as soon as it has started, before any timer was set."""
    member = Member("a", "process", complete=True, fresh=True)
    told(member, Begin())
    assert told(member, Seen(1, first=True, read=1)) == [Do.STOP]
    assert told(member, Drained()) == [Do.BID]
    assert member.bid is not None
    assert told(member, BidAnswered(False, member.bid.nonce)) == [Do.PATIENCE, Do.READ], "no lease was granted"
    assert told(member, seen(member)) == []
    assert told(member, PatienceOver()) == [Do.READ]
    assert told(member, seen(member)) == [Do.STOP]
    assert member.state is State.RUN


def test_a_read_overtaken_by_a_watch_is_answered_by_newer_facts() -> None:
    member = attached(State.FOLLOW)
    told(member, Lost())
    told(member, seen(member, isr=isr("a")))
    assert told(member, Welcomed(3, resume=False)) == [Do.READ]
    late = seen(member)
    assert told(member, member.seen._replace(at=late.at + 1, revision=6, read=0)) == []
    assert told(member, late) == [Do.MARK_INCOMPLETE]
    assert member.seen.at == late.at + 1


def test_a_candidate_that_lost_calls_the_next_leader() -> None:
    """Its HELLO to the leader before was never answered."""
    member = attached()
    told(member, Lost())
    assert told(member, seen(member)) == [Do.HELLO]
    assert told(member, seen(member, lead=None)) == [Do.STOP]
    assert told(member, Drained()) == [Do.BID]
    assert told(member, seen(member, revision=9, epoch=4, leader="c", lead="c")) == [Do.PATIENCE, Do.READ]
    assert told(member, seen(member)) == [Do.HELLO]


def test_the_mark_of_an_earlier_copy_ends_no_other() -> None:
    member = attached(State.FOLLOW)
    told(member, Lost(), seen(member, isr=isr("a")))
    told(member, Welcomed(3, resume=False))
    assert told(member, seen(member)) == [Do.MARK_INCOMPLETE]
    assert told(member, Marked(False), Copied(9, 9)) == [Do.MARK_COMPLETE]
    told(member, Lost())
    assert told(member, seen(member)) == [Do.HELLO]
    told(member, Welcomed(3, resume=False))
    assert told(member, seen(member)) == [Do.MARK_INCOMPLETE]
    assert told(member, Marked(True)) == []
    assert told(member, Marked(False)) == [Do.COPY]
    assert member.state is State.SYNC
