"""`turtlemq tenants`: the tenants of a server, with their limits and figures."""

from __future__ import annotations

from typing import Any

from turtlemq.cli.call import URL, call
from turtlemq.cli.output import console, format_bytes, new_table, print_json, print_table
from turtlemq.cli.parameters import AsJson, Url

COLUMNS = ("tenant", "topics", "weight", "in", "out", "in flight", "held", "refused")


def tenants(url: Url = URL, as_json: AsJson = False) -> None:
    """The tenants of the server's configuration: weight, limits, and messages in, out and in flight since the start.

    turtlemq tenants --json
    """
    found = call(url, "GET", "/v1/tenants")["tenants"]
    if as_json:
        for tenant in found:
            print_json(tenant)
        return
    table = new_table(*COLUMNS, left=2)
    for tenant in found:
        table.add_row(*_cells(tenant))
    print_table(table)
    if not found:
        console().print("the server's configuration has no [[tenants]]")


def _cells(tenant: dict[str, Any]) -> list[str]:
    """The cells of one row; a limit stands behind its figure."""
    in_flight, held = f"{tenant['in_flight']:,}", format_bytes(tenant["held_bytes"])
    return [
        tenant["name"],
        " ".join(tenant["topics"]),
        f"{tenant['weight']:g}",
        f"{tenant['produced']:,}" + (f", {tenant['produce_per_s']:g}/s at most" if tenant["produce_per_s"] else ""),
        f"{tenant['delivered']:,}",
        in_flight + (f" of {tenant['max_in_flight']:,}" if tenant["max_in_flight"] else ""),
        held + (f" of {format_bytes(tenant['max_bytes'])}" if tenant["max_bytes"] else ""),
        ", ".join(f"{count:,} {limit}" for limit, count in tenant["refused"].items()) or "none",
    ]
