from typing import get_args

from pdserve.text.reasoning import REASONING_FORMATS
from pdserve.text.tools import TOOL_FORMATS
from pdserve.worker.config import POOLINGS, REASONING_PARSERS, TOOL_PARSERS
from pdserve.worker.pooling import Asked


def test_the_names_of_what_reads_text_are_those_that_there_are():
    """They are written out, so that `pdserve --help` need not load what they name."""
    assert TOOL_PARSERS == ("auto", "none", *TOOL_FORMATS)
    assert REASONING_PARSERS == ("auto", "none", *REASONING_FORMATS)
    assert get_args(Asked) == POOLINGS
