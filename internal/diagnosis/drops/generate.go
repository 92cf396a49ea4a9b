package drops

// The object is committed, so that a build needs no clang. `make generate` compiles it
// with clang-19, and the tests check that the result is the same. BPF_PROG reads
// arguments from the tracing context, not from registers, so the object is independent of
// the architecture.

//go:generate go tool bpf2go -cc clang-19 -strip llvm-strip-19 -target bpfel -no-global-types -type drop -type filter_prefix -type drop_path -type drop_flags -type drop_counter -type place_flags drops ../../../bpf/drops.bpf.c -- -O2 -g -mcpu=v3 -Wall -Wextra -Werror -Wno-unused-parameter -Wno-sign-compare -I/usr/include/x86_64-linux-gnu -I/usr/include/aarch64-linux-gnu
