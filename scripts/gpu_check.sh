#!/usr/bin/env bash
# Everything of the CUDA engine that needs a GPU: kernels against their references, training against the CPU, a table last.
# Runs the code of this folder with python3 as it is, and fetches nothing.
#
#   scripts/gpu_check.sh [--ops | --training] [--sanitizer] [--measure] [--logs FOLDER] [further arguments of pytest]
#
# --measure: then tables of krnl bench that need nothing but KRNL, under their gate. Tests stop at the first failure of
# each part, unless told otherwise: --maxfail=20. KRNL_TEST_EXAMPLES sets how many calls of each op are drawn (40).
set -uo pipefail
cd "$(dirname "$0")/.."

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
logs=$work
tests=(tests/test_cuda_ops.py tests/test_cuda_training.py)
sanitizer=
tables=()
rest=()
while [ $# -gt 0 ]; do
  case "$1" in
    --ops) tests=(tests/test_cuda_ops.py) ;;
    --training) tests=(tests/test_cuda_training.py) ;;
    --sanitizer) sanitizer=yes ;;
    --measure) tables=(step layer attention shapes) ;;
    --logs)
      logs=${2:?--logs wants a folder}
      mkdir -p "$logs" || exit 2
      shift
      ;;
    *) rest+=("$1") ;;
  esac
  shift
done
export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}"
lines=()
failed=0

# part NAME COMMAND...: runs it, and notes how it ended and how long it took.
part() {
  local name=$1 start=$SECONDS log="$logs/${#lines[@]}.log" result=pass
  shift
  echo "== $name"
  "$@" >"$log" 2>&1 || result=FAIL
  lines+=("$result  $name  $((SECONDS - start)) s  $(tail -n 1 "$log")")
  [[ $result = pass && $name = "krnl bench "* ]] && cat "$log"
  [ $result = pass ] && return
  failed=1
  tail -n 60 "$log"
}

cpu_library() {
  ls src/krnl/kernels/cpu/*.so >/dev/null 2>&1 && return
  cmake -S . -B "$work/build" -DCMAKE_BUILD_TYPE=Release &&
    cmake --build "$work/build" --parallel &&
    cp "$work"/build/krnl_cpu_*.so src/krnl/kernels/cpu/
}

# All at once, on all cores; a test then finds what it needs.
compiled() {
  python3 - <<'PYTHON'
import sys

sys.path.insert(0, "tests")
from cuda_device import cuda
from test_cuda_compile import launches

backend = cuda()
wanted = [launch for made in launches(backend._gpu.capability).values() for launch in made]
backend._launcher.prepare(wanted)
print(f"{len(wanted)} launches for {backend.device_name}, {backend.driver}")
PYTHON
}

checked() {
  # Libraries newer than those of the ordinary tests may announce changes.
  python3 -m pytest -x -q -p no:cacheprovider -p no:benchmark -W default::DeprecationWarning "$@"
}

# A call of each op on ragged sizes, slowly, with every access watched.
watched() {
  compute-sanitizer --tool "$1" --error-exitcode 9 --launch-timeout 60 \
    python3 -m pytest -x -q -p no:cacheprovider -p no:benchmark tests/test_cuda_ops.py -k sanitizer
}

part "CPU library" cpu_library
part "kernels compiled and loaded" compiled
for test in "${tests[@]}"; do
  part "$test" checked "$test" ${rest[@]+"${rest[@]}"}
done
if [ -n "$sanitizer" ]; then
  if command -v compute-sanitizer >/dev/null; then
    for tool in memcheck racecheck synccheck; do
      part "compute-sanitizer $tool" watched "$tool"
    done
  else
    lines+=("skip  compute-sanitizer is not here")
  fi
fi
for table in ${tables[@]+"${tables[@]}"}; do
  part "krnl bench $table" python3 -m krnl bench "$table" --device cuda
done

echo
nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader || true
printf '%s\n' "${lines[@]}"
exit "$failed"
