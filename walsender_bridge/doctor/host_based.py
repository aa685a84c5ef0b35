"""Evaluates pg_hba.conf for a role that is not there yet, so that no login can be tried. Pure.

PostgreSQL takes the first rule that fits a connection. A logical walsender is let in like any other client of its database;
the word `replication` is for physical ones. What cannot be judged from here (host names, `samenet`, regular expressions,
where the client will run) is not guessed: only what is surely refused is an error.
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
    """Whether the role would be let in; nothing where the rules are not shown. `physical`: as a physical walsender."""
    rules: Sequence[Rule] = facts["hba"]
    if not rules:
        return
    role, database = facts["role"], facts["database"]
    for rule in rules:
        if rule[7]:
            yield Finding(
                CHECK,
                where,
                f"line {rule[0]} is wrong, and the server keeps the rules that it had: {rule[7]}",
                Severity.WARNING,
                repair="correct it, and SELECT pg_reload_conf()",
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
            f"no line lets {role['name']} in"
            + (" as a physical walsender" if physical else f" to database {database}"),
            Severity.ERROR,
            repair=f"add the line `{line}`, and SELECT pg_reload_conf()",
            cause=Cause.AUTHENTICATION,
        )
    elif verdict == "allowed":
        yield Finding(CHECK, where, f"{role['name']} is let in, from where this was asked")


def decides(
    rules: Sequence[Rule], database: str, role: str, groups: Collection[str], *, physical: bool
) -> str:
    """`allowed`, `refused`, or `unknown`, for the address that the rules were asked from."""
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
        # With TLS, without it, or with GSSAPI: how the client will come is not known.
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
    """An IPv6 network, whose mask PostgreSQL shows as an address."""
    bits = int(ipaddress.IPv6Address(str(mask))).bit_count()
    return f"{address}/{bits}"


def _plain(client: str) -> str:
    """An address with the length of its network."""
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
