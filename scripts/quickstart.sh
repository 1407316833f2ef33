#!/usr/bin/env bash
# From a fresh clone to a calibrated artifact: set-up, release build, calibration of the sample dump, inspection.
set -euo pipefail
cd "$(dirname "$0")/.."

usage() {
  cat <<'TEXT'
usage: scripts/quickstart.sh

Runs scripts/setup.sh (Debian packages, .venv), builds the four tools in build/release/tools, calibrates a dump of the
sample model, and prints what kvq-inspect says of the artifact.
TEXT
}

case "${1-}" in
  "") ;;
  -h | --help) usage; exit 0 ;;
  *) echo "quickstart.sh: error: unknown argument $1; see --help" >&2; exit 2 ;;
esac

scripts/setup.sh
cmake --preset release -DKVQ_TESTS=OFF >/dev/null
build() { cmake --build --preset release --target kvq-calibrate kvq-inspect kvq-eval kvq-diff; }
echo "building four tools in build/release/tools; this takes some minutes"
# On a terminal ninja says on one line how far it is. Elsewhere that would be a line for each file.
if [ -t 1 ]; then build; else build | tail -n 1; fi

show() { printf '\n$ %s\n' "$*"; "$@"; }
bin=build/release/tools
show $bin/kvq-calibrate --model sample_data/calibration.h5 --output build/sample.kvq.safetensors
show $bin/kvq-inspect build/sample.kvq.safetensors
