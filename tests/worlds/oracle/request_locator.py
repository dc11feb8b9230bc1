"""Finds a request in a world from outside.

It tells which routers hold the request in their queue, which engines have a sequence of it, and how
many tokens each has computed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pdserve.engine_core.core import EngineCore
from tests.worlds.roles import Router, Worker

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pdserve.engine_core.scheduler.submission import Submission
    from tests.worlds.world import VirtualHost, World

__all__ = ["STAGES", "locate_request", "stage_of"]

STAGES: Final = (
    *("opening", "held", "queued", "prefilling", "transferring", "decoding"),
    *("between", "warming"),
)
"""Stages of a request: on its way; held by a router; waiting in an engine; its prompt is computed
here, or elsewhere; it decodes; on its way between two workers; one worker decodes it and another
prepares to."""


def locate_request(world: World, name: str) -> Iterator[tuple[str, str]]:
    """(host, stage) of every process that keeps something of a request. Work for it under another
    name, such as a prewarm, has a name that begins with the request's."""
    for host in world.hosts.values():
        if not host.up:
            continue
        if isinstance(host.part, Router):
            queues = host.part.service.core._queues.values()
            if any(_is(item.request.request_id, name) for queue in queues for item in queue):
                yield host.name, "held"
        elif isinstance(host.part, Worker):
            for submission in _submissions(host):
                if _is(submission.request.request_id, name):
                    yield host.name, _stage(submission)


def stage_of(world: World, name: str, *, begun: bool) -> str:
    """One of `STAGES`. `begun`: a worker has had it."""
    found = list(locate_request(world, name))
    decoding = [host for host, stage in found if stage == "decoding"]
    if decoding and any(host not in decoding for host, _ in found):
        return "warming"
    order = ("decoding", "transferring", "prefilling", "queued", "held")
    stages = {stage for _, stage in found}
    return next((s for s in order if s in stages), "between" if begun else "opening")


def _is(found: str, name: str) -> bool:
    return found == name or found.startswith(f"{name}/")


def _submissions(host: VirtualHost) -> list[Submission]:
    part = host.part
    assert isinstance(part, Worker)
    core = part.engine.core
    return list(core.scheduler._submissions.values()) if isinstance(core, EngineCore) else []


def _stage(submission: Submission) -> str:
    if submission.remote is not None:
        return "transferring"
    if any(sequence.first_token is not None for sequence in submission.live):
        return "decoding"
    return "prefilling" if submission.started else "queued"
