#!/usr/bin/env bash
# Sets the environment up and runs the tests.
#
#   bash tests/run.sh                everything, then a proof that every test file ran
#   bash tests/run.sh ARGUMENTS      hands ARGUMENTS to pytest: tests/unit, -k name, -x, ...; without that proof
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

setup_extras=test
source tools/setup_environment.sh
# Every rank is a process of its own: more threads in each only get in each other's way.
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1

if [ $# -gt 0 ]; then
  result=0
  python -m pytest "$@" || result=$?
  echo "tests/run.sh: only what \"$*\" selects was run; no proof that every test file ran"
  exit "$result"
fi

report=test-results/pytest.xml
rm -f "$report"
result=0
python -m pytest --junit-xml="$report" || result=$?
python -m tests.check_all_ran "$report" || result=$((result ? result : 1))
exit "$result"
