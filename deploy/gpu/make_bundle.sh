#!/usr/bin/env bash
# Packs vLLM and FlashInfer for an offline GPU machine (Hopper, Python 3.12, torch 2.11 with CUDA 13.0):
#
#   deploy/gpu/make_bundle.sh OUT
#
#   OUT/main         vLLM's Python and its sm_90 operators, FlashAttention 3, the packages that the machine lacks (pins.txt)
#                    and FlashInfer with merge_state compiled ahead, and a wheel of this project; 55 MiB
#   OUT/extra_cfat   vLLM's operators untouched, in case the thinned ones fail to load
#   OUT/extra_moe    the thinned operators for mixtures of experts
#
# Needs Python 3.12 with pip (PY312 names it), PyPI, gcc, xz and unzip; nvcc 13.0 (CUDA_HOME) for merge_state. Downloads
# and compiled files stay in WORK. On the GPU machine: deploy/gpu/bootstrap.sh OUT/main.
set -euo pipefail
readonly HERE=$(cd "$(dirname "$0")" && pwd)
[[ $# -eq 1 ]] || { echo "usage: make_bundle.sh OUT" >&2; exit 2; }
readonly OUT=$(realpath -m "$1")
readonly WORK=${WORK:-${TMPDIR:-/tmp}/gpu-bundle}
. "$HERE/../versions.sh"
. "$HERE/csrc_digest.sh"
readonly VLLM=$VLLM_VERSION FLASHINFER=${FLASHINFER_VERSION:-0.7.0.post1}
readonly CUDA=${CUDA_HOME:-/usr/local/cuda}
readonly STAGE=$WORK/stage
# What an earlier run left in WORK is used again only if it is of the same versions.
readonly WHEELS=$WORK/wheels-$(sha256sum <"$HERE/pins.txt" | cut -c1-12)
readonly CASCADE=$WORK/cascade-$FLASHINFER.so
readonly PY=${PY312:-python3.12}
"$PY" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null ||
  { echo "make_bundle: needs Python 3.12 with pip; name it with PY312" >&2; exit 1; }

say() { printf 'make_bundle: %s\n' "$*"; }
without_warnings() { "$@" 2> >(grep -v WARNING >&2 || true); }
download() { without_warnings "$PY" -m pip download -q --no-deps --only-binary=:all: -d "$@"; }

download_wheels() {
  say "wheels"
  ls "$WORK"/big/vllm-"$VLLM"-*.whl >/dev/null 2>&1 || download "$WORK/big" "vllm==$VLLM"
  ls "$WORK"/big/flashinfer_python-"$FLASHINFER"-*.whl >/dev/null 2>&1 || download "$WORK/big" "flashinfer-python==$FLASHINFER"
  [[ -f $WHEELS/.done ]] || { download "$WHEELS" -r "$HERE/pins.txt"; touch "$WHEELS/.done"; }
}

stage_vllm() {
  say "vLLM"
  local libraries=$WORK/libraries wheel
  wheel=$(ls "$WORK"/big/vllm-"$VLLM"-*.whl)
  # Leave out FlashAttention 2, which has no sm_90 code, and what only other models need.
  unzip -q -d "$STAGE/core" "$wheel" -x '*_vllm_fa2_C*' '*_vllm_fa3_C*' '*_C_stable_libtorch*' 'vllm/_flashmla*' \
    'vllm/_flashkda*' 'vllm/_deepselect*' 'vllm/_qutlass*' 'vllm/vllm-rs' 'vllm/third_party/deep_gemm/*' \
    'vllm/third_party/fmha_sm100/*' 'vllm/third_party/tml_fa4/*'
  rm -rf "$libraries"
  unzip -q -j -d "$libraries" "$wheel" vllm/_C_stable_libtorch.abi3.so vllm/_moe_C_stable_libtorch.abi3.so \
    vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so
  mkdir -p "$STAGE"/{c,moe,cfat}/vllm "$STAGE/fa3/vllm/vllm_flash_attn"
  "$PY" "$HERE/thin_fatbin.py" "$libraries/_C_stable_libtorch.abi3.so" "$STAGE/c/vllm/_C_stable_libtorch.abi3.so" >"$WORK/thin_c.log"
  "$PY" "$HERE/thin_fatbin.py" "$libraries/_moe_C_stable_libtorch.abi3.so" "$STAGE/moe/vllm/_moe_C_stable_libtorch.abi3.so" >"$WORK/thin_moe.log"
  cp "$libraries/_C_stable_libtorch.abi3.so" "$STAGE/cfat/vllm/"
  cp "$libraries/_vllm_fa3_C.abi3.so" "$STAGE/fa3/vllm/vllm_flash_attn/"
}

stage_packages() {
  say "packages that the GPU machine lacks"
  without_warnings "$PY" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$STAGE/deps" "$WHEELS"/*.whl
  # Remove voices, locales and clients, which a text model never imports.
  (
    cd "$STAGE/deps"
    rm -rf bin mistral_common/data pycountry pycountry-* anthropic anthropic-* cryptography cryptography-* supervisor \
      supervisor-* pycparser pycparser-* cffi cffi-* _cffi_backend*
    find . -name tests -type d -prune -exec rm -rf {} +
  )
}

# FlashInfer would compile merge_state at its first call. Here its sources are compiled ahead, for sm_90a.
compile_merge_state() {
  local data=$WORK/flashinfer/flashinfer/data source python_include
  python_include=$("$PY" -c 'import sysconfig; print(sysconfig.get_paths()["include"])')
  local flags=(
    "-I$data/cccl/cub" "-I$data/cccl/libcudacxx/include" "-I$data/cccl/thrust" -isystem "$python_include"
    -isystem "$CUDA/include" -isystem "$STAGE/deps/tvm_ffi/include" -isystem "$data/include" -isystem "$data/csrc"
    -isystem "$data/cutlass/include" -isystem "$data/cutlass/tools/util/include" -isystem "$data/spdlog/include"
    -DPy_LIMITED_API=0x03090000 -D_GLIBCXX_USE_CXX11_ABI=1 --compiler-options=-fPIC --expt-relaxed-constexpr
    -static-global-template-stub=false -gencode=arch=compute_90a,code=sm_90a -DFLASHINFER_ENABLE_FP8_E8M0
    -DFLASHINFER_ENABLE_FP4_E2M1 -std=c++17 -use_fast_math -Xfatbin=-compress-all -DFLASHINFER_ENABLE_F16
    -DFLASHINFER_ENABLE_BF16 -DFLASHINFER_ENABLE_FP8_E4M3 -DFLASHINFER_ENABLE_FP8_E5M2 -DNDEBUG -O3
  )
  # A machine without a GPU lacks the driver's library: an empty one of the same name satisfies the linker.
  mkdir -p "$WORK/stubs"
  echo 'int cuGetErrorString(){return 0;}' | gcc -w -xc - -shared -fPIC -Wl,-soname,libcuda.so.1 -o "$WORK/stubs/libcuda.so"
  for source in cascade flashinfer_cascade_binding; do
    "$CUDA/bin/nvcc" "${flags[@]}" -c "$data/csrc/$source.cu" -o "$WORK/$source.o"
  done
  c++ "$WORK/cascade.o" "$WORK/flashinfer_cascade_binding.o" -shared "-L$CUDA/lib64" "-L$WORK/stubs" -lcudart -lcuda \
    -o "$CASCADE"
}

stage_flashinfer() {
  say "FlashInfer"
  rm -rf "$WORK/flashinfer"
  unzip -q -d "$WORK/flashinfer" "$WORK"/big/flashinfer_python-"$FLASHINFER"-*.whl
  [[ -f $CASCADE ]] || compile_merge_state
  cp -r "$WORK"/flashinfer/flashinfer "$WORK"/flashinfer/flashinfer_python-*.dist-info "$STAGE/fi/"
  # Of 170 MB of sources, keep only those that are needed to compile merge_state again.
  (
    cd "$STAGE/fi/flashinfer/data"
    rm -rf cutlass
    find csrc -mindepth 1 -maxdepth 1 -type d -exec rm -rf {} +
    find csrc -mindepth 1 -maxdepth 1 -type f ! -name cascade.cu ! -name flashinfer_cascade_binding.cu ! -name '*.h' \
      ! -name '*.cuh' ! -name '*.hpp' -delete
    mkdir -p aot/cascade
    cp "$CASCADE" aot/cascade/cascade.so
  )
}

# The dictionary is as large as the largest part. The archives are a tenth smaller than with xz's own choice, which would
# not fit next to a checkout.
pack() { tar -C "$STAGE/$1" --sort=name --owner=0 --group=0 -cf - . | xz --lzma2=preset=9e,dict=192MiB >"$2"; }

# The project itself, with its native core compiled for Python 3.12, so that the loan spends no time on compiling it.
pack_project() {
  without_warnings "$PY" -m pip wheel -q --no-deps -w "$1" "$HERE/../.."
  csrc_digest "$HERE/../.." >"$1/csrc.sha256"
}

rm -rf "$STAGE"
mkdir -p "$WHEELS" "$WORK/big" "$STAGE"/{core,c,fa3,moe,cfat,deps,fi} "$OUT"/{main,extra_cfat,extra_moe}
download_wheels
stage_vllm
stage_packages
stage_flashinfer
say "packing"
rm -f "$OUT"/main/* "$OUT"/extra_cfat/* "$OUT"/extra_moe/*
pack c "$OUT/main/site.c.tar.xz" &
beside=$! # waited for by its id, since a plain `wait` returns 0 whatever happened
pack core "$OUT/main/site.vllm.tar.xz"
pack deps "$OUT/main/site.deps.tar.xz"
pack fi "$OUT/main/site_fi.flashinfer.tar.xz"
wait "$beside"
pack fa3 "$OUT/main/site.fa3.tar.xz" &
beside=$!
pack moe "$OUT/extra_moe/site.moe.tar.xz"
pack cfat "$OUT/extra_cfat/site.cfat.tar.xz"
wait "$beside"
pack_project "$OUT/main"
for folder in main extra_cfat extra_moe; do say "$folder: $(du -sh "$OUT/$folder" | cut -f1)"; done
