"""Print pyproject.toml's requirements, the base ones and those of the extras named, one per line.

Lets the Makefile install dependencies without building pdserve, so that a change in native/
rebuilds only the extension. Markers and spaces are written without blanks for the shell.
"""

import sys
import tomllib
from pathlib import Path


def requirements(extras: list[str]) -> list[str]:
    """Base requirements, then each extra's, as pip understands them."""
    pyproject = Path(__file__).parent.parent / "pyproject.toml"
    project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
    found = list(project["dependencies"])
    for extra in extras:
        found += project["optional-dependencies"][extra]
    return found


if __name__ == "__main__":
    print("\n".join(line.replace(" ", "") for line in requirements(sys.argv[1:])))
