// Command cluster starts and stops a real Kubernetes cluster on this machine.
package main

import _ "spillway.dev/spillway/test/cluster"

func main() {}
