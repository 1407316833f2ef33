#!/usr/bin/env bash
# From a fresh clone to a calibrated artifact: set-up, release build, calibration of the sample dump, inspection.
set -euo pipefail
cd "$(dirname "$0")/.."

scripts/setup.sh
cmake --preset release -DKVQ_TESTS=OFF >/dev/null
cmake --build --preset release --target kvq-calibrate kvq-inspect kvq-eval kvq-diff | tail -n 1

show() { printf '\n$ %s\n' "$*"; "$@"; }
bin=build/release/tools
show $bin/kvq-calibrate --model sample_data/calibration.h5 --output build/sample.kvq.safetensors
show $bin/kvq-inspect build/sample.kvq.safetensors
