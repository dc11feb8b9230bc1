#!/usr/bin/env bash
# Installs Slurm's daemons and commands, for tests/planner/actuators/slurm and tests/e2e/slurm. They start
# daemons of their own, in a folder of their own; none is started here. Needs root.
set -euo pipefail
missing=()
for pair in slurmctld:slurmctld slurmd:slurmd sbatch:slurm-client munged:munge; do
  PATH=$PATH:/usr/sbin command -v "${pair%:*}" >/dev/null || missing+=("${pair#*:}")
done
if ((${#missing[@]})); then
  export DEBIAN_FRONTEND=noninteractive
  { apt-get update -qq && apt-get install -qq -y --no-install-recommends "${missing[@]}"; } >/dev/null
fi
