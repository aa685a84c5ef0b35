"""Requests to pin and unpin epochs, carried out by drivers of this process."""

from spark_consumers.lake.manifest.chain import open_chain
from spark_consumers.lake.writer import requests
from tests.support.waiting import wait_for


class Pins:
    """Requests to a pipeline's lake, carried out by one of its drivers."""

    def __init__(self, pipeline):
        self.pipeline, self.lake = pipeline, pipeline.lake
        self.chain = open_chain(pipeline.lake)

    def ask(self, kind, name, epoch=0, seconds=0.0):
        return requests.ask(self.chain, kind, (), pin=name, epoch=epoch, seconds=seconds)

    def wait(self, request, house=None):
        """Run rounds until the request is done; its outcome."""

        def done():
            (house or self.pipeline.house).run_once()
            return requests.finished(self.pipeline.head(), request)

        return wait_for(done, 60, f"the request to {request.kind}")[request.pin]

    def pin(self, name, epoch, seconds=0.0, house=None):
        return self.wait(self.ask("pin", name, epoch, seconds), house)

    def unpin(self, name, house=None):
        return self.wait(self.ask("unpin", name), house)

    def expire(self, house=None):
        """Housekeeping with no retention."""
        writer = (house or self.pipeline.house)._writer
        writer.kept.expire(writer.head, 0.0)
