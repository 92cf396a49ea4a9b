// Package scripts tests the whole of a change: from manifests, over the decisions and
// the reconciler, to the state that a dataplane holds.
//
// Each testdata/NAME.txtar is a script of [testscript] with the manifests that it uses
// and the output that it wants. Files in manifests/ are what the agent reads. Each
// command below first waits until everything in manifests/ is written:
//
//	services  print the Service ports of the dataplane
//	changes   print what was written since the last services or changes, and how
//	policies  print the do-not-track policies
//	node      print what the dataplane knows of the node
//	problems  print the problems that the agent reports
//	restart   end the agent and start another one on the same dataplane
//
// Each also starts a second agent with an empty dataplane, which must end in the same
// state. With -held it does not: what an agent holds through a bad document, the next one
// does not know.
//
// The node is node-a with the addresses 192.0.2.1 and 2001:db8::1. To add a script, write
// its manifests and commands, and run go test ./test/scripts -update to add the output;
// then read it.
//
// [testscript]: https://pkg.go.dev/github.com/rogpeppe/go-internal/testscript
package scripts
