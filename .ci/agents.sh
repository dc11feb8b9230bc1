#!/usr/bin/env bash
# Installs the programs of other projects that tests/e2e/agents and tests/e2e/clients run, in the
# versions of .ci/agents: packages of npm into .venv/agents (1.2 GB), and one environment of Python per
# list into .venv/clients (1.2 GB together). Both are links to copies in the user's cache folder, which are kept
# per version of these files. What is missing is skipped by the tests, unless PDSERVE_REQUIRE_AGENTS is set.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python3}
cache=${XDG_CACHE_HOME:-$HOME/.cache}/pdserve
limit=900 # seconds for one of them; the first time they are downloaded

# made NAME COMMAND FILE LINK: LINK leads to a folder of the cache that COMMAND has filled from FILE.
made() {
  local name=$1 command=$2 file=$3 link=$4 key folder
  key=$({ cat "$file"; "$python" -VV; uname -m; } | sha256sum | cut -c1-16)
  folder=$cache/$name-$key
  mkdir -p "$cache" "$(dirname "$link")"
  (
    flock -w "$limit" 9 || exit 1
    [ -e "$folder/.complete" ] && exit 0
    echo "==> installing $name into $folder"
    rm -rf "$folder" && mkdir -p "$folder"
    "$command" "$folder" "$file" && touch "$folder/.complete"
  ) 9> "$folder.lock" || { echo "$name cannot be installed" >&2; return 1; }
  if [ -d "$link" ] && [ ! -L "$link" ]; then rm -rf "$link"; fi
  ln -sfn "$folder" "$link"
}

with_npm() {
  cp "$2" "$1/package.json"
  # Their install scripts only choose a binary; the tests run the platform's own package.
  timeout "$limit" npm install --prefix "$1" --ignore-scripts --no-audit --no-fund --no-package-lock \
    --loglevel=error >/dev/null
}

with_pip() {
  "$python" -m venv "$1" &&
    timeout "$limit" "$1/bin/python" -m pip -qq --disable-pip-version-check install --no-deps -r "$2"
}

if ! command -v npm >/dev/null; then
  export DEBIAN_FRONTEND=noninteractive
  { apt-get update -qq && apt-get install -qq -y --no-install-recommends nodejs npm; } >/dev/null
fi
# Side by side: each mostly waits for its downloads.
made agents with_npm .ci/agents/package.json .venv/agents &
for list in .ci/agents/*.txt; do
  name=$(basename "$list" .txt)
  made "clients-$name" with_pip "$list" ".venv/clients/$name" &
done
failed=0
for each in $(jobs -p); do wait "$each" || failed=1; done
exit "$failed"
