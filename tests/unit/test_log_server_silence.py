"""Since when a log server counts as silent: any request that it has not answered, be it for reports or a commit."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.support.child import start_child
from tests.support.suspended import suspend
from tests.support.waiting import wait_for
from walsender_bridge.change_log.replica.settings import ReplicaServerSettings
from walsender_bridge.change_log.repository.log_server_link import LogServers
from walsender_bridge.demo.local_server import free_port


def test_a_log_server_that_hangs_in_a_commit_owes_its_answer_since_then(tmp_path: Path) -> None:
    settings = ReplicaServerSettings(tmp_path / "data", f"127.0.0.1:{free_port()}")
    log = tmp_path / "log"
    process = start_child("walsender_bridge.change_log.log_server", settings, log=log)
    servers = LogServers([settings.listen])
    (link,) = servers
    try:
        with ThreadPoolExecutor(1) as pool:
            wait_for(lambda: servers.ask(within=1.0) == [] and servers.answering(), 60, "it runs")
            wait_for(lambda: link.asked is None or link.asked.done(), 10, "nothing is pending")
            suspend(process.pid)
            before = time.monotonic()
            sending = pool.submit(servers.send, [(link, {})], 0.0)
            wait_for(lambda: link.owes(time.monotonic()) is not None, 4, "the commit is overdue")
            since = link.owes(time.monotonic())
            assert not sending.done()
            assert link.answers
            assert since is not None
            assert before <= since < before + 1
            # It has failed: from then on the log server does not answer.
            assert sending.result(30) == []
            assert link.owes(time.monotonic()) is None
            assert not link.answers
    finally:
        process.kill()
        process.wait()
        servers.close()
