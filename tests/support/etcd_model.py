"""etcd as transactions see it: keys with the revisions of their creation and last change."""

from collections.abc import Mapping
from typing import Any

LEADER = "leader"


class EtcdModel:
    """See the module. `keys`: value, creation revision, revision of the last change."""

    def __init__(self) -> None:
        self.revision = 1
        self.keys: dict[str, tuple[Any, int, int]] = {}

    def lead(self) -> int:
        """The lease of the leader has ended, and another one leads; its fence."""
        self.keys.pop(LEADER, None)
        self._put(LEADER, "")
        return self.revision

    def txn(self, txn: Mapping[str, Any]) -> bool:
        """Whether all comparisons held, so that the keys were written."""
        if not all(map(self._holds, txn["compare"])):
            return False
        for each in txn["success"]:
            self._put(each["request_put"]["key"], each["request_put"]["value"])
        return True

    def _holds(self, compared: Mapping[str, str]) -> bool:
        _, created, changed = self.keys.get(compared["key"], ("", 0, 0))
        if compared["target"] == "CREATE":
            return created == int(compared["create_revision"])
        return changed == int(compared["mod_revision"])

    def _put(self, key: str, value: Any) -> None:
        self.revision += 1
        _, created, _ = self.keys.get(key, ("", self.revision, 0))
        self.keys[key] = (value, created, self.revision)
