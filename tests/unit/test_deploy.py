"""docs/deploy: a configuration for each kind of machine that loads as it is, and a unit that systemd accepts."""

import re
import shutil
import socket
import subprocess
import tomllib
from pathlib import Path

import pytest

from walsender_bridge.cli import parts
from walsender_bridge.config import load_config
from walsender_bridge.observability import certificate_view
from walsender_bridge.runtime import service_manager

DEPLOY = Path(__file__).parents[2] / "docs" / "deploy"
KINDS = {
    "log-server": {"log-server"},
    "safekeepers": {"log-server"},
    "repository": {"bridge"},
    "bridge": {"bridge"},
    "lake": {"lake", "maintain"},
}


def test_there_is_a_file_for_each_kind():
    assert {each.stem for each in DEPLOY.glob("*.toml")} == KINDS.keys()


@pytest.mark.parametrize("kind", KINDS)
def test_each_file_is_of_its_kind(kind):
    settings = load_config(DEPLOY / f"{kind}.toml")
    assert settings.parts == {kind}
    assert parts.commands(settings).keys() == KINDS[kind]
    text = (DEPLOY / f"{kind}.toml").read_text()
    assert set(re.findall(r'data_dir = "(.*?)/[^/"]*"', text)) == {"/var/lib/tuskline"}


def test_the_files_of_a_single_repository_load_as_they_are(tmp_path):
    text = (DEPLOY / "README.md").read_text().partition("## A single repository\n")[2]
    found = re.findall(
        r"^```toml\n(.*?)^```$", text.partition("\n## ")[0], re.MULTILINE | re.DOTALL
    )
    loaded = []
    for number, block in enumerate(found):
        (tmp_path / f"{number}.toml").write_text(block)
        loaded.append(load_config(tmp_path / f"{number}.toml"))
    main, other = loaded
    assert main.parts == {"repository", "bridge", "log-server"}
    assert other.parts == {"log-server"}
    assert main.log_address == other.log_address
    assert other.names_repository
    listens = {each.listen for each in main.log_server}
    assert {each.listen for each in other.hosted_log_servers} < listens
    said = text.partition("```")[0]
    assert all(
        any(f"`{role}`" in said for role in roles) for roles in certificate_view.needed_roles(main)
    )


def test_a_page_that_installs_etcd_installs_the_program_that_its_commands_need():
    pages = [each for each in DEPLOY.parent.rglob("*.md") if "etcd-server" in each.read_text()]
    assert len(pages) >= 2
    assert all("etcd-client" in each.read_text() for each in pages)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze here")
@pytest.mark.parametrize("kind", KINDS)
def test_systemd_accepts_the_unit(tmp_path, kind):
    text = (DEPLOY / "tuskline@.service").read_text()
    assert "/opt/tuskline/bin/tuskline up --config /etc/tuskline/%i.toml" in text
    assert "file:" not in text, "no step of the pages installs documentation"
    unit = tmp_path / f"tuskline@{kind}.service"
    unit.write_text(text.replace("/opt/tuskline/bin/tuskline", "/bin/true"))
    drop_in = DEPLOY / f"{unit.name}.d"
    if drop_in.exists():
        shutil.copytree(drop_in, tmp_path / drop_in.name)
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(unit)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("page", ["deploy/README.md", "deploy/Containerfile", "three-machines.md"])
def test_the_home_of_the_user_is_the_folder_that_it_may_write_to(page):
    """Spark's jars and `.pgpass` are in the home, and the unit closes all other folders."""
    users = re.findall(r"useradd .*", (DEPLOY.parent / page).read_text())
    assert [user for user in users if "--home-dir /var/lib/tuskline " in user] == users != []


def test_an_image_is_built_from_what_the_wheel_needs():
    """Without the file, `COPY .` would put the environment and the history into the image."""
    root = DEPLOY.parents[1]
    project = tomllib.loads((root / "pyproject.toml").read_text())
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]["only-include"]
    needed = {*wheel, project["project"]["readme"], *project["project"]["license-files"]}
    lines = (root / ".dockerignore").read_text().splitlines()
    assert {line[1:] for line in lines if line.startswith("!")} == needed | {"pyproject.toml"}
    assert "*" in lines


@pytest.mark.parametrize("abstract", [False, True])
def test_systemd_is_told_once_that_it_has_started(tmp_path, monkeypatch, abstract):
    address = f"\0{tmp_path}" if abstract else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(address)
        manager.settimeout(10)
        monkeypatch.setenv("NOTIFY_SOCKET", address.replace("\0", "@"))
        service_manager.say_ready()
        assert manager.recv(100) == b"READY=1"
        service_manager.say_ready()
        manager.setblocking(False)
        with pytest.raises(BlockingIOError):
            manager.recv(100)


def test_a_service_manager_that_has_gone_is_no_fault(tmp_path, monkeypatch):
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "gone"))
    service_manager.say_ready()
