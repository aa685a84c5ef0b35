"""The parts of Tuskline as processes, as a user runs them, for tests from end to end."""

import contextlib
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.support import table_format
from tests.support.child import run_tuskline, start_tuskline
from walsender_bridge.demo.local_server import free_port
from walsender_bridge.runtime.tls_files import TlsFiles, with_files

PARTS = ("log-server", "bridge", "lake")


class Stack:
    """Log server, bridge and lake over one configuration in `directory`; everything ends with the block.

    `tables` are those of every source (none: all), `lake` further lines of its section, `uri` where it is. `tls`: the certificate of all parts,
    with all roles.
    """

    def __init__(
        self,
        directory: Path,
        sources: Mapping[str, str],
        *,
        epoch_interval: float = 1.0,
        tables: Sequence[str] = (),
        lake: str = "",
        uri: str = "lake",
        log_servers: int = 1,
        tls: TlsFiles | None = None,
    ) -> None:
        self.directory = directory
        self.sources = dict(sources)
        listen = f"127.0.0.1:{free_port()}"
        self.log_address = with_files(f"grpc://{listen}", tls)
        self.listens = [f"127.0.0.1:{free_port()}" for _ in range(log_servers)]
        self.lake = uri if "://" in uri else str(directory / uri)
        self.config = directory / "tuskline.toml"
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        lines = [
            f'[log]\ndata_dir = "log"\nlisten = "{listen}"\n',
            *(
                f'[[log_server]]\ndata_dir = "log-server{number or ""}"\nlisten = "{each}"\n'
                for number, each in enumerate(self.listens)
            ),
            f'[lake]\nuri = "{uri}"\nepoch_interval = {epoch_interval}\n',
        ]
        lines[-1] += table_format.section() + lake
        wanted = f"tables = {list(tables)}\n" if tables else ""
        lines += [
            f'[[source]]\nname = "{n}"\ndsn = "{dsn}"\n{wanted}' for n, dsn in self.sources.items()
        ]
        if tls is not None:
            lines.append(
                f'[tls]\nca = "{tls.ca}"\ncertificate = "{tls.certificate}"\nkey = "{tls.key}"\n'
            )
        self.config.write_text("\n".join(lines))

    def start(self, *parts: str, env: Mapping[str, str] | None = None) -> None:
        """Start parts by name (`PARTS`), with `env` added to their environment."""
        for part in parts:
            told = [part, "run", "--config", str(self.config)]
            log = self.directory / f"{part}.log"
            self._running[part] = start_tuskline(told, log=log, env=env)

    def pid(self, part: str) -> int:
        """The pid of a started part."""
        return self._running[part].pid

    def signal(self, part: str, number: signal.Signals) -> None:
        """Send a part a signal."""
        self._running[part].send_signal(number)

    def take(self, part: str) -> subprocess.Popen[bytes]:
        """A started part, which the caller ends: another one may be started beside it."""
        return self._running.pop(part)

    def kill(self, part: str) -> None:
        """SIGKILL a part and wait for its end."""
        process = self._running.pop(part)
        process.kill()
        process.wait()

    def stop(self, part: str, seconds: float = 60.0) -> int:
        """SIGTERM a part; its exit code."""
        process = self._running.pop(part)
        process.send_signal(signal.SIGTERM)
        return process.wait(seconds)

    def wait(self, part: str, seconds: float = 60.0) -> int:
        """Wait until a part ends by itself; its exit code."""
        code = self._running[part].wait(seconds)
        del self._running[part]
        return code

    def cli(self, *arguments: str, seconds: float = 120.0) -> subprocess.CompletedProcess[str]:
        """Run `tuskline ARGUMENTS --config ...`."""
        return run_tuskline([*arguments, "--config", str(self.config)], seconds=seconds)

    def logs(self, lines: int = 30) -> str:
        """The ends of the parts' logs, for a failure's message."""
        texts = []
        for part in PARTS:
            with contextlib.suppress(OSError):
                tail = (self.directory / f"{part}.log").read_text(errors="replace").splitlines()
                texts.append(f"--- {part}\n" + "\n".join(tail[-lines:]))
        return "\n".join(texts)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for part in reversed(list(self._running)):
            process = self._running.pop(part)
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if error is not None:
            print(self.logs())
