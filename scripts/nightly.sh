#!/usr/bin/env bash
# Checks that take too long for every push: clang-tidy, with .clang-tidy's checks, on every file of lib and tools, and
# all C++ tests in the release build. CI runs scripts/test.sh, which leaves these out, because clang-tidy takes about as
# long as all of its steps together, and most C++ tests run under the sanitizers there.
set -euo pipefail
cd "$(dirname "$0")/.."

usage() {
  cat <<'TEXT'
usage: scripts/nightly.sh [REGEX]

Runs all C++ tests in the release build (scripts/test.sh --only build,ctest --full), unless there is a REGEX, and
clang-tidy-19 on the C++ sources of lib and tools, or those of them whose path matches REGEX. Sources of the runtime,
kvq-bench and kvq-selftest are among them if nvcc is there. Kernels (.cu) are left out, because clang-tidy does not take
nvcc's flags.

Exit code: 0 no finding, 1 findings, 2 wrong flags, 5 clang-tidy-19 is missing, else that of a test that failed.
TEXT
}

case "${1-}" in
  -h | --help) usage; exit 0 ;;
  -*) echo "nightly.sh: error: unknown flag $1; see --help" >&2; exit 2 ;;
esac
if ! command -v run-clang-tidy-19 >/dev/null; then
  echo "nightly.sh: error: clang-tidy-19 is missing; run: apt-get install clang-19 clang-tidy-19" >&2
  exit 5
fi
if [ $# -eq 0 ]; then scripts/test.sh --only build,ctest --full; fi
# CMake only writes the database of compile commands; the preset's clang-tidy, which runs while compiling, is off.
cmake --preset tidy -DKVQ_TESTS=OFF -DKVQ_CUDA=AUTO -DCMAKE_CXX_CLANG_TIDY= >/dev/null
run-clang-tidy-19 -quiet -p build/tidy -j "$(nproc)" "$PWD/(lib|tools)/(?!.*\.cu\$).*${1-}"
