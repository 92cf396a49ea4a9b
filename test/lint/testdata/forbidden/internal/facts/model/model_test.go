package model

import _ "spillway.dev/spillway/lab"
