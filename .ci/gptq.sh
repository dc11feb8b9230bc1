#!/usr/bin/env bash
# Makes an environment with gptqmodel for CPUs in the user's cache folder (1.5 GB, minutes the first
# time), and prints its interpreter. gptqmodel asks for a newer torch than the one that it gets here;
# what the tests need of it runs with that.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python3}
packages=(
  "setuptools>=84.2.1,<85" wheel ninja transformers==5.23.0 accelerate==1.15.0 datasets==5.2.0
  defuser==0.0.28 device-smi==0.5.7 logbar==0.4.15 pypcre==0.6.4 tokenicer==0.0.14
  safetensors numpy threadpoolctl packaging protobuf pillow requests jinja2 dill
)
key=$({ cat .ci/gptq.sh; grep '^torch==' constraints.txt; "$python" -VV; uname -m; } | sha256sum | cut -c1-16)
made=${XDG_CACHE_HOME:-$HOME/.cache}/pdserve/gptq-$key
mkdir -p "$made"
exec 9> "$made.lock"
flock -w 1800 9 || { echo "another process has been making $made for half an hour" >&2; exit 1; }

pip() { "$made/bin/python" -m pip -qq --disable-pip-version-check "$@" >&2; }

if [ ! -e "$made/.complete" ]; then
  echo "==> installing gptqmodel into $made (1.5 GB)" >&2
  rm -rf "$made"
  "$python" -m venv "$made"
  # torch first: with it installed no other package asks for another build of it.
  pip install "$(grep '^torch==' constraints.txt)"
  pip install "${packages[@]}"
  pip install --no-deps torchao==0.18.0
  pip install --no-deps --no-build-isolation gptqmodel==7.7.0
  touch "$made/.complete"
fi
echo "$made/bin/python"
