// Package kubeproxy detects a kube-proxy and its rules in a network namespace, and removes
// the rules without ending the connections that they translate.
//
//	Detect ──> Installed ──> Remove    nft tables ip and ip6 kube-proxy; chains KUBE-* of iptables
//	Running                            a process, or another owner of the health port
//	KeepNAT, ReleaseNAT                keep the translation of tracked connections
//
// Every function works in the network namespace of the calling thread.
package kubeproxy

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"

	"spillway.dev/spillway/internal/node/nft"
)

// errIPVS reports that kube-proxy's ipvs mode left its device kube-ipvs0. The device
// makes Service addresses local addresses of the node, so no other proxy can serve them
// correctly.
var errIPVS = errors.New("kube-proxy's ipvs mode is in the kernel (device kube-ipvs0), which is not taken over: " +
	"run kube-proxy --cleanup on this node")

// Installed holds the rules of kube-proxy in the kernel.
type Installed struct {
	tables []nft.Table
	chains []ruleset
}

// Detect finds the rules. It returns an error for each part that it cannot read.
func Detect(ctx context.Context) (Installed, error) {
	var l Installed
	if _, err := net.InterfaceByName("kube-ipvs0"); err == nil {
		return l, errIPVS
	}
	var err error
	if l.tables, err = findTables(ctx); err != nil {
		return l, err
	}
	l.chains, err = findRulesets(ctx)
	return l, err
}

// Empty reports whether there are no rules.
func (l Installed) Empty() bool { return len(l.tables) == 0 && len(l.chains) == 0 }

// String describes the rules in one line.
func (l Installed) String() string {
	var words []string
	for _, t := range l.tables {
		words = append(words, "nft table "+t.String())
	}
	for _, r := range l.chains {
		words = append(words, fmt.Sprintf("%d chains of %s", r.size(), r.program))
	}
	return strings.Join(words, ", ")
}

// Remove deletes the rules that kube-proxy --cleanup would delete. Chains of kubelet
// (KUBE-FIREWALL, KUBE-KUBELET-CANARY, KUBE-IPTABLES-HINT) stay. A chain stays too if a
// rule of another program jumps to it; that is an error.
func (l Installed) Remove(ctx context.Context) error {
	var errs []error
	if len(l.tables) > 0 {
		errs = append(errs, removeTables(ctx, l.tables))
	}
	for _, r := range l.chains {
		errs = append(errs, r.remove(ctx))
	}
	return errors.Join(errs...)
}
