#!/usr/bin/env bash
# Every test, as CI runs them: set-up, layering, C++, Python, tools, the C++ tests again under clang's AddressSanitizer and
# UBSan, and brief fuzzing of every parser.
set -euo pipefail
cd "$(dirname "$0")/.."

scripts/setup.sh --with-tests --with-dump
step() { printf '\n== %s\n' "$*"; }

step "layers: who includes whom"
python3 scripts/check_layers.py

step "release build and C++ tests"
cmake --preset release -DKVQ_TESTS=ON >/dev/null
cmake --build --preset release | tail -n 1
ctest --preset release -j "$(nproc)"

step "Python: second reader, dump scripts, tools, README; beside it the build with clang, AddressSanitizer and UBSan"
python_log=$(mktemp)
KVQ_BIN=build/release/tools .venv/bin/python -m pytest -q tests/python tests/cli >"$python_log" 2>&1 &
python_tests=$!
trap 'kill "$python_tests" 2>/dev/null || true; rm -f "$python_log"' EXIT
cmake --preset asan >/dev/null
cmake --build --preset asan | tail -n 1
wait "$python_tests" || { cat "$python_log"; exit 1; }
tail -n 3 "$python_log"

step "C++ tests under AddressSanitizer and UBSan, and fuzzing"
ctest --preset asan -j "$(nproc)"
