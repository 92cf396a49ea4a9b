package reconcile

import (
	_ "spillway.dev/spillway/internal/dataplane"
	_ "spillway.dev/spillway/internal/dataplane/ebpf/attach"
	_ "spillway.dev/spillway/test/await"
)
