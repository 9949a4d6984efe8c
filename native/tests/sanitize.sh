#!/usr/bin/env bash
# The kernels without Python: once under AddressSanitizer and UBSan on every instruction set of this machine, and once
# (plain code, the parts with threads) under ThreadSanitizer. Needs g++ or clang++ and nothing else.
set -euo pipefail
cd "$(dirname "$0")/.."

out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
cxx=${CXX:-$(command -v g++ || command -v clang++)}
common=(-std=c++17 -g -fno-omit-frame-pointer -ffp-contract=off -Wall -Wextra -Werror -pthread)
jobs=$(nproc)

flags_for() { # instruction set flags of a file, as in CMakeLists.txt
  local avx2="-mavx2 -mfma -mf16c"
  case $1 in
    *_avx2.cpp) echo "$avx2" ;;
    *_avx512vnni.cpp) echo "$avx2 -mavx512f -mavx512vl -mavx512bw -mavx512dq -mavx512vnni -mprefer-vector-width=256" ;;
  esac
}

# build NAME FLAGS... -- FILES...: one compiler call a file, as many at once as there are processors
build() {
  local name=$1 flags=() objects=() file
  shift
  while [[ $1 != -- ]]; do flags+=("$1") && shift; done
  shift
  mkdir -p "$out/$name"
  for file in "$@"; do
    echo "$cxx ${common[*]} ${flags[*]} $(flags_for "$file") -c $file -o $out/$name/$(basename "$file").o"
  done | xargs -P "$jobs" -I{} bash -c '{}'
  for file in "$@"; do objects+=("$out/$name/$(basename "$file").o"); done
  "$cxx" "${common[@]}" "${flags[@]}" "${objects[@]}" -o "$out/$name/kernels_test"
}

sources=()
for file in *.cpp; do
  [[ $file == bindings.cpp ]] || sources+=("$file")
done
plain=()
for file in "${sources[@]}"; do
  [[ $file == kernels_avx* ]] || plain+=("$file")
done
define=()
if [[ $(uname -m) == x86_64 ]]; then define=(-DCUTAWAY_X86); else sources=("${plain[@]}"); fi

build address -O1 -fsanitize=address,undefined -fno-sanitize-recover=all "${define[@]}" -- "${sources[@]}" tests/*.cpp
ASAN_OPTIONS=detect_leaks=1:detect_stack_use_after_return=1 "$out/address/kernels_test"

build thread -O1 -fsanitize=thread -- "${plain[@]}" tests/*.cpp
"$out/thread/kernels_test" pool plan
printf 'sanitizers found nothing (%d s)\n' "$SECONDS"
