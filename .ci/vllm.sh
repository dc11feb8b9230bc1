#!/usr/bin/env bash
# Makes .venv-vllm, the environment of tests and measurements with vLLM (constraints-vllm.txt). It takes
# 3.5 GB and minutes the first time; then it is a link to a copy in the user's cache folder, which is
# kept per version of that file. pdserve itself is installed there from this checkout.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python3}
key=$({ cat constraints-vllm.txt; "$python" -VV; uname -m; } | sha256sum | cut -c1-16)
made=${XDG_CACHE_HOME:-$HOME/.cache}/pdserve/vllm-$key
mkdir -p "$made"
exec 9> "$made.lock"
flock -w 1800 9 || { echo "another process has been making $made for half an hour" >&2; exit 1; }

pip() { "$made/bin/python" -m pip -qq --disable-pip-version-check "$@"; }

# torchvision's wheel for Linux has its operators in a library that needs CUDA's torch. Beside a torch for
# CPUs the library does not load, and then the package does not import, because it describes two operators
# that are not there. Processors of images call none of them: with the two declared, the rest works.
declare_operators() {
  cat >> "$("$made/bin/python" -c 'import sysconfig as s; print(s.get_path("purelib"))')/torchvision/extension.py" <<'END'

if not _has_ops():
    _declared = torch.library.Library("torchvision", "DEF")
    for _name in ("nms", "qnms"):
        _declared.define(_name + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
END
  "$made/bin/python" -c 'import torchvision.transforms.v2.functional'
}

if [ ! -e "$made/.complete" ]; then
  echo "==> installing vLLM into $made (3.5 GB)"
  rm -rf "$made"
  "$python" -m venv "$made"
  # torch first and alone: with it installed no other package asks for another build of it.
  pip install --no-deps "$(grep '^torch==' constraints-vllm.txt)"
  pip install --no-deps -r constraints-vllm.txt
  declare_operators
  touch "$made/.complete"
fi
if [ -d .venv-vllm ] && [ ! -L .venv-vllm ]; then
  echo ".venv-vllm is a folder and not a link: remove it first" >&2
  exit 1
fi
ln -sfn "$made" .venv-vllm

# An editable install remembers which files there were, and which checkout it is of.
stamp="$PWD $(find pdserve engines native -type f -not -path '*/__pycache__/*' | LC_ALL=C sort | cksum)"
if [ "$(cat "$made/.checkout" 2>/dev/null)" != "$stamp" ]; then
  echo "==> installing pdserve beside vLLM"
  SKBUILD_BUILD_DIR=build/vllm pip install --no-build-isolation --no-deps --editable .
  echo "$stamp" > "$made/.checkout"
fi
.venv-vllm/bin/python -c 'import vllm.version as v; print("==> vLLM", v.__version__)'
