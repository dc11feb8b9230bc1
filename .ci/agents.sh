#!/usr/bin/env bash
# Installs the coding agents that tests/e2e/agents runs, in the versions of .ci/agents/package.json,
# into .venv/agents (about 770 MB). Other projects make them: without them the tests skip, unless
# PDSERVE_REQUIRE_AGENTS is set.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
target=.venv/agents
if ! command -v npm >/dev/null; then
  export DEBIAN_FRONTEND=noninteractive
  { apt-get update -qq && apt-get install -qq -y --no-install-recommends nodejs npm; } >/dev/null
fi
mkdir -p "$target"
cmp -s .ci/agents/package.json "$target/package.json" && [ -d "$target/node_modules" ] && exit 0
cp .ci/agents/package.json "$target/package.json"
# Their install scripts only choose a binary; the tests run the platform's own package.
npm install --prefix "$target" --ignore-scripts --no-audit --no-fund --no-package-lock \
  --loglevel=error >/dev/null
