#!/usr/bin/env bash
# Builds a CPU-only libtorch folder from the Python package torch, once.
#
# usage: scripts/libtorch.sh DEST
#
# The wheel's libtorch_cpu.so wants libcudart and libcupti (its profiler). Stub
# libraries with the right names satisfy the loader; nothing ever calls them. A
# stub must never meet the real CUDA backend: for --device cuda point LIBTORCH at
# a complete libtorch instead (docs/devices.md).
set -euo pipefail
VERSION=2.11.0
DEST=$1
HERE=$(cd "$(dirname "$0")" && pwd)
CACHE=${DRAFTHORSE_CACHE:-$HERE/../.cache}

if [ "$(cat "$DEST/build-version" 2>/dev/null || true)" = "$VERSION+cpu" ]; then exit 0; fi
for tool in python3 cc nm; do
  command -v "$tool" >/dev/null || { echo "libtorch.sh needs $tool" >&2; exit 1; }
done

# The C++ libraries are the same in the wheel of every Python version; take one.
HASH=7aa2f9bbc6d4595ba72138026b2074be1233186150e9292865e04b7a63b8c67a
echo "libtorch: fetching torch $VERSION (530 MB, once)" >&2
WHEEL=$(python3 "$HERE/fetch.py" torch "$VERSION" "$HASH" "$CACHE" \
  --python-version 3.11 --implementation cp --abi cp311 --platform manylinux_2_28_x86_64)

TMP=$(mktemp -d "$(dirname "$DEST")/.libtorch.XXXXXX")
trap 'rm -rf "$TMP"' EXIT
echo "libtorch: unpacking" >&2
python3 - "$WHEEL" "$TMP" <<'P'
import sys, zipfile
wheel, dest = sys.argv[1:3]
keep = {"torch/lib/libtorch_cpu.so", "torch/lib/libc10.so", "torch/lib/libgomp.so.1"}
with zipfile.ZipFile(wheel) as z:
    for name in z.namelist():
        if name in keep or name.startswith("torch/include/") or "dist-info/licenses/" in name:
            z.extract(name, dest)
P
mkdir -p "$TMP/lib"
mv "$TMP"/torch/lib/* "$TMP/lib/"
mv "$TMP/torch/include" "$TMP/include"
mv "$TMP"/torch-*.dist-info/licenses "$TMP/licenses" 2>/dev/null || true
rm -rf "$TMP/torch" "$TMP"/torch-*.dist-info
# tch passes -ltorch; the wheel's own libtorch.so would pull in the CUDA backend.
echo 'INPUT(libtorch_cpu.so)' > "$TMP/lib/libtorch.so"
ln -s libgomp.so.1 "$TMP/lib/libgomp.so"
for lib in cudart cupti; do
  nm -D --undefined-only "$TMP/lib/libtorch_cpu.so" |
    awk -v node="@lib$lib.so.13" 'index($2, node) { sub(/@.*/, "", $2); print "int " $2 "(void) { return 999; }" }' > "$TMP/$lib.c"
  echo "lib$lib.so.13 { global: *; };" > "$TMP/$lib.map"
  cc -shared -fPIC -O1 -o "$TMP/lib/lib$lib.so.13" -Wl,-soname,"lib$lib.so.13" \
    -Wl,--version-script,"$TMP/$lib.map" "$TMP/$lib.c"
  rm "$TMP/$lib.c" "$TMP/$lib.map"
done
echo "$VERSION+cpu" > "$TMP/build-version"
rm -rf "$DEST"
mv "$TMP" "$DEST"
trap - EXIT
echo "libtorch: ready in $DEST" >&2
