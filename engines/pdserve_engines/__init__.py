"""The engines that come with pdserve, each found by its entry point in group `pdserve.engines`.

Nothing is imported here: choosing one engine must not load the libraries of another.
"""

__all__: list[str] = []
