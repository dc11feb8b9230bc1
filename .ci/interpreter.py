"""Refuse an interpreter that is too old, in words, and in syntax that an old one still reads."""

import sys

if sys.version_info < (3, 11):  # noqa: UP036 - an older one is the case this is for
    sys.exit(
        "pdserve needs Python 3.11 or newer; {} is {}.{}. "
        "Pass another: make PYTHON=python3.12 ...".format(sys.executable, *sys.version_info[:2])
    )
