from typing import get_args

from pdserve.text.reasoning_parser import REASONING_FORMATS
from pdserve.text.tool_parsers import TOOL_FORMATS
from pdserve.worker.config import POOLINGS, REASONING_PARSERS, TOOL_PARSERS
from pdserve.worker.pooling import PoolingOption


def test_the_names_of_what_reads_text_are_those_that_there_are():
    """They are written out, so that `pdserve --help` need not load what they name."""
    assert ("auto", "none", *TOOL_FORMATS) == TOOL_PARSERS
    assert ("auto", "none", *REASONING_FORMATS) == REASONING_PARSERS
    assert get_args(PoolingOption) == POOLINGS
