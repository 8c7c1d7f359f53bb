# Makes the Python environment of this repository and puts it in front of PATH. To be sourced by a bash script:
#
#   setup_extras=test source tools/setup_environment.sh     with what the tests need; without setup_extras, what a run needs
#
# The active environment is used if PyTorch imports there; what it lacks is installed into it, its PyTorch stays.
# Otherwise .venv is made in the repository, with the versions of constraints.txt. Run again, it only looks.

_setup_root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

_setup_say() { printf 'set-up: %s\n' "$*" >&2; }

# Prints the Python of the active environment if it can be used: PyTorch 2.9 or newer imports, pip is there and may install.
_setup_active() {
  local python
  for python in python python3; do
    "$python" - "$_setup_root/.venv" 2>/dev/null <<'PYTHON' && return 0
import pathlib, re, sys, sysconfig

import pip, torch

if sys.version_info < (3, 11) or pathlib.Path(sys.prefix).resolve() == pathlib.Path(sys.argv[1]).resolve():
    sys.exit(1)
if tuple(map(int, re.findall(r"\d+", torch.__version__)[:2])) < (2, 9):
    sys.exit(1)
managed = pathlib.Path(sysconfig.get_path("stdlib"), "EXTERNALLY-MANAGED").exists()
if managed and sys.prefix == sys.base_prefix:
    sys.exit(1)
python = pathlib.Path(sys.executable).with_name("python")  # the name that scripts call
sys.exit(1) if not python.exists() else print(python)
PYTHON
  done
  return 1
}

# Prints a Python that is new enough to make .venv with.
_setup_base_python() {
  local python
  for python in python3 python3.14 python3.13 python3.12 python3.11 python; do
    if "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      printf '%s\n' "$python"
      return 0
    fi
  done
  _setup_say "Python 3.11 or newer is needed; python3 here is $(python3 --version 2>&1 | head -n 1)"
  return 1
}

_setup_make_venv() {
  local base
  if [ -x "$_setup_root/.venv/bin/python" ] && "$_setup_root/.venv/bin/python" -m pip --version >/dev/null 2>&1; then
    return 0
  fi
  base=$(_setup_base_python) || return 1
  _setup_say "making .venv with $("$base" --version)"
  "$base" -m venv --clear "$_setup_root/.venv" || {
    _setup_say "$base cannot make a virtual environment; on Debian and Ubuntu the package python3-venv is missing"
    return 1
  }
}

# Installs the package, in place, with its extras, unless the environment's note says that this was done already.
_setup_install() {
  local python=$1 constraints=$2 extras=${setup_extras:-} note key done_before
  note=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/megatron-set-up
  key=$(cd "$_setup_root" && pwd && cksum setup.py constraints.txt)
  for done_before in "$note-$extras"*; do # one with extras that are not asked for now is as good
    if [ -f "$done_before" ] && [ "$(cat "$done_before")" = "$key" ]; then
      return 0
    fi
  done
  _setup_say "installing into $("$python" -c 'import sys; print(sys.prefix)'): some minutes the first time"
  "$python" -m pip install --disable-pip-version-check --no-input ${constraints:+-c "$constraints"} \
    -e "$_setup_root${extras:+[$extras]}" >&2 || {
    _setup_say "pip could not install what is needed; its messages are above"
    return 1
  }
  printf '%s\n' "$key" >"$note-$extras"
}

_setup_main() {
  local python constraints=
  if ! python=$(_setup_active); then
    _setup_make_venv || return 1
    python=$_setup_root/.venv/bin/python
    constraints=$_setup_root/constraints.txt
  fi
  _setup_install "$python" "$constraints" || return 1
  PATH=$(dirname "$python"):$PATH
  export PATH
  _setup_say "$(python -c 'import sys, torch; print(f"Python {sys.version.split()[0]}, PyTorch {torch.__version__}, {sys.prefix}")')"
}

_setup_main
