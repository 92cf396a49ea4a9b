package newroom

import _ "spillway.dev/spillway/internal/facts/model"
