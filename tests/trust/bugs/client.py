"""Bugs planted in `client`."""

from __future__ import annotations

from tests.trust.bugs.bug import Bug

BUGS = (
    # Forwarding to the leader
    Bug(
        "the client does not learn from a node that does not lead",
        "client/topology.py",
        "            self._set_leader(shard, self._named(answer))\n",
        "            pass\n",
        "client_topology",
    ),
    Bug(
        "the client asks for the topology before every request, once a server has failed",
        "client/topology.py",
        "        self._ask_at = now_s + ASK_S * (1 + self._random())\n",
        "",
        "client_topology",
    ),
    Bug(
        "the client goes back to a leader that is lost as long as the name server names it",
        "client/topology.py",
        " and not self._is_avoided(leader.url, now_s):\n            return Target(leader.url, True, topic)",
        ":\n            return Target(leader.url, True, topic)",
        "client_topology",
    ),
)
