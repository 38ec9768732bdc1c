#!/bin/bash
# Builds the environment; on a cluster on a login node, because it needs the internet: bash slurm/setup.sh
cd "$(dirname "${BASH_SOURCE[0]}")/.." && . slurm/environment.sh || exit 2
set -euo pipefail
outside=${PATH#"$PWD/.venv/bin:"}  # not the Python of the environment that is built
python=$(PATH=$outside command -v python3.11 || PATH=$outside command -v python3) ||
  { echo "there is no python3: load a module (FACENB_MODULES in .env) or install it" >&2; exit 1; }
make .venv/.ready PYTHON="$python"
.venv/bin/facenb --help > /dev/null || { echo "facenb does not start: remove .venv and run this again" >&2; exit 1; }
echo "ready: data and runs will lie in $DATA_DIR; next: .venv/bin/facenb --help"
[ -n "$(setting SBATCH_ACCOUNT)" ] || echo "Slurm may want an account: write SBATCH_ACCOUNT=NAME into .env"
