#!/usr/bin/env bash
# Runs every test, step by step, as CI does; scripts/nightly.sh has the checks that take too long for CI.
set -euo pipefail
cd "$(dirname "$0")/.."

steps=(setup format layers build ctest python sanitizers)

usage() {
  cat <<'TEXT'
usage: scripts/test.sh [--only STEP[,STEP]...]... [--list]

  (nothing)     all steps, in this order; the first failure ends the run
  --only STEP   this step alone; several with commas or flags, in the order below
  --list        the names of the steps

  setup         scripts/setup.sh --with-tests --with-dump
  format        scripts/check_format.py: clang-format, ruff, gersemi, 120 columns
  layers        scripts/check_layers.py: who includes whom
  build         the release build, with tests
  ctest         C++ tests of the release build
  python        second reader, dump scripts, tools, commands of all documents; wants the release build
  sanitizers    build with clang, AddressSanitizer and UBSan (beside python, if both run); C++ tests, kernels on an
                emulated device, and brief fuzzing of every parser

Exit code: 0 all passed, 2 wrong flags, else that of the step that failed.
TEXT
}

only=()
choose() {  # <comma-separated steps>
  local name names
  IFS=, read -r -a names <<<"$1"
  for name in "${names[@]}"; do
    if [[ -z $name || " ${steps[*]} " != *" $name "* ]]; then
      echo "test.sh: error: unknown step \"$name\"; expected one of: ${steps[*]}" >&2
      exit 2
    fi
    only+=("$name")
  done
}
while [ $# -gt 0 ]; do
  case "$1" in
    -h | --help) usage; exit 0 ;;
    --list) printf '%s\n' "${steps[@]}"; exit 0 ;;
    --only) [ -n "${2-}" ] || { echo "test.sh: error: --only needs a step; see --list" >&2; exit 2; }
            choose "$2"; shift 2 ;;
    --only=?*) choose "${1#--only=}"; shift ;;
    *) echo "test.sh: error: unknown argument $1; see --help" >&2; exit 2 ;;
  esac
done
[ ${#only[@]} -gt 0 ] || only=("${steps[@]}")

wants() { [[ " ${only[*]} " == *" $1 "* ]]; }
say() { printf '\n== %s\n' "$*"; }

asan_build=""
build_with_sanitizers() { cmake --preset asan && cmake --build --preset asan; }
# The build runs in the background, not the tests: a background process ignores interrupts, and so would the tools that
# tests start.
start_asan_build() {
  asan_log=$(mktemp)
  build_with_sanitizers >"$asan_log" 2>&1 &
  asan_build=$!
  trap 'kill "$asan_build" 2>/dev/null || true; rm -f "$asan_log"' EXIT
}
finish_asan_build() {
  [ -n "$asan_build" ] || start_asan_build
  wait "$asan_build" || { tail -n 50 "$asan_log"; exit 1; }
  tail -n 1 "$asan_log"
}

if wants setup; then scripts/setup.sh --with-tests --with-dump; fi

if wants format; then
  say "format: clang-format, ruff, gersemi, 120 columns"
  python3 scripts/check_format.py
fi

if wants layers; then
  say "layers: who includes whom"
  python3 scripts/check_layers.py
fi

if wants build; then
  say "build: release"
  cmake --preset release -DKVQ_TESTS=ON >/dev/null
  cmake --build --preset release | tail -n 1
fi

if wants ctest; then
  say "ctest: C++ tests of the release build"
  ctest --preset release -j "$(nproc)"
fi

if wants python; then
  if wants sanitizers; then start_asan_build; fi
  say "python: second reader, dump scripts, tools, README${asan_build:+; beside it the build with sanitizers}"
  KVQ_BIN=build/release/tools .venv/bin/python -m pytest -q tests/python tests/cli
fi

if wants sanitizers; then
  say "sanitizers: C++ tests under AddressSanitizer and UBSan, kernels on an emulated device, and fuzzing"
  finish_asan_build
  ctest --preset asan -j "$(nproc)"
fi
