"""Metric families of tenants. They are there only if the configuration has any."""

from __future__ import annotations

from collections.abc import Iterator

from turtlemq.server.metrics import exposition
from turtlemq.server.service import Service

# Name, type, help text, field of `Account`.
FIGURES = (
    ("turtlemq_tenant_produced_total", "counter", "Messages in requests of a tenant that were stored.", "produced"),
    ("turtlemq_tenant_produced_bytes_total", "counter", "Bytes of these requests.", "produced_bytes"),
    ("turtlemq_tenant_delivered_total", "counter", "Messages given to consumers of a tenant.", "delivered"),
    ("turtlemq_tenant_in_flight", "gauge", "Messages of a tenant under a lease.", "in_flight"),
    ("turtlemq_tenant_held_bytes", "gauge", "Bytes of a tenant's requests under way.", "held"),
)


def tenant_families(service: Service) -> Iterator[str]:
    """All families of tenants."""
    if service.tenants is None:
        return
    accounts = service.tenants.counted()
    for name, kind, text, field in FIGURES:
        samples = [({"tenant": account.tenant.name}, getattr(account, field)) for account in accounts]
        yield from exposition.family(name, kind, text, samples)
    refused = [
        ({"tenant": account.tenant.name, "limit": limit}, count)
        for account in accounts
        for limit, count in sorted(account.refused.items())
    ]
    text = "Refused requests of a tenant, by the limit that refused them."
    yield from exposition.family("turtlemq_tenant_refused_total", "counter", text, refused)
    waits = [({"tenant": name}, count) for name, count in service.turns.waiting(account.tenant.name for account in accounts)]
    text = "Requests of a tenant that wait for their turn on the event loop."
    yield from exposition.family("turtlemq_tenant_waiting", "gauge", text, waits)
