"""A simulation of the whole engine against a plain model: random work, crashes, damage to caches, a clock that jumps.

The model knows, for each group and message, the one state it must be in. Every answer of the engine is compared with it, and
after every few steps the figures and `Engine.check` are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial

from tests.harness.engine_world import TOPIC, At, Crash, Ground, SimDoor
from turtlemq.broker.results import Extended
from turtlemq.engine import Engine
from turtlemq.errors import TurtleError
from turtlemq.topic.dead_letters import DeadLetter, Filter


class Sim(Ground):
    """One run."""

    # Consuming

    def available(self, name: str) -> tuple[list[str], set[str], set[str]]:
        """New messages in order, those that come again, and those of both that are too late."""
        story = self.groups[name]
        asleep = set(self.naps)
        fresh = [i for i in self.log if i in story.at and story.at[i].kind == "ready" and story.at[i].left < 0]
        again = {i for i, at in story.at.items() if at.kind == "wait" and at.when <= self.now}
        again |= {i for i, at in story.at.items() if at.kind == "nap" and (at.when, name, i) not in asleep}
        again |= {i for i, at in story.at.items() if at.kind == "ready" and at.left >= 0}
        late = {i for i in (*fresh, *again) if self._is_late(i, story.at[i])}
        return fresh, again, late

    def _is_late(self, id_: str, at: At) -> bool:
        """Was it not delivered for the first time before it expired?"""
        end = self.msgs[id_].expires_ms
        return end is not None and end <= self.now and at.attempt == 1 and not at.lasting

    def reserve(self) -> None:
        name = self.chance.choice(list(self.groups))
        story, count = self.groups[name], self.chance.choice([1, 5, 50])
        ttr, auto = self.chance.choice([None, None, 30, 100_000]), self.chance.random() < 0.1
        fresh, again, late = self.available(name)
        room = self.settings.max_in_flight - sum(at.kind == "reserve" for at in story.at.values())
        loose = {i for i, at in story.at.items() if at.kind == "any"}
        self.pending = lambda: self.resync(name, {*fresh, *again, *loose})
        out = self.engine.reserve(TOPIC, name, count, self.now, ttr_ms=ttr, auto=auto)
        got: list[str] = []
        for piece, until in zip(out.pieces, out.until_ms, strict=True):
            held = piece.messages
            rows = zip(held.ids, held.attempts.tolist(), held.due_ms.tolist(), held.offsets.tolist(), until.tolist(), strict=True)
            for id_, attempt, due, offset, end in rows:
                self._delivered(name, id_, (attempt, due, offset, end), {*fresh, *again} - late, ttr, auto)
                got.append(id_)
        is_paused = bool({"", name} & self.paused)
        assert not (is_paused and got), (name, got)
        expected = 0 if is_paused else max(0, min(count, room, len({*fresh, *again} - late)))
        unsure = any(at.kind == "any" for at in story.at.values()) or any(i in loose for i in got)
        assert unsure or len(got) == expected or (late and len(got) <= expected), (name, len(got), expected)
        self._in_order(got, [i for i in fresh if i not in late])
        self._bury_late(name, late | {i for i in loose if (end := self.msgs[i].expires_ms) is not None and end <= self.now})

    def _in_order(self, got: list[str], fresh: list[str]) -> None:
        for level in range(3):
            mine = [i for i in got if i in set(fresh) and self.msgs[i].level == level]
            assert mine == [i for i in fresh if self.msgs[i].level == level][: len(mine)], "order by (due, arrival)"

    def _delivered(
        self, name: str, id_: str, told: tuple[int, int, int, int], may: set[str], ttr: int | None, auto: bool
    ) -> None:
        story, msg = self.groups[name], self.msgs[id_]
        attempt, due, offset, end = told
        at = story.at[id_]
        if at.kind == "any":  # a retry from before the group was moved, whose own document is gone
            at = At("ready", attempt)
            may = {id_}
        assert id_ in may, (name, id_, at, msg)
        assert (attempt, due) == (at.attempt, msg.due_ms), (name, id_, at, attempt)
        assert end == (0 if auto else self.now + (ttr or msg.ttr_ms or self.settings.ttr_ms))
        story.docs.setdefault((id_, offset), (attempt, at.left))
        if auto:
            story.at[id_] = At("acked")
            story.acks += 1
        else:
            story.at[id_] = At("reserve", attempt, end, offset, at.lasting)

    def _bury_late(self, name: str, late: set[str]) -> None:
        for id_ in late:
            letter = self.engine.topic(TOPIC).view.dead_letters.get(name, id_)
            at = self.groups[name].at[id_]
            mine = letter is not None and letter.document.meta["epoch"] == self.broker.groups[name].epoch
            if letter is not None and mine and not self.holds(name, id_):
                assert at.kind == "any" or letter.attempts == at.attempt - 1
                self.died(name, id_, letter.attempts)

    def ack(self) -> None:
        name = self.chance.choice(list(self.groups))
        story = self.groups[name]
        held = sorted(i for i, at in story.at.items() if at.kind == "reserve")
        ids = self.some(held, self.chance.choice([1, 5, 60])) if held else []
        acks = [i if self.chance.random() < 0.7 else f"-{i}" for i in ids]
        settled = self.some(sorted(i for i, at in story.at.items() if at.kind == "acked"), 2)
        delay = self.chance.choice([None, None, 0, 100, 40_000])
        self.pending = lambda: self.resync(name, set(ids))
        out = self.engine.ack(TOPIC, name, [*acks, "zz", *settled], self.now, retry_delay_ms=delay, error="no")
        assert sorted(out.unknown) == sorted(["zz", *settled])
        dead = 0
        for entry in acks:
            if entry[0] == "-":
                self.failed(name, entry[1:], delay)
                dead += story.at[entry[1:]].kind == "dead"
            else:
                story.at[entry] = At("acked")
                story.acks += 1
        failed = sum(entry[0] == "-" for entry in acks)
        assert (out.acked, out.failed, out.dead) == (len(acks) - failed, failed - dead, dead)

    def extend(self) -> None:
        name = self.chance.choice(list(self.groups))
        ids = self.some(sorted(i for i, at in self.groups[name].at.items() if at.kind == "reserve"), 4)
        self.pending = lambda: self.resync(name, set(ids))
        assert self.engine.extend(TOPIC, name, [*ids, "zz"], 500, self.now) == Extended(len(ids), ["zz"])
        for id_ in ids:
            self.groups[name].at[id_].when = self.now + 500

    def give_back(self) -> None:
        """As if the message had not been delivered: the same attempt comes again."""
        name = self.chance.choice(list(self.groups))
        story = self.groups[name]
        ids = self.some(sorted(i for i, at in story.at.items() if at.kind == "reserve"), 4)
        self.pending = lambda: self.resync(name, set(ids))
        assert self.engine.give_back(TOPIC, name, [*ids, "zz"], self.now) == (len(ids), ["zz"])
        for id_ in ids:
            at = story.at[id_]
            story.at[id_] = At("wait", at.attempt, self.now, at.left, at.lasting)

    # Groups

    def move(self) -> None:
        name = self.chance.choice(["a", "b", "c"])
        self.place(name, self.chance.choice(["earliest", "earliest", "latest"]))

    def drop_group(self) -> None:
        if len(self.groups) > 1:
            name = self.chance.choice(list(self.groups))
            self.pending = lambda: self._dropped(name)
            self.engine.drop_group(TOPIC, name, self.now)
            del self.groups[name]
            self.paused -= {name}

    def _dropped(self, name: str) -> None:
        self._read_pauses(name)
        if name not in self.broker.groups:
            self.groups.pop(name, None)

    def pause(self) -> None:
        """Pause or resume a group or the topic. A crash leaves it as it was, or done."""
        name, paused = self.chance.choice(["", *self.groups]), self.chance.random() < 0.4
        self.pending = lambda: self._read_pauses(name)
        self.engine.topic(TOPIC).set_paused(name or None, paused)
        self.paused = self.paused | {name} if paused else self.paused - {name}

    def _read_pauses(self, name: str) -> None:
        found = self._pauses()
        assert found ^ self.paused <= {name}, (found, self.paused)
        self.paused = found

    def _pauses(self) -> frozenset[str]:
        pauses = self.engine.topic(TOPIC).stores.pauses
        return pauses.groups | {""} if pauses.topic else pauses.groups

    # The dead

    def pick_letters(self) -> list[DeadLetter]:
        dead = self.engine.topic(TOPIC).view.dead_letters
        mine = [letter for letter in dead.all(Filter()) if letter.group in self.groups]
        assert {(letter.group, letter.id) for letter in dead.all(Filter())} == {
            (g, i) for g in self.letters for i in self.letters[g]
        }
        kinds = {(letter.group, letter.id): self.groups[letter.group].at.get(letter.id, At("gone")).kind for letter in mine}
        return self.some([letter for letter in mine if kinds[letter.group, letter.id] == "dead"], 5)

    def requeue(self) -> None:
        letters = self.pick_letters()
        due, reset = self.now + self.chance.choice([0, 50, 90_000]), self.chance.random() < 0.5
        per_s = self.chance.choice([None, 10.0])
        self.pending = lambda: list(map(partial(self._requeued, due=due, reset=reset, done=None), letters))
        assert self.engine.requeue(TOPIC, letters, self.now, due_ms=due, reset_attempts=reset, per_s=per_s) == len(letters)
        for i, letter in enumerate(letters):
            self._requeued(letter, due + (i * 100 if per_s else 0), reset, True)

    def _requeued(self, letter: DeadLetter, due: int, reset: bool, done: bool | None) -> None:
        topic = self.engine.topic(TOPIC)
        key = f"{letter.group}/{letter.id}"
        if done is None:
            done = topic.view.dead_letters.get(letter.group, letter.id) is None
            if done:
                found = topic.stores.index.find(key)
                assert found is not None, "neither dead nor asleep"
                due = found.due_ms
        if done:
            del self.letters[letter.group][letter.id]
            attempt = 1 if reset else letter.attempts + 1
            self.groups[letter.group].at[letter.id] = At("nap", attempt, due, int(letter.document.meta["offset"]), True)
            self.naps.append((due, letter.group, letter.id))

    def delete_dead(self) -> None:
        letters = self.pick_letters()
        self.pending = lambda: list(map(self._deleted, letters))
        assert self.engine.delete_dead(TOPIC, letters, self.now) == len(letters)
        for letter in letters:
            self._deleted(letter)

    def _deleted(self, letter: DeadLetter) -> None:
        if self.engine.topic(TOPIC).view.dead_letters.get(letter.group, letter.id) is None:
            del self.letters[letter.group][letter.id]
            self.groups[letter.group].at[letter.id] = At("gone")

    # Housekeeping

    def compact(self) -> None:
        self.pending = lambda: None
        self.engine.compact(TOPIC)

    def retain(self) -> None:
        """Only messages that all groups have settled go."""
        if not self.retaining:
            return
        before = {i: self.offset(i) for i in self.log}
        self.now += 61_000
        self.run_tick()
        for id_, offset in before.items():
            if offset is not None and self.offset(id_) is None and self.msgs[id_].state == "ready":
                kinds = {story.at[id_].kind for story in self.groups.values() if id_ in story.at}
                assert kinds <= {"acked", "dead", "gone", "nap"}, (id_, kinds)

    def finish_jobs(self) -> None:
        """Run the jobs that wait for the flusher."""
        if self.flusher is not None:
            self.flusher.finish()

    # Ends and beginnings

    def reopen(self) -> None:
        self.engine.close()
        self._open()

    def crash(self) -> None:
        self._abandon()
        self._damage_caches()
        self._open()

    def _abandon(self) -> None:
        self.engine.door.shut()
        self.engine.folder.unlock()

    def _open(self) -> None:
        self.door = SimDoor(self.durable)
        if self.flusher is not None:
            self.flusher.jobs.clear()  # they died with the process
        self.engine = Engine.open(self.root, door=self.door, settings=self.settings, flusher=self.flusher)

    def _damage_caches(self) -> None:
        """Caches may be gone or damaged."""
        folder = self.root / "topic" / TOPIC
        if self.chance.random() < 0.4:
            (folder / "offset").unlink(missing_ok=True)
        for path in sorted(folder.glob("ready_*.run")):
            if self.chance.random() < 0.1:
                path.unlink()
            elif self.chance.random() < 0.1:
                data = bytearray(path.read_bytes())
                data[self.chance.randrange(len(data))] ^= 0xFF
                path.write_bytes(data)

    def interrupted(self) -> None:
        """The process ends in the middle of something."""
        self.door.crash_in = self.chance.randint(0, 6)
        self.pending = lambda: None
        try:
            self.chance.choice(self.steps(inside=True))()
        except (Crash, TurtleError):
            if not self.door.crashed:
                raise
        self.door.crash_in = -1
        if self.door.crashed or self.engine.trouble:
            assert self.door.crashed
            self._abandon()
            self._open()
            self.pending()

    def resync(self, name: str, ids: set[str]) -> None:
        """After a crash in the middle: these may have moved on. Take the engine's word, if it is one that may be."""
        story = self.groups[name]
        for id_ in ids:
            at = story.at[id_]
            view = self.engine.message(TOPIC, id_)
            assert view is not None, id_
            told = view.groups[name]
            match told["state"]:
                case "reserve":
                    lease, i = self.broker.groups[name].lease_of(id_)
                    offset = int(lease.messages.offsets[i])
                    story.docs.setdefault((id_, offset), (int(str(told["attempt"])), at.left))
                    story.at[id_] = At("reserve", int(str(told["attempt"])), lease.until_ms, offset, at.lasting)
                case "ready" if "due_ms" in told:
                    story.at[id_] = At("wait", int(str(told["attempt"])) + 1, int(str(told["due_ms"])), at.left, at.lasting)
                case "sleep":
                    if at.kind != "nap":
                        found = self.engine.topic(TOPIC).stores.index.find(f"{name}/{id_}")
                        assert found is not None
                        story.at[id_] = At("nap", int(found.meta["attempt"]), found.due_ms, at.left)
                        self.naps.append((found.due_ms, name, id_))
                case "dead":
                    self.died(name, id_, int(str(told["attempt"])))
                case "history":
                    story.at[id_] = At("acked")
                case _:
                    assert at.kind in ("ready", "nap", "any"), (id_, at, told)
        story.acks = self.engine.groups(TOPIC)[name].history

    # The run

    def steps(self, inside: bool = False) -> list[Callable[[], None]]:
        often = [self.submit, self.tick, self.tick, self.reserve, self.reserve, self.ack, self.ack]
        seldom = [
            self.duplicate,
            self.cancel,
            self.reschedule,
            self.extend,
            self.give_back,
            self.compact,
            self.requeue,
            self.delete_dead,
        ]
        rare = [self.finish_jobs, self.finish_jobs, self.jump, self.retain, self.move, self.drop_group, self.pause]
        ends = [] if inside else [self.reopen, self.crash, self.interrupted, self.interrupted]
        return often * 6 + seldom * 3 + rare + ends * 2

    def run(self, count: int) -> None:
        for i in range(count):
            if not self.groups:
                self.place("a", "earliest")
            step = self.chance.choice(self.steps())
            self.done = (i, step.__name__)
            step()
            self.check_figures()
            if i % 10 == 9:
                self.check()
        self.drain()

    def check(self) -> None:
        """Damaged tables are this test's own work."""
        known = "It is built again from its segment."
        problems = [line for line in self.engine.check() if not line.endswith(known)]
        assert not problems, problems

    def check_figures(self) -> None:
        stats, groups = self.engine.stats(TOPIC), self.engine.groups(TOPIC)
        assert set(groups) == set(self.groups)
        assert self._pauses() == self.paused
        asleep = set(self.naps)
        assert stats.sleep == sum(m.state == "sleep" for m in self.msgs.values()) + len(self.naps), (stats.sleep, self.naps)
        cancelled = sum(m.state == "cancelled" for m in self.msgs.values())
        assert stats.cancelled == cancelled or (self.lost_notices and stats.cancelled < cancelled)
        for name, story in self.groups.items():
            kinds = Counter(at.kind for i, at in story.at.items() if at.kind != "nap" or (at.when, name, i) not in asleep)
            told = groups[name]
            if not kinds["any"]:
                expected = (kinds["ready"] + kinds["wait"] + kinds["nap"], kinds["reserve"], story.acks)
                assert (told.ready, told.reserve, told.history) == expected, (name, told, kinds, story.acks)
            assert told.dead == len(self.letters.get(name, {}))

    def drain(self) -> None:
        """In the end every message of every group is acknowledged, dead or cancelled, each once."""
        stats = self.engine.stats(TOPIC)
        for paused in self.paused:
            self.engine.topic(TOPIC).set_paused(paused or None, False)
        for _ in range(200):
            self.now += 100_000
            self.run_tick()
            for name, story in self.groups.items():
                while out := self.engine.reserve(TOPIC, name, 10_000, self.now):
                    for id_ in out.ids:
                        assert story.at[id_].kind in ("ready", "wait", "nap", "any"), (name, id_, story.at[id_])
                        story.at[id_] = At("acked")
                    assert self.engine.ack(TOPIC, name, out.ids, self.now).unknown == []
                for letter in self.engine.topic(TOPIC).view.dead_letters.all(Filter(group=name)):
                    if story.at.get(letter.id, At("gone")).kind in ("ready", "wait", "nap"):
                        story.at[letter.id] = At("dead")
            stats = self.engine.stats(TOPIC)
            if not (stats.sleep or stats.ready or stats.reserve):
                break
        assert (stats.sleep, stats.ready, stats.reserve) == (0, 0, 0), stats
        for name, story in self.groups.items():
            left = {i: at for i, at in story.at.items() if at.kind not in ("acked", "dead", "gone", "any")}
            assert not left, (name, left)
        self.check()
        self.engine.close()
