package somewhere

import _ "spillway.dev/spillway/lab"
