"""Several machines on one: a folder, a configuration and a `tuskline up` for each, and a network namespace where that is possible."""

import itertools
import json
import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tests.support.attached import CLI
from tests.support.child import run_tuskline
from tests.support.waiting import wait_for
from walsender_bridge.config import load_config
from walsender_bridge.errors import Cause
from walsender_bridge.runtime import processes
from walsender_bridge.runtime.supervisor import read_states


class Machine:
    """One machine, whose configuration is in `folder`. `inside`: the command that runs another one in its network."""

    def __init__(self, folder: Path, text: str, inside: Sequence[str] = ()) -> None:
        folder.mkdir(exist_ok=True)
        self.folder = folder
        self.config = folder / "tuskline.toml"
        self.config.write_text(text)
        self.run_dir = load_config(self.config).run_dir
        self._inside = inside
        self._up: subprocess.Popen[bytes] | None = None

    def run(self, *arguments: str, seconds: float = 120.0) -> subprocess.CompletedProcess[str]:
        """Run `tuskline ARGUMENTS --config ...` there."""
        told = [*arguments, "--config", str(self.config)]
        if not self._inside:
            return run_tuskline(told, seconds=seconds)
        return subprocess.run(
            [*self._inside, *CLI, *told],
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )

    def json(self, *arguments: str) -> Any:
        """The result of a command, whether or not it finds something amiss."""
        done = self.run(*arguments, "--json")
        assert done.returncode in {0, Cause.UNAVAILABLE}, (
            done.returncode,
            done.stderr,
            self.logs(),
        )
        return json.loads(done.stdout.splitlines()[-1])

    def up(self) -> None:
        """Start `tuskline up`."""
        with (self.folder / "up.log").open("ab") as log:
            self._up = subprocess.Popen(
                [*self._inside, *CLI, "up", "--config", str(self.config)],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env=dict(os.environ),
            )
        started = self._up

        def runs() -> bool:
            assert started.poll() is None, self.logs()
            return read_states(self.run_dir, "up").pid == started.pid

        wait_for(runs, 60, f"{self.folder.name} is up")

    def processes(self) -> set[str]:
        """The running processes of its parts, with their supervisors' names."""
        found = set()
        for supervisor in ("up", "log-server", "bridge"):
            for name, child in read_states(self.run_dir, supervisor).children.items():
                if child.pid is not None and processes.alive(child.pid):
                    found.add(name if supervisor == "up" else f"{supervisor}/{name}")
        return found

    def runs(self, expected: set[str]) -> bool:
        """Whether these processes run, and no others."""
        return self.processes() == expected

    def family(self) -> list[int]:
        """The processes that run there."""
        assert self._up is not None
        return [self._up.pid, *processes.family(self._up.pid)]

    def kill(self) -> None:
        """SIGKILL everything that runs there."""
        assert self._up is not None
        family = self.family()
        for pid in family:
            if processes.alive(pid):
                os.kill(pid, signal.SIGKILL)
        self._up.wait()
        self._up = None
        wait_for(lambda: not any(map(processes.alive, family)), 30, "all of it has ended")

    def close(self) -> None:
        """End what runs there."""
        if self._up is None:
            return
        self._up.terminate()
        try:
            self._up.wait(60)
        except subprocess.TimeoutExpired:
            self.kill()

    def logs(self) -> str:
        """The end of what its parts said."""
        text = (self.folder / "up.log").read_text(errors="replace") if self._up else ""
        return "\n".join(text.splitlines()[-60:])


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=30)


def namespaces_missing() -> str:
    """Why there are no network namespaces here; empty if there are."""
    name = f"tk{os.getpid()}x"
    try:
        _ip("netns", "add", name)
        _ip("-n", name, "link", "add", "bridge", "type", "bridge")
    except OSError:
        return "there is no command ip"
    except subprocess.CalledProcessError as error:
        return f"no network namespace can be made: {error.stderr.decode().strip()}"
    finally:
        subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)
    return ""


_NUMBERS = itertools.count()


@contextmanager
def namespaces(count: int) -> Iterator[tuple[str, list[tuple[str, list[str]]]]]:
    """A network of so many namespaces: the address of this one, and of each its address and the command that enters it.

    Their bridge is in a namespace of its own: in this one, the rules of a firewall would apply to what it forwards.
    """
    # Names and addresses of its own each time: the kernel removes those of a deleted namespace a while later.
    number = next(_NUMBERS)
    prefix, net = f"tk{os.getpid()}n{number}", f"10.231.{(os.getpid() + 7 * number) % 250 + 1}"
    hub = f"{prefix}-0"
    with ExitStack() as undo:

        def plug(number: int, name: str, *where: str) -> None:
            """A cable from `name`, in the namespace `where`, to the bridge."""
            port = f"port{number}"
            _ip("link", "add", name, *where, "type", "veth", "peer", "name", port, "netns", hub)
            _ip("-n", hub, "link", "set", port, "master", "bridge", "up")

        _ip("netns", "add", hub)
        undo.callback(_ip, "netns", "delete", hub)
        _ip("-n", hub, "link", "add", "bridge", "type", "bridge")
        _ip("-n", hub, "link", "set", "bridge", "up")
        plug(0, prefix)
        _ip("address", "add", f"{net}.254/24", "dev", prefix)
        _ip("link", "set", prefix, "up")
        found = []
        for number in range(1, count + 1):
            name = f"{prefix}-{number}"
            _ip("netns", "add", name)
            undo.callback(_ip, "netns", "delete", name)
            plug(number, "eth0", "netns", name)
            _ip("-n", name, "address", "add", f"{net}.{number}/24", "dev", "eth0")
            for link in ("lo", "eth0"):
                _ip("-n", name, "link", "set", link, "up")
            found.append((f"{net}.{number}", ["ip", "netns", "exec", name]))
        yield f"{net}.254", found
