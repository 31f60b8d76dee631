#!/usr/bin/env bash
# Installs the servers that `make bench-peers` compares with into a folder, each by itself, and goes on where one cannot
# be had here: what is missing at the end is what the benchmark skips.
#
# usage: scripts/peers.sh DEST_DIR
#
# llama.cpp is built for this machine from the sources inside the Python package llama-cpp-python.
set -uo pipefail
DEST=$1
HERE=$(cd "$(dirname "$0")" && pwd)
MODEL=$HERE/../models/SmolLM2-135M-Instruct/SmolLM2-135M-Instruct.Q4_1.gguf
LLAMA_VERSION=0.3.36
mkdir -p "$DEST"

llama() {
  local dir=$DEST/llama.cpp
  if [ ! -x "$dir/bin/llama-server" ]; then
    rm -rf "$dir.part" && mkdir -p "$dir.part"
    python3 -m venv "$dir.part/tools" && "$dir.part/tools/bin/pip" install --quiet cmake >&2 || return 1
    local PATH=$dir.part/tools/bin:$PATH
    pip download --quiet --no-deps --no-binary llama-cpp-python --dest "$dir.part" "llama-cpp-python==$LLAMA_VERSION" >&2 ||
      return 1
    tar -xzf "$dir.part"/llama_cpp_python-*.tar.gz -C "$dir.part" --strip-components 1 || return 1
    cmake -S "$dir.part/vendor/llama.cpp" -B "$dir.part/build" -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON \
      -DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF -DBUILD_SHARED_LIBS=OFF \
      -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF >&2 || return 1
    cmake --build "$dir.part/build" --target llama-server llama-quantize --parallel "$(nproc)" >&2 || return 1
    mkdir -p "$dir/bin" && cp "$dir.part"/build/bin/llama-{server,quantize} "$dir/bin/" && rm -rf "$dir.part"
  fi
  # The same weights in bfloat16.
  [ -f "$dir/bin/bf16.gguf" ] ||
    "$dir/bin/llama-quantize" --allow-requantize "$MODEL" "$dir/bin/bf16.gguf" BF16 >&2
}

llama || { rm -rf "$DEST/llama.cpp.part"; echo "llama.cpp cannot be installed here; it is skipped" >&2; }
