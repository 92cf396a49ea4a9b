package stale

import _ "spillway.dev/spillway/internal/node/conntrack"
