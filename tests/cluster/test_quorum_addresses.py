"""Addresses of a minority that lead to no safekeeper hold up no commit of the others, and are named."""

import shutil
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.support.quorum_stack import Load, QuorumStack, load_server
from tests.support.servers import MakeServer
from tests.support.waiting import wait_for

SILENT = "safekeeper.silent"
#: Stands in for a resolver whose name servers do not answer, for Python's lookups and for those of connect().
RESOLVER = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <netdb.h>
#include <string.h>
#include <unistd.h>

typedef int lookup(const char *, const char *, const struct addrinfo *, struct addrinfo **);

int getaddrinfo(const char *node, const char *service, const struct addrinfo *hints, struct addrinfo **found)
{
    if (node && !strcmp(node, "safekeeper.silent") && !(hints && hints->ai_flags & AI_NUMERICHOST)) {
        sleep(60);
        return EAI_AGAIN;
    }
    return ((lookup *) dlsym(RTLD_NEXT, "getaddrinfo"))(node, service, hints, found);
}
"""


@pytest.fixture
def quorum(tmp_path: Path, make_server: MakeServer) -> Iterator[QuorumStack]:
    """Three members, of which the last is dead; the proposer is to be started again."""
    with QuorumStack(tmp_path, load_server(make_server, wal_level="replica")) as stack:
        stack.start()
        stack.attach()
        stack.kill("proposer")
        stack.kill("safekeeper-2")
        stack.configured = 2
        yield stack


@pytest.fixture
def silent_resolver(tmp_path: Path) -> Path:
    if not shutil.which("gcc"):
        pytest.skip("gcc is not here")
    source, library = tmp_path / "resolver.c", tmp_path / "resolver.so"
    source.write_text(RESOLVER)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    return library


@contextmanager
def answering(banner: bytes) -> Iterator[int]:
    """A server that says this to everybody; its port."""
    taken: list[socket.socket] = []

    def answer() -> None:
        with suppress(OSError):
            while True:
                taken.append(listener.accept()[0])
                taken[-1].sendall(banner)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=answer, daemon=True).start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
    for each in taken:
        each.close()


def commits_go_on(quorum: QuorumStack, address: str, told: Callable[[str], bool]) -> None:
    """From the start of a proposer on, which was told of the two that live and of this address."""
    wait_for(quorum.is_sync, 40, f"the two are a quorum: {quorum.logs()}")
    load = Load(quorum.server)

    def fault() -> str:
        found = {each["address"]: each["fault"] for each in quorum.status()["safekeepers"]}
        return found.get(address) or ""

    wait_for(lambda: told(fault()), 20, f"it is named: {quorum.status()}")
    before = len(load.acknowledged)
    wait_for(lambda: len(load.acknowledged) > before + 20, 20, "commits return meanwhile")
    load.stop()
    assert quorum.kill("proposer", 15) == 0


def test_34_a_name_server_that_is_silent_holds_up_no_commit(quorum, silent_resolver):
    address = f"{SILENT}:{quorum.ports[2]}"
    quorum.options["proposer"] = {"safekeepers": (*quorum.safekeepers, (SILENT, quorum.ports[2]))}
    quorum.start_with("proposer", LD_PRELOAD=str(silent_resolver))
    said = f"could not resolve host name {SILENT}: the name server does not answer"
    commits_go_on(quorum, address, lambda fault: fault == said)


def test_34_another_server_at_an_address_holds_up_no_commit(quorum):
    with answering(b"SSH-2.0-OpenSSH_9.2p1 Debian-2+deb12u3\r\n" * 2) as port:
        another = (*quorum.safekeepers, ("127.0.0.1", port))
        quorum.options["proposer"] = {"safekeepers": another}
        quorum.start("proposer")
        commits_go_on(quorum, f"127.0.0.1:{port}", lambda fault: "unknown frame kind" in fault)
