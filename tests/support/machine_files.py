"""The configuration of each kind of machine: what its part needs, and nothing else."""

from walsender_bridge.config import Part

KINDS: tuple[Part, ...] = ("log-server", "safekeepers", "repository", "bridge", "lake", "slots")
#: What each kind's file says beside its name: only what its part needs.
SECTIONS = {
    "log-server": '[[log_server]]\ndata_dir = "replicas"\nlisten = "127.0.0.1:7401"\n',
    "safekeepers": '[safekeepers]\nlocal = 1\ndata_dir = "wal"\n',
    "repository": '[log]\ndata_dir = "log"\n[[log_server]]\nlisten = "127.0.0.1:7401"\n',
    "bridge": '[[source]]\nname = "shop"\ndsn = "dbname=shop"\n[safekeepers]\naddresses = ["127.0.0.1:7410"]\n',
    "lake": '[[source]]\nname = "shop"\ndsn = "dbname=shop"\n[lake]\nuri = "lake"\n',
    "slots": '[slots]\ndsn = "dbname=shop"\n[slots.candidates.near]\ndsn = "host=near"\nslot = "near"\n',
}


def machine(*kinds: str) -> str:
    """The file of a machine with these parts, in one table of each name."""
    named = ", ".join(f'"{each}"' for each in kinds)
    return f'[machine]\ndata_dir = "state"\nparts = [{named}]\n' + "".join(
        SECTIONS[each] for each in kinds
    )
