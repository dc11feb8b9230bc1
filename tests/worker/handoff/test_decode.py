from __future__ import annotations

from tests.worker.handoff.site import Site, on_site, request


@on_site()
async def test_a_prompt_is_prefilled_elsewhere(site: Site) -> None:
    client = site.ask(request())
    await site.until(lambda: client.over)
    assert client.where == "remote; node=p1; reason=always"
    assert client.started[0].received_tokens == 100
    assert client.tokens == {0: 3}
    await site.quiet()
    assert site.queue.outcomes == {"done": 1}
    assert site.d.decode.numbers().remote == {"always": 1}
    assert site.d.decode.numbers().ended == {"done": 1}
