#!/usr/bin/env bash
# bench/gpu.sh OUTDIR [options]: see docs/gpu-benchmark.md. Needs Python 3.11 with torch and Triton (PYTHON names another one
# than python3); nothing of this project has to be installed, and nothing is fetched.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit(f"Python 3.11 is needed, this is {sys.version}" if sys.version_info < (3, 11) else 0)'
for room in kernels shared services/executor services/scheduler cli; do
  PYTHONPATH="$root/$room${PYTHONPATH:+:$PYTHONPATH}"
done
export PYTHONPATH
exec "$python" "$root/bench/gpu" "$@"
