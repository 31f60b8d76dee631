#!/usr/bin/env bash
# Makes sure that the tools which the build cannot bring along are there, or says what to install.
#
# usage: scripts/prerequisites.sh
set -euo pipefail

missing=()
command -v cc >/dev/null && command -v c++ >/dev/null && command -v nm >/dev/null || missing+=(g++)
command -v python3 >/dev/null || missing+=(python3)
python3 -m pip --version >/dev/null 2>&1 || missing+=(python3-pip)
python3 -c 'import ensurepip' 2>/dev/null || missing+=(python3-venv)

if [ ${#missing[@]} -gt 0 ]; then
  if command -v apt-get >/dev/null && [ "$(id -u)" = 0 ]; then
    echo "installing ${missing[*]}" >&2
    apt-get update -qq >&2
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >&2
  else
    echo "please install: ${missing[*]}   (on Debian or Ubuntu: sudo apt-get install ${missing[*]})" >&2
    exit 1
  fi
fi

command -v cargo >/dev/null || {
  echo "cargo is missing: install Rust from https://rustup.rs (1.95 or later)" >&2
  exit 1
}
