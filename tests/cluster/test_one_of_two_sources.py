"""One source that cannot be captured, beside one that can: `up` starts, the other one is named with its way out."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from psycopg.conninfo import conninfo_to_dict

from tests.support.attached import CLI, Attached
from tests.support.parts_config import configuration
from tests.support.servers import Database
from tests.support.waiting import wait_for
from walsender_bridge.errors import Cause


@pytest.fixture
def reader(shop: Database) -> Iterator[str]:
    """A role that may connect and stream, and make nothing."""
    name = f"reader_{shop.name}"
    shop.execute(f"CREATE ROLE {name} LOGIN REPLICATION PASSWORD '{name}'")
    yield name
    shop.execute(f"DROP OWNED BY {name}", f"DROP ROLE {name}")


def streaming(tuskline: Attached) -> set[str]:
    report = json.loads(tuskline.run("status", "--json").stdout.splitlines()[-1])
    return {each["source"] for each in report["sources"] if each["state"] == "streaming"}


@pytest.mark.timeout(600)
def test_a_source_that_is_not_initialised_does_not_keep_up_from_starting_the_others(
    tmp_path: Path, shop: Database, reader: str
) -> None:
    sources: dict[str, dict[str, object]] = {
        "shop": {"dsn": shop.dsn, "tables": ["public.orders"]},
        "late": {
            "dsn": shop.server.dsn(shop.name, user=reader, password=reader),
            "tables": ["public.audit"],
        },
    }
    with Attached(tmp_path, sources) as tuskline:
        tuskline.json("init", "--source", "shop")
        # By itself it would not start.
        assert tuskline.run("doctor", "--source", "late").returncode == Cause.PRIVILEGE
        tuskline.up()
        wait_for(lambda: streaming(tuskline) == {"shop"}, 60, "shop streams\n" + tuskline.logs())

        def problem_of_late() -> str:
            report = tuskline.json("status", code=Cause.UNAVAILABLE)
            (word,) = [word for word in report["problems"] if word.startswith("capture of late")]
            return word

        # It says for a moment that it is connecting, at each attempt.
        wait_for(lambda: "tuskline init" in problem_of_late(), 60, "late is named with its way out")
        assert "late" in tuskline.logs(1000)
        # The hint: from then on it is captured, without another `up`.
        env = {"PGPASSWORD": str(conninfo_to_dict(shop.dsn)["password"])}
        tuskline.json("init", "--source", "late", "--admin", "user=postgres", env=env)
        wait_for(
            lambda: streaming(tuskline) == {"shop", "late"}, 60, "both stream\n" + tuskline.logs()
        )
        assert tuskline.stop_up() == 0
        # Where there is no other, it ends as before.
        (tmp_path / "alone").mkdir()
        alone = Attached(tmp_path / "alone", {"other": sources["late"]})
        assert "tuskline init" in alone.error_plain("up", code=Cause.PRIVILEGE)


@pytest.mark.timeout(600)
def test_a_source_that_goes_on_begins_again_when_that_is_forced(
    tmp_path: Path, shop: Database
) -> None:
    with Attached(tmp_path, {"shop": {"dsn": shop.dsn, "tables": ["public.orders"]}}) as tuskline:
        tuskline.json("init")
        tuskline.up()
        wait_for(lambda: streaming(tuskline) == {"shop"}, 60, "it streams\n" + tuskline.logs())
        made = tuskline.json("reattach", "--force", "shop")
        assert made == {"reattached": [{"source": "shop", "reason": "--force"}]}
        wait_for(
            lambda: tuskline.run("status").returncode == 0, 90, "it goes on\n" + tuskline.logs()
        )
        assert tuskline.stop_up() == 0


@pytest.mark.parametrize("part", ["log-server", "bridge", "lake"])
def test_the_last_error_of_a_part_is_a_line_of_its_log(tmp_path: Path, part: str) -> None:
    config = configuration(tmp_path, lake=True)
    config.write_text(config.read_text() + '[logs]\nformat = "json"\n')
    for folder in ("log-server", "log", "lake"):
        (tmp_path / folder).write_text("a file")
    done = subprocess.run(
        [*CLI, part, "run", "--config", str(config)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == Cause.CONFIG, done.stderr
    (line,) = done.stderr.splitlines()
    record = json.loads(line)
    assert (record["level"], record["code"]) == ("error", "CONFIG")
    assert record["repair"]
