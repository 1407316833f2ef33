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
  sanitizers    build with clang, AddressSanitizer and UBSan; C++ tests, kernels on an emulated device, and brief
                fuzzing of every parser (beside python, if both run)

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
say() { printf '\n== %d:%02d %s\n' $((SECONDS / 60)) $((SECONDS % 60)) "$*"; }

sanitized_log=""
sanitized_job=""
run_sanitized() { cmake --preset asan && cmake --build --preset asan && ctest --preset asan -j "$(nproc)"; }
# Under job control (set -m) a background job has its own process group, which one signal ends, and takes interrupts,
# as the tests of interrupted programs need.
start_sanitized() {
  sanitized_log=$(mktemp)
  set -m
  run_sanitized >"$sanitized_log" 2>&1 &
  sanitized_job=$!
  set +m
  trap 'kill -- "-$sanitized_job" 2>/dev/null || true; rm -f "$sanitized_log"' EXIT
}
finish_sanitized() {
  local code=0
  wait "$sanitized_job" || code=$?
  [ "$code" -eq 0 ] || { tail -n 200 "$sanitized_log"; exit "$code"; }
  sed -n '/^Test project/,$p' "$sanitized_log"
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
  cmake --preset release -DKVQ_TESTS=ON -DKVQ_WERROR=ON -DKVQ_KERNELS=tests >/dev/null
  cmake --build --preset release | tail -n 1
fi

if wants ctest; then
  say "ctest: C++ tests of the release build"
  ctest --preset release -j "$(nproc)"
fi

if wants sanitizers; then
  say "sanitizers: C++ tests under AddressSanitizer and UBSan, kernels on an emulated device, and fuzzing"
  if wants python; then
    start_sanitized
    echo "runs beside the next step"
  else
    run_sanitized
  fi
fi

if wants python; then
  say "python: second reader, dump scripts, tools, README"
  KVQ_BIN=build/release/tools .venv/bin/python -m pytest -q --durations=25 tests/python tests/cli
fi

if [ -n "$sanitized_job" ]; then
  say "sanitizers: results"
  finish_sanitized
fi
say "all steps passed"
