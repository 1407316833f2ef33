#!/usr/bin/env bash
# Every test, as CI runs them: set-up, layering, C++, Python, tools, the C++ tests again under clang's AddressSanitizer and
# UBSan, with the kernels on an emulated device, and brief fuzzing of every parser.
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

step "Python: second reader, dump scripts, tools, pages of docs; beside it the build with clang, AddressSanitizer and UBSan"
# The build is what goes to the background: a process there ignores interrupts, and so would the tools under test.
build_log=$(mktemp)
(cmake --preset asan && cmake --build --preset asan) >"$build_log" 2>&1 &
build=$!
trap 'kill "$build" 2>/dev/null || true; rm -f "$build_log"' EXIT
KVQ_BIN=build/release/tools .venv/bin/python -m pytest -q tests/python tests/cli
wait "$build" || { tail -n 50 "$build_log"; exit 1; }
tail -n 1 "$build_log"

step "C++ tests under AddressSanitizer and UBSan, kernels on an emulated device, and fuzzing"
ctest --preset asan -j "$(nproc)"
