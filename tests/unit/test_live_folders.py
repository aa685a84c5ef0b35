"""The folders of large live reads go when nothing reads from them any more."""

import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

from spark_consumers.lake.live import log_tail
from spark_consumers.lake.manifest.reader_leases import HOLD


def test_folders_are_removed_an_hour_after_their_snapshot(tmp_path, monkeypatch):
    old, young = tmp_path / "old", tmp_path / "young"
    now = time.monotonic()
    queue = deque([(old, now - HOLD), (young, now - HOLD + 600)])
    for folder, _ in queue:
        folder.mkdir()
    monkeypatch.setattr(log_tail, "_dropped", queue)
    log_tail._remove_dropped()
    assert [*tmp_path.iterdir()] == [young]
    assert [folder for folder, _ in queue] == [young]


def test_threads_that_read_live_at_once_remove_each_folder_once(tmp_path, monkeypatch):
    removed: list[Path] = []
    together = threading.Barrier(8)
    queue = deque((tmp_path / str(number), -HOLD) for number in range(20))
    monkeypatch.setattr(log_tail, "_dropped", queue)
    monkeypatch.setattr(log_tail, "remove_tree", removed.append)

    def slow():
        # Whoever has looked at the queue gives way to the others.
        time.sleep(0.001)
        return 1.0

    monkeypatch.setattr(log_tail, "time", SimpleNamespace(monotonic=slow))

    def remove(_):
        together.wait()
        log_tail._remove_dropped()

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(remove, range(8)))
    assert sorted(removed) == sorted(tmp_path / str(number) for number in range(20))
