"""The repository's records are lost, and rebuilt from the replicas: nothing committed is lost, no version has two meanings."""

import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.support.capture_stack import (
    STREAM,
    CaptureProcess,
    ChangeLog,
    Load,
    check_equal,
    server_with_tables,
)
from tests.support.child import ROOT
from tests.support.log_entries import SCHEMAS, EntryMaker, tell
from tests.support.servers import MakeServer
from tests.support.waiting import wait_for
from walsender_bridge.change_log import log_server_messages as m
from walsender_bridge.change_log.client import (
    LogClient,
    ReplicaClient,
    StreamWriter,
    read_payload,
    split_messages,
)
from walsender_bridge.change_log.operator_client import OperatorLog, OperatorReplica
from walsender_bridge.change_log.protocol import CommitContext, IssuedCommit
from walsender_bridge.change_log.repository import empty_store
from walsender_bridge.change_log.repository.membership import ReplicationPolicy
from walsender_bridge.change_log.repository.rebuild import HOLD
from walsender_bridge.change_log.repository.rebuilder import Rebuilder
from walsender_bridge.change_log.stream_reader import StreamReader
from walsender_bridge.cli.app import app
from walsender_bridge.errors import (
    ConfigError,
    DeadlineError,
    RunningError,
    StreamSealedError,
    TusklineError,
    UnavailableError,
    UsageError,
)
from walsender_bridge.observability import log_verify
from walsender_bridge.postgres.protocol import pgoutput
from walsender_bridge.postgres.protocol.lsn import WalPosition
from walsender_bridge.runtime.output import Output

POLICY = ReplicationPolicy(replicas=3, min_replicas=2, silence=2.0)


@pytest.fixture
def log(tmp_path: Path) -> Iterator[ChangeLog]:
    with ChangeLog(tmp_path, POLICY) as log:
        yield log


class Stream:
    """A stream's writer, which goes on under a new term when its stream is sealed, and all that was committed."""

    def __init__(self, log: ChangeLog, name: str = STREAM) -> None:
        self.client = LogClient(log.address)
        self.name = name
        self.sent: list[bytes] = []
        self._make = EntryMaker()
        self._writer: StreamWriter | None = None
        wait_for(self._create, 30, "the stream")

    def _create(self) -> bool:
        try:
            self.client.create_stream(self.name)
        except UnavailableError:
            return False
        return True

    def _open(self) -> bool:
        if self._writer is not None:
            self._writer.close()
        try:
            self._writer = self.client.open_writer(self.name)
        except UnavailableError:
            return False
        self._make.follow(self._writer.status)
        assert self._writer.status.end_offset == len(self.sent) + 1, (
            "what is committed, and no more"
        )
        return True

    def commit(self) -> int:
        """One more entry; the version that has it. It is sent again if its stream was sealed before it was committed."""
        entry, end = b"", len(self.sent) + 2
        while True:
            if self._writer is None:
                wait_for(self._open, 30, "a writer")
            assert self._writer is not None
            try:
                if not entry or self._writer.status.end_offset < end:
                    entry = self._make.whole()
                    self._append(entry)
                version = self.client.barrier({self.name: self._make.end_lsn}, 5)
            except (UnavailableError, DeadlineError):
                self._end()
                continue
            self.sent.append(entry)
            return version

    def _end(self) -> None:
        assert self._writer is not None
        self._writer.close()
        self._writer = None

    def append_more(self) -> None:
        """An entry that all replicas hold, and that is not committed."""
        self._append(self._make.whole())

    def _append(self, entry: bytes) -> None:
        assert self._writer is not None
        self._writer.send([entry], schemas=list(SCHEMAS.values()))
        assert self._writer.next_ack(20) is not None

    def sealed(self) -> None:
        """The writer finds that its stream was sealed, and ends."""
        with pytest.raises(StreamSealedError):
            self._append(self._make.whole())
        self._end()

    def check(self) -> None:
        """Each replica has what was committed, once, and nothing else."""
        cut = self.client.status().streams[self.name]
        with StreamReader.of(cut) as reader:
            found = [*reader.read(1, cut.end_offset)]
        assert [bytes(each.data) for each in found] == self.sent
        assert [each.offset for each in found] == [*range(1, len(found) + 1)]

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self.client.close()


def lose(log: ChangeLog) -> None:
    log.stop_repository()
    shutil.rmtree(log.folder / "repository")


def rebuild(log: ChangeLog, *given_up: str, hold: float = 3600.0) -> int:
    """Build it again; the version that it begins with."""
    file = log.folder / "repository" / "repository.sqlite"
    with (
        closing(Rebuilder(log.listens, log.policy, given_up=given_up)) as rebuilder,
        empty_store.opened(file, None) as store,
    ):
        plan = rebuilder.look()
        store.begin_with(rebuilder.rebuild(plan, hold=hold))
    return plan.fence


def in_sync(log: ChangeLog) -> int:
    """Replicas in sync of the stream that has the fewest of them."""
    try:
        with OperatorLog(log.address) as client:
            streams = client.describe().streams
    except UnavailableError:
        return 0
    return min((sum(each.in_sync for each in its.replicas) for its in streams), default=0)


def verified(log: ChangeLog) -> None:
    report = log_verify.verify_running(log.address, [], Output(as_json=True))
    assert report.violations == []


def test_31_a_lost_repository_is_rebuilt_and_versions_never_go_back(log: ChangeLog) -> None:
    with closing(Stream(log)) as stream, closing(Stream(log, "other")) as other:
        for _ in range(3):
            stream.commit()
            other.commit()
        stream.client.register_consumer("lake", stream.commit(), 600.0)
        # An empty version is readable before any replica knows it.
        seen = stream.client.barrier({}, 30)
        log_id = stream.client.status().log_id
        lose(log)
        fence = rebuild(log)
        assert fence > seen
        stream.sealed()
        log.start_repository()
        status = stream.client.status()
        assert (status.log_id, status.version) == (log_id, fence)
        stream.check()
        for _ in range(3):
            assert stream.commit() > fence
            other.commit()
        stream.check()
        other.check()
        with OperatorLog(log.address) as client:
            assert [each.name for each in client.describe().consumers] == [HOLD]
            # What a consumer that comes back needs is still known.
            client.register_consumer("lake", seen, 600.0)
            described = {each.name: each for each in client.describe().consumers}
            assert described["lake"].needs[STREAM].offset == 5
            assert client.describe().streams[0].trim_limit == 1
        wait_for(lambda: in_sync(log) == 3, 30, "all replicas are in sync")
        verified(log)
        # The same again, from replicas that have a fence.
        lose(log)
        assert rebuild(log) > fence
        log.start_repository()
        stream.commit()
        stream.check()
        verified(log)


def test_31_a_stream_that_the_lost_repository_creates_meanwhile_is_not_forgotten(
    log: ChangeLog,
) -> None:
    """It is alive elsewhere, and may commit to that stream until it hears of the fence."""
    with closing(Stream(log)) as stream:
        wait_for(lambda: in_sync(log) == 3, 30, "all replicas are in sync")
        stream.commit()
        lose(log)
        file = log.folder / "repository" / "repository.sqlite"
        with (
            closing(Rebuilder(log.listens, log.policy)) as rebuilder,
            empty_store.opened(file, None),
        ):
            plan = rebuilder.look()
            for listen in log.listens:
                with OperatorReplica(listen) as replica:
                    replica._call(m.CREATE, m.CreateRequest("born", plan.log_id))
            with pytest.raises(UnavailableError, match="born"):
                rebuilder.rebuild(plan, hold=3600.0)
        rebuild(log)
        log.start_repository()
        assert {*stream.client.status().streams} == {STREAM, "born"}
        stream.sealed()
        stream.commit()
        stream.check()


def test_31_a_rebuild_beside_a_repository_that_still_commits_names_it(log: ChangeLog) -> None:
    with (
        closing(Stream(log)) as stream,
        closing(Rebuilder(log.listens, log.policy)) as rebuilder,
    ):
        wait_for(lambda: in_sync(log) == 3, 60, "all replicas are in sync")
        stream.commit()
        plan = rebuilder.look()
        stream.commit()
        with pytest.raises(UnavailableError, match="the replica has committed up to") as refused:
            rebuilder.rebuild(plan, hold=1.0)
        assert "stop the repository that still commits" in refused.value.repair
        stream.commit()
        stream.check()


def test_31_a_replica_of_the_end_that_lacks_what_the_slot_was_confirmed_to_takes_it_first(
    log: ChangeLog,
) -> None:
    """It was not in sync when the slot was confirmed, and nothing was written since."""
    with closing(Stream(log)) as stream:
        wait_for(lambda: in_sync(log) == 3, 30, "all replicas are in sync")
        stream.commit()
    lose(log)
    confirmed = WalPosition(1, 1 << 40)
    for listen in log.listens[:2]:
        tell(listen, STREAM, confirmed, system_id=5)
    rebuild(log)
    for listen in log.listens:
        with ReplicaClient(listen) as replica:
            status = replica.stream_status(STREAM)
        assert (status.confirmed_to, status.system_id, status.state) == (confirmed, 5, "sealed")
    log.start_repository()
    assert in_sync(log) == 3


def commit_on(log: ChangeLog, number: int) -> None:
    """The last commit of the old repository reaches one log server alone."""
    with OperatorReplica(log.listens[number]) as replica:
        (found,) = replica.replicas().replicas
        context, status = found.context, found.status
        assert context is not None
        assert status is not None
        length = status.end_offset - status.committed_end
        own = CommitContext(context.version + 1, context.end, context.global_end, length)
        assert not replica._call(
            m.COMMIT, m.CommitRequest({STREAM: (IssuedCommit(own),)}, 1)
        ).refused


def test_31_a_log_server_that_is_given_up_may_return_with_a_commit_of_its_own(
    log: ChangeLog,
) -> None:
    with closing(Stream(log)) as stream:
        wait_for(lambda: in_sync(log) == 3, 30, "all replicas are in sync")
        stream.commit()
        log.stop_repository()
        stream.append_more()
        commit_on(log, 2)
        log.kill_log_server(2)
        lose(log)
        gone = log.listens[2]
        with pytest.raises(UnavailableError, match="may have the newest commit") as refused:
            rebuild(log)
        assert gone in str(refused.value)
        with pytest.raises(UsageError, match="answers"):
            rebuild(log, log.listens[0])
        log.kill_log_server(1)
        with pytest.raises(UnavailableError, match="may have been all members"):
            rebuild(log, gone, log.listens[1])
        log.start_log_server(1)
        wait_for(lambda: _rebuilt(log, gone), 30, "the log server is there")
        log.start_repository()
        assert in_sync(log) == 2
        stream.commit()
        # It missed the rebuild, so it takes everything, whatever it has.
        log.start_log_server(2)
        wait_for(lambda: in_sync(log) == 3, 60, "it is in sync")
        stream.commit()
        stream.check()
        verified(log)


def _rebuilt(log: ChangeLog, given_up: str) -> bool:
    try:
        rebuild(log, given_up)
    except UnavailableError:
        return False
    return True


class KilledLog(ChangeLog):
    """A log whose repository is a process, which is killed and never told to stop."""

    _process: subprocess.Popen[bytes] | None = None

    def start_repository(self) -> None:
        arguments = [str(self.folder / "repository"), self.listen, "3600", *self.listens]
        with (self.folder / "repository.log").open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.repository_process", *arguments],
                stdout=output,
                stderr=output,
                cwd=ROOT,
            )

    def stop_repository(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


class Reader:
    """Reads the stream while all this happens, as a consumer does: from where it is to the newest version."""

    def __init__(self, log: ChangeLog) -> None:
        self._log = log
        self._stopping = threading.Event()
        self._pool = ThreadPoolExecutor(1)
        self._done = self._pool.submit(self._run)
        self.version = 0
        self.messages: list[bytes] = []

    def _run(self) -> None:
        offset = 1
        with LogClient(self._log.address, timeout=5) as client:
            while not self._stopping.wait(0.05):
                try:
                    status = client.status()
                    cut = status.streams[STREAM]
                    with StreamReader.of(cut) as reader:
                        found = [*reader.read(offset, cut.end_offset)]
                except (UnavailableError, KeyError):
                    continue
                assert status.version >= self.version, "versions never go back"
                assert cut.end_offset >= offset, "and neither does a stream"
                self.version, offset = status.version, cut.end_offset
                for each in found:
                    assert each.version <= status.version
                    self.messages += map(bytes, split_messages(read_payload(each.data)))

    def seen(self, version: int) -> bool:
        """Whether it has read up to that version."""
        if self._done.done():
            self._done.result()
        return self.version >= version

    def stop(self) -> list[bytes]:
        """All messages that it has read."""
        self._stopping.set()
        self._done.result()
        self._pool.shutdown()
        return self.messages


@pytest.mark.timeout(300)
def test_31_the_repository_is_killed_lost_and_rebuilt_under_load(
    make_server: MakeServer, tmp_path: Path
) -> None:
    """Twice, the second time without a log server, which returns with what it had."""
    server = server_with_tables(make_server, 15, fsync="off")
    with (
        KilledLog(tmp_path, POLICY) as log,
        CaptureProcess(tmp_path, log, server.dsn(), "public.orders", "public.audit") as capture,
    ):
        wait_for(capture.streams, 30, "capture streams")
        reader = Reader(log)
        with Load(server.dsn()):
            wait_for(lambda: in_sync(log) == 3, 60, "all replicas are in sync")
            wait_for(lambda: reader.seen(3), 60, "the reader reads")
            lose(log)
            first = rebuild(log)
            log.start_repository()
            wait_for(lambda: reader.seen(first + 3), 60, "the reader goes on")
            wait_for(lambda: in_sync(log) == 3, 60, "all replicas are in sync")
            log.stop_repository()
            log.kill_log_server(2)
            shutil.rmtree(log.folder / "repository")
            second = rebuild(log, log.listens[2])
            log.start_repository()
            wait_for(lambda: reader.seen(second + 3), 60, "the reader goes on")
            log.start_log_server(2)
            wait_for(lambda: in_sync(log) == 3, 60, "all replicas are in sync")
        found = check_equal(log, server.dsn())
        with LogClient(log.address) as client:
            version = client.status().version
        wait_for(lambda: reader.seen(version), 60, "the reader has read all")
        ends = [
            pgoutput.parse_commit(each).end_lsn
            for each in reader.stop()
            if each[0] == pgoutput.COMMIT
        ]
        assert ends[: len(found.ends)] == found.ends, "each transaction once, in order"
        verified(log)


def test_31_the_command_shows_and_writes_and_refuses_where_a_repository_is(
    log: ChangeLog, tmp_path: Path
) -> None:
    config = tmp_path / "tuskline.toml"
    servers = "".join(f'[[log_server]]\nlisten = "{each}"\n' for each in log.listens)
    config.write_text(
        f'[machine]\ndata_dir = "bridge"\nparts = ["repository", "bridge"]\n[log]\ndata_dir = "repository"\nlisten = "{log.listen}"\n{servers}'
        '[[source]]\nname = "shop"\ndsn = "dbname=shop"\n'
    )

    def run(*options: str) -> tuple[dict[str, object], BaseException | None]:
        arguments = ["log", "rebuild", "--json", "-c", str(config), *options]
        result = CliRunner().invoke(app, arguments)
        lines = [each for each in result.stdout.splitlines() if each.startswith("{")]
        return (json.loads(lines[-1]) if lines else {}), result.exception

    with closing(Stream(log)) as stream:
        version = stream.commit()
        _, error = run()
        assert isinstance(error, RunningError), "the repository answers"
        log.stop_repository()
        for option in ((), ("--dry-run",)):
            _, error = run(*option)
            assert isinstance(error, ConfigError)
            assert "there is a repository already" in error.what
        shutil.rmtree(tmp_path / "repository")
        shown, _ = run("--dry-run")
        assert shown["newest_version"] == version
        assert not (tmp_path / "repository").exists()
        written, error = run("--hold", "1h")
        assert error is None
        assert {**shown, "written": True} == written
        log.start_repository()
        stream.sealed()
        stream.commit()
        stream.check()
        _, error = run("--without", "127.0.0.1:1")
        assert isinstance(error, TusklineError)
