package faults

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"spillway.dev/spillway/test/cluster"
	"spillway.dev/spillway/test/cluster/clustertest"
)

// TestNodesOfDifferentFamilies has a node with both families, one with IPv4 alone and one
// with IPv6 alone. A Service has endpoints on all of them.
func TestNodesOfDifferentFamilies(t *testing.T) {
	if testing.Short() {
		t.Skip("starts a cluster of its own")
	}
	e := start(t, cluster.Config{Families: cluster.Mixed, CNI: cluster.Bridge})
	peers, err := e.PodOfEachNode(t.Context(), "default", "app=peer")
	clustertest.Must(t, err)
	if len(e.clusterIPs) != 2 {
		t.Fatalf("cluster IPs %v, want two", e.clusterIPs)
	}
	for _, text := range e.clusterIPs {
		ip := netip.MustParseAddr(text)
		var endpoints []string // of this family
		for _, n := range e.AllNodes() {
			if has(n, ip) {
				endpoints = append(endpoints, peers[n.Name()].Name)
			}
		}
		if len(endpoints) != 2 {
			t.Fatalf("endpoints %v for %s, want two", endpoints, ip)
		}
		for _, n := range e.AllNodes() {
			if !has(n, ip) {
				continue
			}
			for where, ask := range map[string]func() []string{
				"the node": func() []string { return ask(t, n.Host(), text, "80") },
				"outside":  func() []string { return ask(t, e.Client(), n.Host().Addr(ip).String(), nodePort) },
				"a Pod":    func() []string { return askFromPod(t, peers[n.Name()], text) },
			} {
				wantAll(t, endpoints, fmt.Sprintf("%s on %s from %s", ip, n.Name(), where), ask)
			}
		}
	}
	if t.Failed() {
		t.Log(e.kubectl(t, "get", "endpointslices,pods", "--output=wide"))
	}
	for _, line := range e.lines(t, "log") {
		if isProblem(line) {
			t.Errorf("an agent logs %q", line)
		}
	}
}

// wantAll asks until all endpoints have answered, and expects no other answer. A node may
// learn of an endpoint late.
func wantAll(t *testing.T, endpoints []string, what string, ask func() []string) {
	t.Helper()
	var seen []string
	for deadline := time.Now().Add(time.Minute); time.Now().Before(deadline) && len(seen) < len(endpoints); {
		for _, pod := range ask() {
			if !slices.Contains(endpoints, pod) {
				t.Fatalf("%s: %s answers, want one of %v", what, pod, endpoints)
			}
			if !slices.Contains(seen, pod) {
				seen = append(seen, pod)
			}
		}
	}
	if len(seen) < len(endpoints) {
		t.Errorf("%s: only %v answer, want all of %v", what, seen, endpoints)
	}
	t.Logf("%s: %v", what, seen)
}

func isProblem(line string) bool {
	return strings.Contains(line, "level=WARN") || strings.Contains(line, "level=ERROR")
}

func askFromPod(t *testing.T, from *cluster.Pod, address string) []string {
	t.Helper()
	return asked(t, from.Name, address, "80", func(argv ...string) ([]byte, error) {
		cmd, release, err := from.Command(t.Context(), argv...)
		if err != nil {
			return nil, err
		}
		defer release()
		return cmd.CombinedOutput()
	})
}

func has(n *cluster.Node, like netip.Addr) bool {
	return slices.ContainsFunc(n.Addresses(), func(a netip.Addr) bool { return a.Is4() == like.Is4() })
}
