package newpackage

import _ "spillway.dev/spillway/internal/facts/model"
