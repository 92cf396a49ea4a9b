// Package kubeproxy knows what a kube-proxy leaves in the kernel of a network
// namespace, whether one runs there, and how to take its rules away without the
// connections that they translate.
//
//	Look ──> Left ──> Remove    nft tables ip and ip6 kube-proxy; chains KUBE-* of iptables
//	Running                     a process, or whoever has the port of its health
//	KeepNAT, ReleaseNAT         translation of what conntrack knows goes on
//
// All of it is about the network namespace of the calling thread.
package kubeproxy

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
)

// ErrIPVS says that kube-proxy's ipvs mode was at work here. Its virtual
// addresses are the node's own (device kube-ipvs0): as long as they are, nobody
// else can serve them well.
var ErrIPVS = errors.New("kube-proxy's ipvs mode is in the kernel (device kube-ipvs0), which is not taken over: " +
	"run kube-proxy --cleanup on this node")

// Left is what a kube-proxy has left in the kernel.
type Left struct {
	tables []nftTable
	chains []ruleset
}

// Look finds what there is. What it cannot look at is an error that says so.
func Look(ctx context.Context) (Left, error) {
	var l Left
	if _, err := net.InterfaceByName("kube-ipvs0"); err == nil {
		return l, ErrIPVS
	}
	var err error
	if l.tables, err = findTables(); err != nil {
		return l, err
	}
	l.chains, err = findRulesets(ctx)
	return l, err
}

// Empty reports whether there is nothing.
func (l Left) Empty() bool { return len(l.tables) == 0 && len(l.chains) == 0 }

// String names what there is, for a person.
func (l Left) String() string {
	var words []string
	for _, t := range l.tables {
		words = append(words, "nft table "+t.String())
	}
	for _, r := range l.chains {
		words = append(words, fmt.Sprintf("%d chains of %s", r.size(), r.program))
	}
	return strings.Join(words, ", ")
}

// Remove takes away what was found: what kube-proxy --cleanup would. Chains of
// kubelet (KUBE-FIREWALL, KUBE-KUBELET-CANARY, KUBE-IPTABLES-HINT) stay, and so
// does a chain that a rule of somebody else leads to, which is an error.
func (l Left) Remove(ctx context.Context) error {
	var errs []error
	if len(l.tables) > 0 {
		errs = append(errs, removeTables(l.tables))
	}
	for _, r := range l.chains {
		errs = append(errs, r.remove(ctx))
	}
	return errors.Join(errs...)
}
