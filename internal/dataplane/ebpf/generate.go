package ebpf

// The objects are committed, so that a build needs no clang. `make generate` compiles
// them with clang-19, and the tests check that the result is the same. The programs do
// not depend on the architecture.

//go:generate go tool bpf2go -cc clang-19 -strip llvm-strip-19 -target bpfel -no-global-types -type addr -type tuple -type frontend_key -type frontend -type service -type slot_key -type backend -type range_key -type flow -type pod -type addr_key -type uplink -type settings -type affinity_key -type affinity -type socket_key -type socket_peer -type fragment_key -type fragment -type frontend_flags -type backend_flags -type flow_flags -type tcp_side -type icmp_rate -type flow_state -type flow_end -type request_progress -type pod_flags -type node_addr_flags -type settings_flags -type service_flags -type flow_helper -type untracked_port -type untracked_rule -type untracked_pod_key -type untracked_peers -type feature -type route -type sctp_timeout -type verdict -type event -type event_kind -type event_end -type event_count -type traffic -type service_counts -type refusal_key -type outcome -type load tc ../../../bpf/tc.bpf.c -- -O2 -g -mcpu=v3 -Wall -Wextra -Werror -Wno-unused-parameter -Wno-sign-compare -I/usr/include/x86_64-linux-gnu -I/usr/include/aarch64-linux-gnu
//go:generate go tool bpf2go -cc clang-19 -strip llvm-strip-19 -target bpfel -no-global-types -type lost_socket sock ../../../bpf/sock.bpf.c -- -O2 -g -mcpu=v3 -Wall -Wextra -Werror -Wno-unused-parameter -Wno-sign-compare -I/usr/include/x86_64-linux-gnu -I/usr/include/aarch64-linux-gnu
