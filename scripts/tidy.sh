#!/usr/bin/env bash
# Checks what the compiler does not: file sizes, a purpose on every module's first line, and that the process
# crates depend on proto alone.
#
# usage: scripts/tidy.sh
set -euo pipefail
cd "$(dirname "$0")/.."
bad=0
complain() { echo "tidy: $*" >&2; bad=1; }

while read -r file; do
  lines=$(wc -l < "$file")
  [ "$lines" -le 500 ] || complain "$file has $lines lines, more than 500"
  case $file in
    */build.rs | */examples/*) ;;
    *) head -n 1 "$file" | grep -q '^//!' || complain "$file does not begin with //! and its purpose" ;;
  esac
done < <(git ls-files '*.rs')

for crate in tokenizer-proc scheduler-proc detokenizer-proc launcher; do
  others=$(sed '/^\[dev-dependencies\]/,$d' "$crate/Cargo.toml" |
    grep -oE '^(tokenizer-proc|scheduler-proc|detokenizer-proc|launcher)\.workspace' || true)
  [ -z "$others" ] || complain "$crate depends on $others: process crates depend on proto alone"
done
if git grep -lE '\btch::' -- '*.rs' ':!scheduler-proc/src/engine*' ':!scheduler-proc/benches' ':!scheduler-proc/tests'; then
  complain "tch is used outside scheduler-proc/src/engine"
fi
exit $bad
