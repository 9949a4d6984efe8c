#!/usr/bin/env bash
# The kernels without Python: once under AddressSanitizer and UBSan on every instruction set of this machine, and once
# (plain code, the parts with threads) under ThreadSanitizer. Needs g++ or clang++ and nothing else.
set -euo pipefail
cd "$(dirname "$0")/.."

out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
cxx=${CXX:-$(command -v g++ || command -v clang++)}
common=(-std=c++17 -O1 -g -fno-omit-frame-pointer -ffp-contract=off -Wall -Wextra -Werror -pthread)
[[ $cxx == *clang* ]] || common+=(-fno-var-tracking) # half the time, and traces still name the line

flags_for() { # instruction set flags of a file, as in CMakeLists.txt
  local avx2="-mavx2 -mfma -mf16c"
  case $1 in
    *_avx2.cpp) echo "$avx2" ;;
    *_avx512vnni.cpp) echo "$avx2 -mavx512f -mavx512vl -mavx512bw -mavx512dq -mavx512vnni -mprefer-vector-width=256" ;;
  esac
}

# commands NAME FLAGS... -- FILES...: one compiler call a file
commands() {
  local name=$1 flags=() file
  shift
  while [[ $1 != -- ]]; do flags+=("$1") && shift; done
  shift
  mkdir -p "$out/$name"
  for file in "$@"; do
    echo "$cxx ${common[*]} ${flags[*]} $(flags_for "$file") -c $file -o $out/$name/$(basename "$file").o"
  done
}

sources=() # those that take longest first
for file in kernels_*.cpp [!k]*.cpp tests/*.cpp; do
  [[ $file == bindings.cpp ]] || sources+=("$file")
done
plain=()
for file in "${sources[@]}"; do
  [[ $file == kernels_avx* ]] || plain+=("$file")
done
define=()
if [[ $(uname -m) == x86_64 ]]; then define=(-DCUTAWAY_X86); else sources=("${plain[@]}"); fi
address=(-fsanitize=address,undefined -fno-sanitize-recover=all)
thread=(-fsanitize=thread)

{
  commands address "${address[@]}" "${define[@]}" -- "${sources[@]}"
  commands thread "${thread[@]}" -- "${plain[@]}"
} | xargs -P "$(nproc)" -I{} bash -c '{}'
"$cxx" -pthread "${address[@]}" "$out"/address/*.o -o "$out/address/kernels_test"
"$cxx" -pthread "${thread[@]}" "$out"/thread/*.o -o "$out/thread/kernels_test"
printf 'built (%d s)\n' "$SECONDS"

"$out/thread/kernels_test" pool plan >"$out/thread/log" 2>&1 &
ASAN_OPTIONS=detect_leaks=1:detect_stack_use_after_return=1 "$out/address/kernels_test"
wait $! || { cat "$out/thread/log" && exit 1; }
cat "$out/thread/log"
printf 'sanitizers found nothing (%d s)\n' "$SECONDS"
