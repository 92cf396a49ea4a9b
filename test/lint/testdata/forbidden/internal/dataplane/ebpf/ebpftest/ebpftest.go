package ebpftest

import (
	_ "spillway.dev/spillway/test/flows"
	_ "spillway.dev/spillway/test/must"
)
