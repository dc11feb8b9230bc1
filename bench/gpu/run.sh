#!/usr/bin/env bash
# The GPU tests and the torch engine on CUDA, in one call without network, ended after LIMIT seconds.
#
#   bench/gpu/run.sh          # results: $OUT, or bench/results (gpu_engine.md, .json, gpu_tests.txt,
#                             # gpu_handoff.json); under ten minutes
#   bench/gpu/run.sh --all    # also the whole server and what the engine's design depends on
#                             # (gpu_serve.json, gpu_probe.json); under half an hour
#   bench/gpu/run.sh --dry    # tiny sizes on whatever there is, no tests: to see that it works; its
#                             # results go to a folder of its own, unless there is $OUT
#
# It needs a checkout and a Python that has torch (2.11 or later for CUDA 13). Nothing is built: the
# Python twins replace the extension. It names missing packages and runs the parts that do not need
# them. It uses wheels in the folder WHEELS (default: .whl).
#
#   PYTHON=python3  LIMIT=540, 1700 with --all (seconds for all)  TESTS=200, 500 (of those, for the
#   tests)  MODELS="…"
#   PROCESSES=4 (that test at once if there is pytest-xdist: most of the time goes to compilers)
#
# The status is 0 if all parts that could run had no failure, 1 otherwise.
set -u
cd "$(dirname "$0")/../.." || exit 1

PYTHON=${PYTHON:-python3} PROCESSES=${PROCESSES:-4} WHEELS=${WHEELS:-.whl}
DRY='' ALL=''
for word in "$@"; do
  case $word in
    --dry) DRY=--dry ;;
    --all) ALL=--all ;;
    *) sed -n '2,21s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
  esac
done
LIMIT=${LIMIT:-${ALL:+1700}} TESTS=${TESTS:-${ALL:+500}}
LIMIT=${LIMIT:-540} TESTS=${TESTS:-200}
# Seconds that the engine leaves to what comes after it.
AFTER=${ALL:+480}
AFTER=${AFTER:-45}
[ -z "$DRY" ] || OUT=${OUT:-$(mktemp -d)}
OUT=${OUT:-bench/results}
mkdir -p "$OUT" || exit 1
OUT=$(cd "$OUT" && pwd)
export PYTHONPATH="$PWD:$PWD/engines${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
export PDSERVE_PURE=${PDSERVE_PURE-1} HF_HUB_OFFLINE=1 PYTHONDONTWRITEBYTECODE=1
failed=0

if compgen -G "$WHEELS/*.whl" >/dev/null; then
  site=$(mktemp -d) && trap 'rm -rf "$site"' EXIT
  "$PYTHON" -m pip install -q --no-index --no-deps --no-compile --target "$site" "$WHEELS"/*.whl &&
    export PYTHONPATH="$site:$PYTHONPATH"
fi

# At least a second: none would be no limit.
left() { echo $((LIMIT > SECONDS ? LIMIT - SECONDS : 1)); }

has() { "$PYTHON" bench/gpu/needs.py "$1"; }

# The tests come first: they are few, and measuring a wrong engine is useless.
run_tests() {
  local files at_once=(-p no:xdist)
  # An error that leaves the device unusable ends one process's tests, not all.
  ! "$PYTHON" -c 'import xdist' 2>/dev/null || at_once=(-n "$PROCESSES" --dist loadfile)
  # In a conftest.py the mark means: some tests of this folder.
  mapfile -t files < <(grep -rl --include='test_*.py' --include=conftest.py 'mark\.gpu' tests | sed 's,/conftest.py$,,')
  echo "== tests: ${files[*]}"
  if [ -n "$DRY" ]; then
    echo "left out: a dry run"
  elif has tests; then
    # Each result is named at once, and an interrupted pytest still says what has failed so far.
    timeout -s INT -k 15 "$TESTS" "$PYTHON" -m pytest -v --tb=short -m gpu -p no:cacheprovider "${at_once[@]}" \
      --continue-on-collection-errors --durations=15 "${files[@]}" 2>&1 | tee "$OUT/gpu_tests.txt"
    case ${PIPESTATUS[0]} in
      0) ;;
      5) echo "no test was there to run" ;;
      124 | 137) echo "the tests took more than $TESTS s: stopped"; failed=1 ;;
      *) failed=1 ;;
    esac
  else
    echo "left out: packages are missing" | tee "$OUT/gpu_tests.txt"
    failed=1
  fi
}

run_engine() {
  echo "== engine"
  if has engine; then
    # Half a minute is kept for importing torch and giving memory back.
    # shellcheck disable=SC2086  # words of MODELS
    timeout -k 10 "$(left)" "$PYTHON" bench/gpu/engine.py $DRY --out "$OUT" \
      --budget "$(($(left) - AFTER - 30))" ${MODELS:+--models $MODELS} || failed=1
    return
  fi
  failed=1
  if has limits; then
    echo "packages are missing: the device's limits alone"
    timeout -k 10 "$(left)" "$PYTHON" bench/gpu/limits.py $DRY | tee "$OUT/gpu_engine.json"
  fi
}

# Whatever else takes the rest of the time: a name, what it needs, a script and its arguments.
run_part() {
  local name=$1 needs=$2
  shift 2
  echo "== $name"
  if has "$needs"; then
    timeout -k 10 "$(left)" "$PYTHON" "$@" $DRY --out "$OUT" || failed=1
  else
    failed=1
  fi
}

run_tests
run_engine
run_part "KV between processes" handoff bench/gpu/handoff.py
if [ -n "$ALL" ]; then
  run_part server tests bench/gpu/serve.py ${DRY:+--device cpu}
  run_part probe engine bench/gpu/probe.py
fi
if [ $failed -ne 0 ] && ! has engine >/dev/null; then
  echo "put wheels of what is missing, made for this Python and this machine, into $WHEELS"
fi
echo "== $SECONDS s; results in $OUT"
exit $failed
