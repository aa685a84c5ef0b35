"""How a commit is told from what a catalog has: decisions, without I/O.

An answer to a commit gets lost as that to a creation does (`store.create`), and whatever repeats a request on the way gets
"conflict" as the answer to its own commit. So only "made" is believed; after everything else the tables are read, and what
is there decides. The steps are those of `store.create`; here is what it means for a commit that it is there.

- A commit that adds snapshots is there if they are: their ids are drawn for it. That holds whatever was committed after it.
- Any other commit is there if the table is as the commit makes it, and what it requires of the rest still holds. Two
  writers that make the same of a table cannot be told apart, and need not be.
- If it is not there and its requirements do not hold, it is lost, for good: every commit requires a branch of its writer's
  term, or a snapshot of the control table, which never come back once they are gone.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from spark_consumers.lake.catalog.requirements import unmet
from spark_consumers.lake.catalog.table_catalog import TableCommit, Update
from spark_consumers.lake.store.create import Answer


def found(commit: TableCommit, metadata: Mapping[str, Any] | None) -> Answer:
    """What a table's metadata says of a commit to it; None: the table does not exist."""
    if metadata is None:
        return Answer.ANOTHERS
    added = {u["snapshot"]["snapshot-id"] for u in commit.updates if u["action"] == "add-snapshot"}
    if added:
        if added <= _snapshots(metadata):
            return Answer.OWN
    elif all(_is_visible(metadata, update) for update in commit.updates):
        touched = {update.get("ref-name") for update in commit.updates}
        rest = [r for r in commit.requirements if "ref" in r and r["ref"] not in touched]
        if unmet(metadata, rest) is None:
            return Answer.OWN
    return Answer.NOTHING if unmet(metadata, commit.requirements) is None else Answer.ANOTHERS


def found_of_all(answers: Iterable[Answer]) -> Answer:
    """The same of a commit of several tables, from what each table says: it was made in all of them or in none.

    They were read one after the other, so the commit may be in one that was read late and not in one that was read early.
    """
    said = set(answers)
    return next((a for a in (Answer.OWN, Answer.ANOTHERS) if a in said), Answer.NOTHING)


def _snapshots(metadata: Mapping[str, Any]) -> set[int]:
    return {each["snapshot-id"] for each in metadata.get("snapshots", ())}


def _is_visible(metadata: Mapping[str, Any], update: Update) -> bool:
    refs = metadata.get("refs", {})
    properties = metadata.get("properties", {})
    match update["action"]:
        case "set-snapshot-ref":
            return bool(
                refs.get(update["ref-name"], {}).get("snapshot-id") == update["snapshot-id"]
            )
        case "remove-snapshot-ref":
            return update["ref-name"] not in refs
        case "remove-snapshots":
            return _snapshots(metadata).isdisjoint(update["snapshot-ids"])
        case "set-properties":
            return all(properties.get(name) == value for name, value in update["updates"].items())
        case "remove-properties":
            return all(name not in properties for name in update["removals"])
        case "add-schema":
            return any(_names(each) == _names(update["schema"]) for each in metadata["schemas"])
        case "set-current-schema" | "remove-statistics" | "remove-partition-statistics":
            return True  # with the schema that was added, or the snapshot that was removed
        case "upgrade-format-version":
            return bool(metadata["format-version"] >= update["format-version"])
    return False


def _names(schema: Mapping[str, Any]) -> Sequence[str]:
    return [field["name"] for field in schema["fields"]]
