package intent

import _ "spillway.dev/spillway/internal/reconcile"
