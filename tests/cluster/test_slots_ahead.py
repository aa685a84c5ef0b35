"""Clients that are ahead of a failover candidate's disk: a real subscription, and a WAL receiver that is held back."""

from pathlib import Path

import pytest

from slot_sync.resolver.transitions import CopyState, Transition
from tests.support.attached import Attached
from tests.support.extension import ONE
from tests.support.slot_copies import rows
from tests.support.slot_subscriber import receiver_stopped, subscriber, until_confirmed
from tests.support.slot_sync import STANDBY, SlotStack, attached, slot_stack
from tests.support.waiting import wait_for
from walsender_bridge.demo.local_server import LocalServer


def run_ahead(stack: SlotStack, client: LocalServer, count: int = 50) -> None:
    """Rows that the client has, and has confirmed."""
    stack.load.write_whole(count)
    until_confirmed(stack, "kept")
    assert rows(client, "SELECT max(id) FROM shop") == [(len(stack.load.written),)]


def ready(tuskline: Attached, code: int) -> dict[str, object]:
    """`slots ready`, which ends with `code`; its row of the slot."""
    told = tuskline.json("slots", "ready", "--standby", STANDBY, code=code)
    (row,) = told["slots"]
    return dict(row)


@pytest.mark.long
@pytest.mark.parametrize("major", ONE)
def test_39_a_subscription_ahead_of_the_standby_is_not_ready(major: int, tmp_path: Path) -> None:
    with slot_stack(major, tmp_path / "pair") as stack:
        stack.pair.make_slot("kept")
        with (
            attached(stack, tmp_path) as tuskline,
            subscriber(stack, "kept", tmp_path / "subscriber") as client,
        ):
            stack.folder = tmp_path / "log"
            with stack.controller() as controller:

                def judged() -> Transition:
                    (found,) = controller.once(10)[STANDBY].transitions
                    return found

                def is_ready() -> bool:
                    stack.load.write()
                    stack.pair.on_primary("CHECKPOINT")
                    return judged().after is CopyState.READY

                wait_for(is_ready, 60, "the copy is ready")
                with receiver_stopped(stack.pair.standby):
                    run_ahead(stack, client)
                    found = judged()
                    assert (found.after, found.reason) == (CopyState.CLIENT_AHEAD, "client_ahead")
                    assert ready(tuskline, 1)["state"] == "CLIENT_AHEAD"
                wait_for(
                    lambda: judged().after is CopyState.READY, 20, "the standby has received it"
                )
                # What is flushed a promotion replays: that it is not replayed yet is no loss.
                rows(stack.pair.standby, "SELECT pg_wal_replay_pause()")
                run_ahead(stack, client)
                wait_for(lambda: judged().after is CopyState.READY, 20, "it has flushed it")
                rows(stack.pair.standby, "SELECT pg_wal_replay_resume()")
                stack.pair.catch_up()
                with receiver_stopped(stack.pair.standby):
                    run_ahead(stack, client)
                    assert judged().after is CopyState.CLIENT_AHEAD
                    # Where its client was is remembered.
                    stack.pair.primary.stop("immediate")
                    told = ready(tuskline, 1)
                    assert (told["state"], told["safe"]) == ("CLIENT_AHEAD", False)
