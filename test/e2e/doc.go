// Package e2e holds tests of what a node goes through: agents that are
// restarted, killed, suspended and cleaned up while traffic runs. What Service
// traffic must do while nothing happens is the business of test/flows, whose
// clusters and probes these tests use.
//
//	go test ./test/e2e -proxy-mode ebpf
package e2e
