#!/usr/bin/env bash
# Makes an offline GPU machine ready with what make_bundle.sh packed:
#
#   deploy/gpu/bootstrap.sh BUNDLE && . /tmp/site/env.sh && make gpu-check GPU_PYTHON=python3
#
# Unpacks every BUNDLE/site*.tar.xz, installs this project from BUNDLE's wheel (without one it compiles the native core),
# and writes /tmp/site/env.sh. Without a bundle it makes only the project ready: the tests and benchmarks of the kernels
# need no vLLM. DEST is /tmp unless it is set.
set -euo pipefail
readonly ROOT=$(cd "$(dirname "$0")/../.." && pwd)
. "$ROOT/deploy/gpu/csrc_digest.sh"
readonly DEST=${DEST:-/tmp}
readonly PYTHON=${PYTHON:-python3}
readonly SITE=$DEST/site

unpack() {
  "$PYTHON" -c 'import sys, tarfile; tarfile.open(sys.argv[1], "r:xz").extractall(sys.argv[2], filter="fully_trusted")' "$@"
}

unpack_all() {
  local archive folder pid pids=()
  for archive in "$1"/site*.tar.xz; do
    [[ -e $archive ]] || { echo "bootstrap: $1: holds no site*.tar.xz" >&2; exit 1; }
    folder=$DEST/$(basename "$archive" | cut -d. -f1)
    mkdir -p "$folder"
    unpack "$archive" "$folder" &
    pids+=($!)
  done
  for pid in "${pids[@]}"; do wait "$pid"; done
}

# A wheel's native core takes the place of the checkout's, so it must be made of the same sources.
check_wheel() {
  if [[ $(cat "$1/csrc.sha256") != $(csrc_digest "$ROOT") ]]; then
    echo "bootstrap: $1: its native core is not of this checkout's csrc; make the bundle again" >&2
    exit 1
  fi
}

# The project itself: vLLM finds it by its .dist-info in SITE, and the checkout runs with the same native core. The package
# in SITE is a link to the checkout, which may have changed since the wheel was made.
install_project() {
  local wheel=
  if [[ $# -gt 0 ]]; then wheel=$(find "$1" -name 'vllm_hybrid_sparse-*.whl' | head -1); fi
  rm -rf "$SITE/vllm_hybrid_sparse" # the link of an earlier run, which pip would not replace
  "$PYTHON" -m pip install --quiet --no-deps --no-build-isolation --no-index --upgrade --target "$SITE" "${wheel:-$ROOT}"
  cp "$SITE"/vllm_hybrid_sparse/_native*.so "$ROOT/vllm_hybrid_sparse/"
  rm -rf "$SITE/vllm_hybrid_sparse"
  ln -s "$ROOT/vllm_hybrid_sparse" "$SITE/vllm_hybrid_sparse"
}

write_environment() {
  cat >"$SITE/env.sh" <<X
export PYTHONPATH=$SITE:$DEST/site_fi\${PYTHONPATH:+:\$PYTHONPATH}
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1
# FlashInfer's sampler would be compiled at run time.
export VLLM_USE_FLASHINFER_SAMPLER=0 FLASHINFER_DISABLE_VERSION_CHECK=1
export VLLM_CACHE_ROOT=\${VLLM_CACHE_ROOT:-$DEST/vllm_cache}
X
}

mkdir -p "$SITE"
if [[ $# -gt 0 ]]; then
  check_wheel "$1"
  unpack_all "$1"
fi
echo "bootstrap: unpacked after $SECONDS s"
install_project "$@"
"$PYTHON" -m compileall -q -j 0 "$SITE" "$DEST/site_fi" >/dev/null 2>&1 || true # else every process that starts at the same time does it
write_environment
echo "bootstrap: ready after $SECONDS s; now: . $SITE/env.sh"
