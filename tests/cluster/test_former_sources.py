"""The slot of a source that is renamed in the configuration, or taken out, is named until it is dropped."""

import re
from pathlib import Path

from tests.support.attached import Attached
from tests.support.servers import Database
from walsender_bridge.capture.status import StatusFile
from walsender_bridge.config import Config, load_config
from walsender_bridge.doctor import parts as doctor_parts
from walsender_bridge.observability.observation import Observer
from walsender_bridge.provisioning.configured import capture_source
from walsender_bridge.provisioning.init import init


def named(settings: Config) -> list[str]:
    """What `status` and `doctor` say of it, in one line each."""
    with Observer(settings) as observer:
        said = list(observer.observe().notes)
    found = doctor_parts.of_former_sources(settings, settings.source[0])
    said += [f"{each.what}; {each.repair}" for each in found]
    return [each for each in said if "tuskline_late" in each]


def test_the_slot_of_a_renamed_source_is_named_until_it_is_dropped(
    tmp_path: Path, shop: Database
) -> None:
    tuskline = Attached(tmp_path, {"late": {"dsn": shop.dsn, "tables": ["public.orders"]}})
    settings = load_config(tuskline.config)
    init(capture_source(settings.source[0]))
    with shop.connect() as connection:
        row = connection.execute("SELECT system_identifier FROM pg_control_system()").fetchone()
    assert row is not None
    settings.run_dir.mkdir(parents=True)
    status = StatusFile(settings.capture_status(settings.source[0]), "late", "tuskline_late")
    status.streaming(row[0])
    assert named(settings) == []
    text = tuskline.config.read_text()
    tuskline.config.write_text(text.replace('name = "late"', 'name = "renamed"'))
    renamed = load_config(tuskline.config)
    # One of that name on another server is somebody else's.
    status.streaming(row[0] + 1)
    assert named(renamed) == []
    status.streaming(row[0])
    said = named(renamed)
    assert len(said) == 2
    assert all("of source late, which is no longer configured" in each for each in said)
    (drop,) = {statement for each in said for statement in re.findall(r"SELECT .*?\)", each)}
    shop.execute(drop)
    assert named(renamed) == []
