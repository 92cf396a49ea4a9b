package model

import (
	_ "example.org/clock"

	_ "spillway.dev/spillway/lab"
)
