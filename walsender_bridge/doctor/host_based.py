"""Evaluates pg_hba.conf for a role that does not exist yet, so that a login cannot be tried. Pure.

PostgreSQL uses the first rule that matches a connection. A logical walsender is authorized like any client of its database;
the keyword `replication` matches physical ones. What cannot be evaluated here (host names, `samenet`, regular expressions,
the client's address) is not guessed: only a certain refusal is an error.
"""

import ipaddress
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Final

from walsender_bridge.doctor.finding import Finding, Severity
from walsender_bridge.doctor.settings import Facts
from walsender_bridge.errors import Cause

CHECK: Final = "pg_hba.conf"
Rule = tuple[Any, ...]


def evaluate(facts: Facts, where: str, *, physical: bool = False) -> Iterator[Finding]:
    """Whether the role would be admitted; nothing if the rules cannot be read. `physical`: as a physical walsender."""
    rules: Sequence[Rule] = facts["hba"]
    if not rules:
        return
    role, database = facts["role"], facts["database"]
    for rule in rules:
        if rule[7]:
            yield Finding(
                CHECK,
                where,
                f"line {rule[0]} is invalid, so the server keeps its previous rules: {rule[7]}",
                Severity.WARNING,
                repair="correct it, and run SELECT pg_reload_conf()",
            )
    wanted = "replication" if physical else database
    address = rules[0][8]
    line = f"{'local' if address is None else 'host'} {wanted} {role['name']} "
    line += "scram-sha-256" if address is None else f"{_plain(address)} scram-sha-256"
    verdict = decides(rules, wanted, role["name"], role["groups"], physical=physical)
    if verdict == "refused":
        yield Finding(
            CHECK,
            where,
            f"no line admits {role['name']}"
            + (" as a physical walsender" if physical else f" to database {database}"),
            Severity.ERROR,
            repair=f"add the line `{line}`, and run SELECT pg_reload_conf()",
            cause=Cause.AUTHENTICATION,
        )
    elif verdict == "allowed":
        yield Finding(CHECK, where, f"{role['name']} is admitted from this machine's address")


def decides(
    rules: Sequence[Rule], database: str, role: str, groups: Collection[str], *, physical: bool
) -> str:
    """`allowed`, `refused`, or `unknown`, for the address of the session that read the rules."""
    for _, kind, databases, roles, address, mask, method, error, client in rules:
        if error:
            continue
        fits = [
            _fits_client(kind, address, mask, client),
            _fits_database(databases, database, role, physical=physical),
            _fits_role(roles, role, groups),
        ]
        if False in fits:
            continue
        if None in fits:
            return "unknown"
        return "refused" if method == "reject" else "allowed"
    return "refused"


def _fits_client(
    kind: str, address: str | None, mask: str | None, client: str | None
) -> bool | None:
    if client is None or kind == "local":
        return client is None and kind == "local"
    if kind != "host":
        # hostssl, hostnossl, hostgssenc and the like: it is unknown how the client will connect.
        return None
    if address == "all":
        return True
    try:
        network = ipaddress.ip_network(
            f"{address}/{mask}" if ":" not in str(address) else _six(address, mask), strict=False
        )
    except ValueError:
        return None
    return ipaddress.ip_address(_plain(client).partition("/")[0]) in network


def _six(address: str | None, mask: str | None) -> str:
    """An IPv6 network. PostgreSQL shows its mask as an address."""
    bits = int(ipaddress.IPv6Address(str(mask))).bit_count()
    return f"{address}/{bits}"


def _plain(client: str) -> str:
    """An address with the full prefix length."""
    address = client.partition("/")[0]
    return f"{address}/{128 if ':' in address else 32}"


def _fits_database(
    databases: Sequence[str], database: str, role: str, *, physical: bool
) -> bool | None:
    if physical:
        return "replication" in databases
    if {"all", database} & set(databases) or ("sameuser" in databases and role == database):
        return True
    return (
        None
        if any(d.startswith("/") or d in {"samerole", "samegroup"} for d in databases)
        else False
    )


def _fits_role(roles: Sequence[str], role: str, groups: Collection[str]) -> bool | None:
    if {"all", role} & set(roles) or any(name[1:] in groups for name in roles if name[:1] == "+"):
        return True
    return None if any(name.startswith("/") for name in roles) else False
