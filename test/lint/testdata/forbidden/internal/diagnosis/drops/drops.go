package drops

import (
	_ "spillway.dev/spillway/internal/node/conntrack"
	_ "spillway.dev/spillway/internal/node/conntrack/stale"
)
