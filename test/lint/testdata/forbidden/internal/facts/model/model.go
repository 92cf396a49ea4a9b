package model

import _ "example.org/clock"
