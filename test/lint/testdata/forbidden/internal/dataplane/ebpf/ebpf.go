package ebpf

import _ "spillway.dev/spillway/internal/dataplane/nftables"
