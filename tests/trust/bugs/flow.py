"""Bugs planted in flow control: tenants, rates, early refusal, the desk and the retry budget of clients, goals for lateness, the
logical clock; and in answers of the native gRPC service."""

from __future__ import annotations

from tests.trust.bugs.bug import Bug

BUGS = (
    # Tenants
    Bug(
        "the excess of a large piece is forgiven",
        "fair_queue.py",
        "            owner.deficit += owner.quantum\n",
        "            owner.deficit = owner.quantum\n",
        "tenants",
    ),
    Bug(
        "an owner that comes back waits for a round of all others",
        "fair_queue.py",
        "        if not owner.items and owner.deficit >= 0 and not fresh:\n",
        "        if not owner.items and owner.deficit > owner.quantum:\n",
        "tenants",
    ),
    Bug(
        "the only request of a tenant is refused for its size",
        "server/tenants.py",
        "    if held <= own:\n        return True\n",
        "",
        "tenants",
    ),
    Bug(
        "messages in flight of a tenant are counted once",
        "server/tenants.py",
        "        if account.in_flight + count > most:\n            self._count(account, now)\n",
        "",
        "tenants",
    ),
    Bug(
        "a tenant's rate of bytes is not looked at before a body is decoded",
        "server/tenants.py",
        "        if account is not None:\n            self._check(account, 0, size, now)\n",
        "",
        "tenants",
    ),
    # Rates and early refusal
    Bug(
        "low priority may empty a bucket",
        "server/rate_limit.py",
        "    return bucket.burst * KEPT_FROM_LOW if bucket.burst >= KEPT_BURST_MIN else 0.0\n",
        "    return 0.0\n",
        "pace grpc_queue",
    ),
    Bug(
        "bytes of deliveries leave no debt",
        "server/rate_limit.py",
        "            self._byte_drip(topic, group, settings, now).spend(size, now)\n",
        "            pass\n",
        "pace",
    ),
    Bug(
        "the only request is refused for a slow disk, so that it stays slow forever",
        "server/pace.py",
        "        if self.waiting <= own:\n            return\n",
        "",
        "pace",
    ),
    Bug(
        "low priority may use all of a request's time",
        "server/pace.py",
        "left_s * LOW_SHARE if is_low else left_s)",
        "left_s)",
        "pace grpc_queue",
    ),
    Bug(
        "work of a call over gRPC counts as waiting for ever",
        "server/grpc/publishing.py",
        "            pace.end(work, perf_counter())\n",
        "            pass\n",
        "grpc_queue",
    ),
    # Clients
    Bug(
        "a desk hands out messages in the order of their arrival",
        "client/desk.py",
        "        self._levels[LEVELS.get(priority, 1)].append(message)\n",
        "        self._levels[0].append(message)\n",
        "client_desk",
    ),
    Bug(
        "low priority may fill a whole desk",
        "client/desk.py",
        "    return max(min(size, handlers), size - size // 4)\n",
        "    return size\n",
        "client_desk",
    ),
    Bug(
        "messages being handled do not count in the share of low priority",
        "client/consumer_state.py",
        ' - self.queue.count("low") - self._handling_low)',
        ' - self.queue.count("low"))',
        "client_desk",
    ),
    Bug(
        "a retry budget is never used up",
        "client/retry_budget.py",
        "            self._taken[slot] += 1\n            self._left -= 1\n",
        "",
        "client_budgets",
    ),
    Bug(
        "several senders probe a server at once",
        "client/retry_budget.py",
        "            if self._is_probed:\n                return False\n",
        "",
        "client_budgets",
    ),
    Bug(
        "an inner limit of time replaces the outer one",
        "client/time_limit.py",
        "limit if outer is None else lambda: min(limit(), outer())",
        "limit",
        "client_budgets",
    ),
    Bug(
        "the last try gets a part of the time that no other try can use",
        "client/sending.py",
        "            share_s = left_s - wait_s\n",
        "            pass\n",
        "client_budgets",
    ),
    # Goals for lateness
    Bug(
        "messages that wait and are late already do not burn the budget",
        "lateness_slo.py",
        "now.late - was.late + overdue",
        "now.late - was.late",
        "lateness_slo",
    ),
    Bug(
        "one slow half minute counts as the capacity of consumers",
        "lateness_slo.py",
        "if is_busy else known_per_s",
        "if True else known_per_s",
        "lateness_slo",
    ),
    # The logical clock
    Bug(
        "a merged number is not above the peer's",
        "logical_clock.py",
        "        self._last = next_number(max(self._last, peer), now_ms)\n",
        "        self._last = next_number(self._last, now_ms)\n",
        "logical_clock",
    ),
    Bug(
        "a clock is dragged into the future by a peer",
        "logical_clock.py",
        "(ahead_ms := time_of(peer) - now_ms) > AHEAD_MS_MAX",
        "(ahead_ms := time_of(peer) - now_ms) > 100 * AHEAD_MS_MAX",
        "logical_clock",
    ),
    Bug(
        "a new leader forgets the clock of the lost one",
        "server/leadership.py",
        "            before=process.following.leader_time,\n",
        "            before=type(process.following.leader_time)(),\n",
        "logical_clock",
    ),
    # The native gRPC service
    Bug(
        "a refused request of a stream is answered as stored",
        "server/grpc/publishing.py",
        "                    staged.error = error\n",
        "                    staged.receipt = Receipt([], [])\n",
        "grpc_queue",
    ),
    Bug(
        "topics that appear later join without a look at the rights",
        "server/grpc/subscribing.py",
        " and self._context.may_consume(self._call, topic):\n",
        ":\n",
        "grpc_subscribe",
    ),
    Bug(
        "a subscription ignores its credit of bytes",
        "server/grpc/credit.py",
        "            if left is not None and size_of(one) > left:\n",
        "            if False:\n",
        "grpc_subscribe",
    ),
    Bug(
        "deliveries that were not sent cost credit",
        "server/grpc/credit.py",
        "        self.credit.spend(messages, -1)\n",
        "        pass\n",
        "grpc_subscribe",
    ),
)
