#!/usr/bin/env bash
# Builds the simulated libcudart, libcuda and operators into FOLDER, against the torch of the `python` on the PATH.
#
#   bash tests/cudasim/build.sh FOLDER
set -euo pipefail
sources=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)/src
out=${1:?the folder to build into}
objects=$out/objects
mkdir -p "$objects"
exec 9> "$out/lock" # two processes must not build in one folder at once
flock 9

site=$(python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
real=$(find "$site/nvidia" -name 'libcudart.so.13' | head -n 1)
[ -n "$real" ] || { echo "$site has no build of torch for CUDA 13" >&2; exit 1; }
soname=$(basename "$real")
include=$(dirname "$(find "$site/nvidia" -name cuda_runtime_api.h | head -n 1)")
compile=(g++ -std=c++20 -g -fPIC -pthread -Wall -Wextra -I"$include")

outdated() { # TARGET SOURCE...
  local target=$1 source
  shift
  for source in "$@"; do [ "$target" -nt "$source" ] || return 0; done
  return 1
}

for name in engine runtime driver; do
  object=$objects/$name.o
  if outdated "$object" "$sources/$name.cpp" "$sources/engine.hpp"; then
    "${compile[@]}" -O2 -c "$sources/$name.cpp" -o "$object"
  fi
done

# A function that the real library exports and the simulator lacks says so on stderr and returns cudaErrorNotSupported
# (801): torch loads, and a test that needs the function fails with its name.
exported() { nm "$@" --defined-only | awk '$2 == "T" {sub(/@.*/, "", $3); print $3}' | sort -u; }
if outdated "$out/$soname" "$objects/engine.o" "$objects/runtime.o" "$real"; then
  exported -D "$real" > "$objects/real.txt"
  exported "$objects/runtime.o" | grep -E '^(__)?cuda' > "$objects/simulated.txt"
  {
    printf '#include <stdio.h>\n'
    printf 'static int lacks(const char *name) { fprintf(stderr, "cudasim: not simulated: %%s\\n", name); return 801; }\n'
    comm -23 "$objects/real.txt" "$objects/simulated.txt" | sed 's/.*/int &(void) { return lacks("&"); }/'
  } > "$objects/stubs.c"
  gcc -O1 -fPIC -w -c "$objects/stubs.c" -o "$objects/stubs.o"
  # torch asks for the functions by the version of the real library, which is its soname.
  echo "$soname { global: cuda*; __cuda*; local: *; };" > "$objects/versions"
  g++ -shared -pthread -o "$out/$soname" "$objects/engine.o" "$objects/runtime.o" "$objects/stubs.o" \
    -Wl,-soname,"$soname" -Wl,--version-script,"$objects/versions" -ldl
fi

# Libraries of torch are linked against many more functions of libcuda than they call.
if outdated "$out/libcuda.so.1" "$objects/driver.o" "$out/$soname"; then
  exported "$objects/driver.o" > "$objects/driver.txt"
  find "$site/torch/lib" "$site/nvidia" -name '*.so*' -type f -exec nm -D --undefined-only {} + 2> /dev/null |
    awk '$1 == "U" && $2 ~ /^cu[A-Z]/ && $2 !~ /^cuFile/ {sub(/@.*/, "", $2); print $2}' | sort -u > "$objects/wanted.txt"
  comm -23 "$objects/wanted.txt" "$objects/driver.txt" |
    sed 's/.*/int &(void) { return 801; }/' > "$objects/driver_stubs.c"
  gcc -O1 -fPIC -w -c "$objects/driver_stubs.c" -o "$objects/driver_stubs.o"
  g++ -shared -o "$out/libcuda.so.1" "$objects/driver.o" "$objects/driver_stubs.o" "$out/$soname" \
    -Wl,-soname,libcuda.so.1
fi

if outdated "$out/libcudasim_operators.so" "$sources/operators.cpp" "$site/torch/version.py"; then
  g++ -std=c++20 -O1 -fPIC -pthread -shared -I"$include" -I"$site/torch/include" \
    -I"$site/torch/include/torch/csrc/api/include" "$sources/operators.cpp" -o "$out/libcudasim_operators.so" \
    -L"$site/torch/lib" -Wl,--no-as-needed -ltorch_cpu -lc10 -lc10_cuda "$out/$soname" -Wl,-rpath,"$site/torch/lib"
fi

# torch imports what the entry points of `torch.backends` name: every process, children included, calls cudasim.load().
metadata=$out/python/cudasim-1.0.dist-info
mkdir -p "$metadata"
printf 'Metadata-Version: 2.1\nName: cudasim\nVersion: 1.0\n' > "$metadata/METADATA"
printf '[torch.backends]\ncudasim = cudasim:load\n' > "$metadata/entry_points.txt"
