package model

import (
	_ "example.org/clock"

	_ "spillway.dev/spillway/lab"
	_ "spillway.dev/spillway/test/await"
	_ "spillway.dev/spillway/test/flows"
	_ "spillway.dev/spillway/test/must"
)
