#!/usr/bin/env bash
# Runs every test, step by step, as CI does; scripts/nightly.sh has the checks that take too long for CI.
set -euo pipefail
cd "$(dirname "$0")/.."

steps=(setup format layers build ctest python sanitizers)

usage() {
  cat <<'TEXT'
usage: scripts/test.sh [--only STEP[,STEP]...]... [--full] [--list]

  (nothing)     all steps, in this order; the first failure ends the run
  --only STEP   this step alone; several with commas or flags, in the order below
  --full        build and ctest with all C++ tests, also those that the sanitizers' build has, too; each source is
                compiled alone, so that it must include what it uses (the other builds compile sources in groups);
                more of the tuned kernels (-DKVQ_KERNELS=tests)
  --list        the names of the steps

  setup         scripts/setup.sh --with-tests --with-dump
  format        scripts/check_format.py: clang-format, ruff, gersemi, 120 columns
  layers        scripts/check_layers.py: who includes whom
  build         the release build, with the C++ tests that the sanitizers' build lacks or that both have to run
  ctest         C++ tests of the release build
  python        second reader and dump scripts (tests/python) and commands of all documents, beside them tools
                (tests/cli); wants the release build
  sanitizers    build with clang, AddressSanitizer and UBSan; all other C++ tests, kernels on an emulated device, and
                brief fuzzing of every parser (beside python, if both run)

Exit code: 0 all passed, 2 wrong flags, else that of the step that failed.
TEXT
}

only=()
shared=OFF
groups=ON
kernels=few
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
    --full) shared=ON; groups=OFF; kernels=tests; shift ;;
    --only=?*) choose "${1#--only=}"; shift ;;
    *) echo "test.sh: error: unknown argument $1; see --help" >&2; exit 2 ;;
  esac
done
[ ${#only[@]} -gt 0 ] || only=("${steps[@]}")

wants() { [[ " ${only[*]} " == *" $1 "* ]]; }
say() { printf '\n== %d:%02d %s\n' $((SECONDS / 60)) $((SECONDS % 60)) "$*"; }

# Jobs that run side by side. Each writes to a log. When a job ends, show_<name> prints what is worth reading of it;
# all is printed if it failed. Under job control (set -m) a background job has its own process group, which one signal
# ends, and takes interrupts, as the tests of interrupted programs need.
logs=""
declare -A jobs=()  # names by process
end_jobs() {
  local pid
  for pid in "${!jobs[@]}"; do kill -- "-$pid" 2>/dev/null || true; done
  rm -rf "$logs"
}
start() {  # <name> <command>...
  # bash ignores an interrupt that comes while it waits for a program that does not end by it, unless there is a trap.
  [ -n "$logs" ] || { logs=$(mktemp -d); trap end_jobs EXIT; trap 'exit 130' INT; trap 'exit 143' TERM; }
  local name=$1
  shift
  set -m
  "$@" >"$logs/$name" 2>&1 </dev/null &
  jobs[$!]=$name
  set +m
}
# Waits for all jobs. The first that fails ends the run with its exit code.
finish_jobs() {
  local pid code name tick
  while [ ${#jobs[@]} -gt 0 ]; do
    # bash runs the trap of a signal that comes just before it waits only when the wait ends, so a wait takes a second
    # at most.
    sleep 1 >/dev/null 2>&1 &
    tick=$! code=0
    wait -n -p pid "${!jobs[@]}" "$tick" || code=$?
    if [ "$pid" = "$tick" ]; then continue; fi
    name=${jobs[$pid]}
    unset "jobs[$pid]"
    say "$name: $([ "$code" -eq 0 ] && echo passed || echo "failed, exit code $code")"
    if [ "$code" -ne 0 ]; then
      cat "$logs/$name"
      exit "$code"
    fi
    "show_$name" <"$logs/$name"
  done
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
  cmake --preset release -DKVQ_TESTS=ON -DKVQ_SHARED_TESTS=$shared -DKVQ_UNITY=$groups -DKVQ_WERROR=ON \
    -DKVQ_KERNELS=$kernels >/dev/null
  # A build that fails prints what the compiler said; one that succeeds, ninja's last line.
  build_log=$(mktemp)
  built=0
  cmake --build --preset release >"$build_log" 2>&1 || built=$?
  tail -n "$([ $built -eq 0 ] && echo 1 || echo 200)" "$build_log"
  rm -f "$build_log"
  [ $built -eq 0 ] || exit $built
fi

if wants ctest; then
  say "ctest: C++ tests of the release build"
  ctest --preset release -j "$(nproc)"
fi

sanitizers() {
  cmake --preset asan -DKVQ_UNITY=$groups && cmake --build --preset asan && ctest --preset asan -j "$(nproc)"
}
# Beside other jobs the sanitizers give way: they alone use all cores, and so fill what the others leave, to the end.
beside() { renice -n 2 $BASHPID >/dev/null || true; "$@"; }
show_sanitizers() { sed -n '/^Test project/,$p'; }
if wants sanitizers; then
  say "sanitizers: C++ tests under AddressSanitizer and UBSan, kernels on an emulated device, and fuzzing"
  if wants python; then start sanitizers beside sanitizers; else sanitizers; fi
fi

pytest_in() { KVQ_BIN=build/release/tools .venv/bin/python -m pytest -q -p no:cacheprovider --durations=25 "$@"; }
# The commands of documents are a fifth of the tools' tests, and run where the shorter job has ended.
python_and_documents() { pytest_in tests/python && pytest_in tests/cli/test_docs.py; }
show_python() { cat; }
show_cli() { cat; }
if wants python; then
  say "python: second reader, dump scripts, commands of all documents; beside them cli: tools"
  start python python_and_documents
  start cli pytest_in --ignore tests/cli/test_docs.py tests/cli
fi
finish_jobs
say "all steps passed"
