#!/usr/bin/env bash
# Runs parts of the GPU check side by side, on a machine that is lent for minutes:
#
#   deploy/gpu/bootstrap.sh BUNDLE && . /tmp/site/env.sh && deploy/gpu/lease.sh SECONDS OUT PART…
#
#   answers   gpu_serving's cases with graphs, which compile longest
#   exact     all other cases, in float32
#   fits      gpu_timing with everything on the device, at Llama-3.1-8B's 32 layers: resident rows against FLASH_ATTN
#   cut       gpu_timing with a device budget that the contexts exceed, 8 layers, 32K and 128K tokens
#   tests     the kernels' tests
#   kernels   the kernels' benchmark; run it alone, since anything at the same time would be timed too
#
# After SECONDS all parts are ended, and OUT/logs.tgz has their output and what they measured until then. The sides of
# `fits` and `cut` start at once, and are timed in turns after all other parts have ended.
set -euo pipefail
[[ $# -ge 3 ]] || { echo "usage: lease.sh SECONDS OUT PART…" >&2; exit 2; }
readonly ENDS=$((SECONDS + $1)) OUT=$(realpath -m "$2")
readonly LOGS=$(mktemp -d)/logs ROOT=$(cd "$(dirname "$0")/../.." && pwd)
readonly PYTHON=${PYTHON:-python3}
shift 2
for name in "$@"; do
  case $name in answers | exact | fits | cut | tests | kernels) ;; *) echo "lease: $name: no such part" >&2; exit 2 ;; esac
done
export PYTHONUNBUFFERED=1
mkdir -p "$OUT" "$LOGS"
cd "$ROOT"

run() { # NAME SECONDS_BEFORE_THE_END COMMAND…
  local name=$1 left=$((ENDS - SECONDS - $2)) begun=$SECONDS code=0
  shift 2
  timeout -k 3 "$left" "$@" >"$LOGS/$name.log" 2>&1 9>&- || code=$?
  echo "$name: status $code after $((SECONDS - begun)) s"
}

serving() { # NAME ARGUMENTS…
  local name=$1
  shift
  run "$name" 15 "$PYTHON" -m benchmarks.gpu_serving "$@" --timeout "$((ENDS - SECONDS - 25))" --logs "$LOGS/$name"
}

timing() { # NAME OPTIONS…
  local name=$1
  shift
  run "$name" 4 "$PYTHON" -m benchmarks.gpu_timing --overlap --turn "$LOGS/turn" --side-timeout $((ENDS - SECONDS - 25)) \
    --logs "$LOGS/$name" --out "$LOGS/gpu-timing-$name.json" "$@"
}

part() {
  case $1 in
    answers) serving answers graphs ranked_graphs --jobs 4 ;;
    exact)
      serving exact dense resident ranked ranked_threshold threshold shared salient predicted small_pool runner_v1 \
        --dtype float32 --baseline TRITON_ATTN --jobs 12
      ;;
    fits)
      timing fits --layers 32 --device-gib 12 --sides baseline,resident --cases 8Kx1,8Kx8 --rounds 2 --profile resident
      ;;
    cut)
      timing cut --layers 8 --device-gib 1 --sides baseline,ranked,fixed --cases 32Kx4,128Kx4 --rounds 1 --tokens 24 \
        --profile ranked,fixed
      ;;
    tests) run tests 10 env TRITON_INTERPRET=0 "$PYTHON" -m pytest -m gpu -q -n 8 tests/kernels ;;
    kernels) run kernels 10 "$PYTHON" -m benchmarks.kernels.device_kernels --out "$LOGS/device_kernels.json" ;;
  esac
}

# The timed sides wait for the lock, which this shell holds while the other parts run.
exec 9>>"$LOGS/turn"
flock 9
timed=() first=()
for name in "$@"; do
  part_pids=first
  [[ $name != fits && $name != cut ]] || part_pids=timed
  part "$name" &
  declare -n pids=$part_pids
  pids+=($!)
  unset -n pids
done
for pid in ${first[@]+"${first[@]}"}; do wait "$pid" || true; done
flock -u 9
for pid in ${timed[@]+"${timed[@]}"}; do wait "$pid" || true; done

for log in "$LOGS"/*.log; do
  echo "== $(basename "$log" .log)"
  grep -E '^\||(ok|WRONG.*)$|kept in|passed|failed' "$log" | tail -n 14 || true
done
tail -n 3 "$LOGS"/*/*.jsonl 2>/dev/null | cut -c1-300 || true
tar -C "$(dirname "$LOGS")" -czf "$OUT/logs.tgz" --exclude='*.safetensors' logs
echo "lease: $OUT/logs.tgz after $SECONDS s"
