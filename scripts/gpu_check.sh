#!/usr/bin/env bash
# Runs all checks that need a GPU: tests, self-tests of artifacts of every method, compute-sanitizer, benchmark targets.
# Prints a table at the end.
set -euo pipefail

usage() {
  cat <<'TEXT'
usage: scripts/gpu_check.sh [--bin DIR] [--out DIR] [--sdpa PYTHON]

Runs kvq-test-gpu, kvq-selftest for the sample calibrated by every method, a part of kvq-test-gpu under
compute-sanitizer's four tools, and kvq-bench targets.

  --bin DIR      take kvq-test-gpu, kvq-bench, kvq-calibrate and kvq-selftest from DIR; otherwise they are built with
                 nvcc
  --out DIR      logs and targets.json go there [build/gpu_check]
  --sdpa PYTHON  compare with the PyTorch of this interpreter too

Exit code: 0 all passed (missed targets are shown, but fail nothing), 2 wrong flags, 5 no GPU here, 6 something failed.
TEXT
}

bin="" out="" sdpa=()
while (($#)); do
  case $1 in
    -h | --help) usage; exit 0 ;;
    --bin | --out | --sdpa)
      (($# > 1)) || { echo "gpu_check.sh: error: $1 needs a value" >&2; exit 2; }
      case $1 in --bin) bin=$2 ;; --out) out=$2 ;; *) sdpa=(--sdpa "$2") ;; esac
      shift 2 ;;
    *) echo "gpu_check.sh: error: unknown argument $1; see --help" >&2; exit 2 ;;
  esac
done
root=$(cd "$(dirname "$0")/.." && pwd)
out=${out:-$root/build/gpu_check}

gpu=$(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>/dev/null | head -n 1) || gpu=""
if [[ -z $gpu ]]; then
  echo "gpu_check.sh: error: no GPU here: nvidia-smi finds none" >&2
  exit 5
fi
mkdir -p "$out"

names=() results=() seconds=() failed=0
# step NAME COMMAND...: runs the command with its output in a log; if the command fails, shows the end of the log.
step() {
  local name=$1 log="$out/${1// /_}.log" begin=$SECONDS result=pass
  shift
  if ! "$@" >"$log" 2>&1; then
    result=FAIL failed=1
    printf '%s failed, last lines of %s:\n' "$name" "$log" >&2
    tail -n 15 "$log" >&2
  fi
  names+=("$name") results+=("$result") seconds+=($((SECONDS - begin)))
}

build() {
  cmake -S "$root" --preset cuda -DKVQ_TESTS=ON &&
    cmake --build "$root/build/cuda" --target kvq-test-gpu kvq-bench kvq-calibrate kvq-selftest
}
# Flags of kvq-calibrate: every method, and every kind of codes in pages.
calibrations=(
  "--method oscar"
  "--method oscar --composition uh --group-size 128"
  "--method oscar --codebook lloyd-max"
  "--method oscar --zero integer"
  "--method quarot --coder symmetric --center kv"
  "--method saw-int4"
  "--method saw-int4 --hessian consistent"
  "--method saw-int4 --transform balanced"
  "--method saw-int4 --kmeans 64"
  "--method saw-int4 --kmeans 300"
  "--method tq-mse --bits 2"
  "--method tq-mse --bits 3"
  "--method tq-mse --bits 4"
  "--method block-gtq --bits 2"
  "--method block-gtq --bits 3"
  "--method block-gtq --bits 3 --joint"
  "--method kvq --budget-bits 2"
  "--method kvq --budget-bits 2.5"
  "--method kvq --target free"
)
selftests() {
  local line flags type artifact=$out/selftest.safetensors
  for line in "${calibrations[@]}"; do
    echo "kvq-calibrate $line"
    read -ra flags <<<"$line"
    "$bin/kvq-calibrate" "$root/sample_data/calibration.h5" --quiet --layers 4 --output "$artifact" "${flags[@]}" ||
      return 1
    for type in bf16 fp16; do "$bin/kvq-selftest" "$artifact" --activation $type || return 1; done
  done
}
find_sanitizer() {
  command -v compute-sanitizer || ls /usr/local/cuda*/bin/compute-sanitizer 2>/dev/null | head -n 1
}
# Small cases of all kernels: an instrumented kernel is slow.
selection='[sanitizer],Tokens go where the slot mapping says*,A captured call replays*'
# Of these, pages are never full, so that copies of whole tiles read bytes that no kernel wrote and none uses.
engine_selection='[faults],A random life*,Write and decode wait*'
sanitize() {
  local sanitizer
  sanitizer=$(find_sanitizer)
  [[ -n $sanitizer ]] || { echo "compute-sanitizer is not installed"; return 1; }
  local more=() cases=$selection
  if [[ $1 == synccheck ]]; then more=(--num-cuda-barriers 65536); fi  # its table holds fewer than kernels have
  if [[ $1 == memcheck ]]; then cases+=,$engine_selection; fi
  "$sanitizer" --tool "$1" "${more[@]}" --error-exitcode 9 "$bin/kvq-test-gpu" "$cases"
}

if [[ -z $bin ]]; then
  step "build" build
  tests=$root/build/cuda/tests tools=$root/build/cuda/tools bin=$out/bin
  mkdir -p "$bin"
  ln -sf "$tests/kvq-test-gpu" "$tools/kvq-bench" "$tools/kvq-calibrate" "$tools/kvq-selftest" "$bin/"
fi
step "tests" "$bin/kvq-test-gpu"
step "selftest" selftests
for tool in memcheck racecheck initcheck synccheck; do step "$tool" sanitize "$tool"; done
step "bench" "$bin/kvq-bench" targets --quiet "${sdpa[@]}" --output "$out/targets.json"

if [[ -f $out/bench.log ]]; then cat "$out/bench.log"; fi
printf '\n%s\n%-10s  %-6s  %7s\n' "$gpu" check result seconds
for i in "${!names[@]}"; do printf '%-10s  %-6s  %7s\n' "${names[i]}" "${results[i]}" "${seconds[i]}"; done
exit $((failed ? 6 : 0))
