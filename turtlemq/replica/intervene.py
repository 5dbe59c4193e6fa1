"""Interventions carried out in etcd: read all keys of a cluster, plan (`replica.interventions`), and send one transaction.

If a key has changed meanwhile, the plan is made again from the new keys. A transaction without an answer is settled by a read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from turtlemq.errors import Conflict
from turtlemq.replica.cluster_state import Keys
from turtlemq.replica.cluster_view import ClusterView
from turtlemq.replica.etcd import Etcd, InDoubt, delete, mod_revision_is, put
from turtlemq.replica.interventions import Plan

TRIES = 5


class Intervention(NamedTuple):
    """A plan, None if there was nothing to do, and the keys from which it was made."""

    plan: Plan | None
    view: ClusterView


async def read_view(etcd: Etcd, keys: Keys) -> ClusterView:
    """All keys of a cluster, as they are now. Raises `EtcdError`, or `BadValue`."""
    found = await etcd.get(keys.prefix, prefix=True)
    return ClusterView.of(keys, {key.key: key for key in found.keys})


async def intervene(etcd: Etcd, keys: Keys, plan_of: Callable[[ClusterView], Plan | None]) -> Intervention:
    """Carry out the plan that `plan_of` makes of the present keys. Raises its errors, `Conflict`, or `EtcdError`."""
    for _ in range(TRIES):
        view = await read_view(etcd, keys)
        plan = plan_of(view)
        if plan is None or await carry_out(etcd, plan):
            return Intervention(plan, view)
    raise Conflict("the cluster changes again and again; nothing was done. Try again in a moment.")


async def carry_out(etcd: Etcd, plan: Plan) -> bool:
    """Send the transaction of a plan. False: a key has changed since, and nothing was done. Raises `EtcdError`."""
    compares = [mod_revision_is(key, revision) for key, revision in plan.unchanged.items()]
    changes = [*(put(key, value) for key, value in plan.puts.items()), *map(delete, plan.deletes)]
    try:
        return (await etcd.transact(compares, changes)).succeeded
    except InDoubt:
        if not await _is_done(etcd, plan):
            raise
        return True


async def _is_done(etcd: Etcd, plan: Plan) -> bool:
    """Whether the keys are as the plan wants them."""
    for key, value in plan.puts.items():
        if [found.value for found in (await etcd.get(key)).keys] != [value]:
            return False
    return not any([(await etcd.get(key)).keys for key in plan.deletes])
