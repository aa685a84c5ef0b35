"""What an operator's change of the members asks of the proposer, from what the proposer says."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support import statuses
from walsender_bridge.errors import UnavailableError, UsageError
from walsender_bridge.quorum.proposer import change_members
from walsender_bridge.quorum.proposer.change_members import ProposerFiles, change
from walsender_bridge.quorum.protocol.configuration import Configuration
from walsender_bridge.quorum.protocol.messages import NodeId, SafekeeperGreeting, ServerInfo
from walsender_bridge.runtime import status_file

ONE, TWO, THREE = (f"{number:032x}" for number in (0x1111 << 112, 0x2222 << 112, 0x3333 << 112))


def files(tmp_path: Path, **heard: str) -> ProposerFiles:
    """Of a proposer with three members at a:1, b:2 and c:3, which has heard of these, by the host."""
    safekeepers = tuple(
        statuses.reported(
            address=address, safekeeper=heard.get(address[0], ""), member=address[0] in heard
        )
        for address in ("a:1", "b:2", "c:3")
    )
    membership = statuses.membership(members=(ONE, TWO, THREE))
    status = tmp_path / "status.json"
    told = statuses.session(membership=membership, safekeepers=safekeepers)
    status_file.write(status, told)
    return ProposerFiles(status, tmp_path / "members.json")


def test_12_the_address_of_a_member_that_is_not_heard_of_yet_is_kept(tmp_path: Path) -> None:
    request = change(files(tmp_path, a=ONE, b=TWO), remove=[TWO])
    assert set(request.addresses) == {("a", 1), ("b", 2), ("c", 3)}


def test_12_a_silent_address_is_forgotten_once_all_members_are_heard_of(tmp_path: Path) -> None:
    given = files(tmp_path, a=ONE, b=TWO, c=THREE)
    said = json.loads(given.status.read_text())
    said["safekeepers"].append({**said["safekeepers"][0], "address": "d:4", "member": False})
    said["safekeepers"][-1]["safekeeper"] = ""
    given.status.write_text(json.dumps(said))
    assert ("d", 4) not in change(given, remove=[TWO]).addresses


def test_a_safekeeper_of_another_quorum_is_refused_by_its_quorum(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = {"system_id": 1, "major": 16, "segment_size": 1 << 24}
    given = files(tmp_path, a=ONE, b=TWO, c=THREE)
    said = json.loads(given.status.read_text()) | {"server": server}
    said["membership"]["quorum"] = f"{0xABC:032x}"
    given.status.write_text(json.dumps(said))

    def there(quorum: int, term: int) -> None:
        held = Configuration(3, frozenset({4}), term=term, quorum=quorum)
        greeting = SafekeeperGreeting(4, ServerInfo(**server), NodeId(term, 9), held, 0, 0, 1)
        monkeypatch.setattr(change_members, "greet", lambda *_: greeting)

    there(0xDEF, term=2)
    with pytest.raises(UsageError, match=r"belongs to quorum 0+def, not to 0+abc") as refused:
        change(given, add=["d:4"])
    assert refused.value.where == "d:4"
    assert not given.members.exists()
    for quorum, term in ((0xABC, 2), (0xDEF, 0), (0, 0)):
        there(quorum, term)
        assert change(given, add=["d:4"]).quorum == 0xABC


def test_12_an_address_that_could_be_any_member_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(change_members, "_HEARD_SECONDS", 0.0)
    monkeypatch.setattr(change_members, "greet", lambda *_: None)
    given = files(tmp_path, a=ONE)
    said = json.loads(given.status.read_text())
    given.status.write_text(
        json.dumps(said | {"server": {"system_id": 1, "major": 16, "segment_size": 1 << 24}})
    )
    with pytest.raises(UnavailableError, match="2 members that have not been heard of"):
        change(given, remove=["b:2"])


def test_a_disk_that_was_rolled_back_is_not_put_in_its_own_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its data directory was not emptied: that would change nothing, and be said to be done."""
    server = {"system_id": 1, "major": 16, "segment_size": 1 << 24}
    given = files(tmp_path, a=ONE, b=TWO)
    said = json.loads(given.status.read_text()) | {"server": server}
    said["membership"]["distrusted"] = [THREE]
    given.status.write_text(json.dumps(said))
    three = int(THREE, 16)
    held = Configuration(2, frozenset({three}), term=1)
    greeting = SafekeeperGreeting(three, ServerInfo(**server), NodeId(1, 9), held, 0, 0, 1)
    monkeypatch.setattr(change_members, "greet", lambda *_: greeting)
    with pytest.raises(UsageError, match=r"rolled back.*give it an empty data directory"):
        change(given, add=["c:3"], remove=["c:3"])
    assert not given.members.exists()
    new = replace(greeting, safekeeper=4)
    monkeypatch.setattr(change_members, "greet", lambda *_: new)
    wanted = change(given, add=["c:3"], remove=["c:3"]).members
    assert wanted == {int(ONE, 16), int(TWO, 16), 4}
