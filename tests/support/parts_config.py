"""A configuration of every part on free ports, for tests that ask no server."""

from pathlib import Path

from walsender_bridge.demo.local_server import free_port


def configuration(folder: Path, *, lake: bool = False, metrics: bool = False) -> Path:
    """The file, in `folder`."""
    path = folder / "tuskline.toml"
    path.write_text(
        f"""
[log]
data_dir = "log"
listen = "127.0.0.1:{free_port()}"
[[log_server]]
data_dir = "log-server"
listen = "127.0.0.1:{free_port()}"
[[source]]
name = "shop"
dsn = "host=127.0.0.1 port={free_port()}"
"""
        + '[lake]\nuri = "lake"\n' * lake
        + f'[metrics]\nlisten = "127.0.0.1:{free_port()}"\n' * metrics
    )
    return path
