#!/bin/sh
# All GPU measurements in one call, some twelve minutes on one card. On a CPU: --tiny --device cpu
set -eu
cd "$(dirname "$0")/../.."
PYTHONPATH=".:solver:api${PYTHONPATH:+:$PYTHONPATH}" exec "${PYTHON:-python}" -m benchmarks.gpu "$@"
