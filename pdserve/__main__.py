"""`python -m pdserve`: the same program as the `pdserve` script."""

import sys

from pdserve.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
