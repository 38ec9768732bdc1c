# Modules, places and threads for the scripts of this folder, which source it in the checkout.
# It comes before `set -u`: what stands behind `module` reads variables that are not set.

line() {  # FILE NAME: what follows NAME= or NAME: in the file, without quotes and the note behind
  sed -nE "s/^(export +)?$2 *[=:] *//p" "$1" 2> /dev/null | tail -n 1 |
    sed -E "s/^'([^']*)'.*/\1/; t; s/^\"([^\"]*)\".*/\1/; t; s/(^|[[:space:]]+)#.*//; s/[[:space:]]+$//"
}

setting() {  # NAME: an environment variable, or else a line of .env, as facenb.runs reads it
  if [ -n "${!1-}" ]; then echo "${!1}"; else line .env "$1"; fi
}

absolute() {  # PATH: below the checkout when relative
  case $1 in "~" | "~/"*) echo "$HOME${1#\~}" ;; /*) echo "$1" ;; *) echo "$PWD/$1" ;; esac
}

chosen() {  # NAME FILE [-p NAME VALUE] [-r NAME VALUE] ...: the last value given, or else that of the file
  local name=$1 file=$2 value=
  shift 2
  while (($# > 2)); do
    case $1 in
      -p | -r | --parameters | --parameters_raw) [ "$2" != "$name" ] || value=$3; shift 3 ;;
      *) shift ;;
    esac
  done
  echo "${value:-$(line "$file" "$name")}"
}

describe_run() {  # FILE [-p NAME VALUE] ...: sets seed, name and runs
  seed=$(chosen seed "$@")
  if [ -n "$seed" ] && [ -n "${SLURM_ARRAY_TASK_ID-}" ]; then
    echo "seed is $seed and the array counts seeds: leave one of them out" >&2
    return 2
  fi
  seed=${seed:-${SLURM_ARRAY_TASK_ID:-${SEED:-0}}}
  name=$(chosen name "$@")
  name=${name:-${FACENB_NAME:-$(basename "$1" .yaml)}-seed$seed}
  runs=$(chosen runs "$@")
  runs=$(absolute "${runs:-$DATA_DIR/runs}")
}

if type module > /dev/null 2>&1; then
  modules=$(setting FACENB_MODULES)
  modules=${modules:-StdEnv/2023 python/3.11}  # of the Alliance clusters; PyTorch brings its own CUDA
  if [ "$modules" != none ] && ! module load $modules; then
    echo "module load $modules failed: write FACENB_MODULES=\"NAMES\" (or none) into .env" >&2
    return 2
  fi
fi
DATA_DIR=$(setting DATA_DIR)
DATA_DIR=$(absolute "${DATA_DIR:-data}")
export DATA_DIR
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}  # processes and loaders share the CPUs
export FACENB_LOG_EVERY=${FACENB_LOG_EVERY:-60}  # seconds between lines about a run
if [ -x .venv/bin/python ]; then
  PATH=$PWD/.venv/bin:${PATH#"$PWD/.venv/bin:"}
fi
