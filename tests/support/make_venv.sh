#!/usr/bin/env bash
# Makes the development environment in the folder $1 from Python 3.11+, pip and the package registries.
# Every package is checked against its hash in requirements.lock; uv, the installer, too.
set -euo pipefail
venv=$1
cd "$(dirname "$0")/../.."
[ -n "${PYTHON:-}" ] || { echo "Tuskline needs Python 3.11 or newer on PATH (or: make PYTHON=/path/to/python venv)" >&2; exit 1; }
say() { printf '\033[1m[%s]\033[0m %s\n' "$(date +%H:%M:%S)" "$*"; }

if [ ! -x "$venv/bin/python" ]; then
  say "environment: $("$PYTHON" --version) -> $venv"
  rm -rf "$venv"
  if "$PYTHON" -m pip --version >/dev/null 2>&1; then
    "$PYTHON" -m venv --without-pip "$venv"
  else
    "$PYTHON" -m venv "$venv" # a Python whose pip comes with the environment
  fi
fi
if "$PYTHON" -m pip --version >/dev/null 2>&1; then
  pip=("$PYTHON" -m pip --python "$venv/bin/python")
else
  pip=("$venv/bin/python" -m pip)
fi

say "installer: uv, by its hash"
one=$(mktemp)
trap 'rm -f "$one"' EXIT
awk '/^uv==/ {take = 1} take {print} take && !/\\$/ {exit}' requirements.lock >"$one"
"${pip[@]}" install --quiet --disable-pip-version-check --require-hashes -r "$one"

# A machine that reaches its registries through pip's settings reaches them through uv as well.
setting() { "${pip[@]}" config get "global.$1" 2>/dev/null || true; }
export UV_DEFAULT_INDEX=${UV_DEFAULT_INDEX:-${PIP_INDEX_URL:-$(setting index-url)}}
[ -n "$UV_DEFAULT_INDEX" ] || unset UV_DEFAULT_INDEX
export SSL_CERT_FILE=${SSL_CERT_FILE:-${PIP_CERT:-$(setting cert)}}
[ -n "$SSL_CERT_FILE" ] || unset SSL_CERT_FILE
export UV_HTTP_TIMEOUT=${UV_HTTP_TIMEOUT:-300}

say "packages: $(grep -c '==' requirements.lock) by their hashes"
# Compiled once, here: where PYTHONDONTWRITEBYTECODE is set, each process would compile all that it imports at its start.
"$venv/bin/uv" pip install --python "$venv/bin/python" --compile-bytecode --require-hashes -r requirements.lock
say "Spark Connect's client, in a folder of its own: pandas is among its packages, and slows every Python worker that has it"
"$venv/bin/uv" pip install --python "$venv/bin/python" --target "$venv/connect" --no-deps --compile-bytecode --require-hashes --quiet \
  -r requirements-connect.lock
say "the project itself"
"$venv/bin/uv" pip install --python "$venv/bin/python" --no-deps --no-build-isolation --quiet --editable .
say "Spark's jars"
"$venv/bin/python" -m spark_consumers.spark.jars >/dev/null
say "ready"
