#!/usr/bin/env bash
# Runs COMMAND with the CUDA build of torch of the `python` on the PATH, over the simulated runtime.
#
#   PATH=ENVIRONMENT/bin:$PATH bash tests/cudasim/run.sh COMMAND...
#
# CUDASIM_BUILD: where the simulator is built (default: the folder cudasim in the environment of that python).
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
[ $# -gt 0 ] || { sed -n '2,6s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2; exit 2; }
build=${CUDASIM_BUILD:-$(python -c 'import sys; print(sys.prefix)')/cudasim}
bash "$here/build.sh" "$build"

export CUDASIM_BUILD=$build
export PYTHONPATH=$build/python:$here:${here%/cudasim}:${here%/tests/cudasim}/src${PYTHONPATH:+:$PYTHONPATH}
export LD_PRELOAD=$build/libcudart.so.13:$build/libcuda.so.1${LD_PRELOAD:+:$LD_PRELOAD}
exec "$@"
