package doctor

import (
	"fmt"
	"testing"

	"spillway.dev/spillway/internal/node/conntrack"
)

// A node with 200 pods: each uses conntrack, and one in ten has the rules of a sidecar.
func BenchmarkLookAt200Namespaces(b *testing.B) {
	var list []conntrack.Namespace
	for i := range 200 {
		ns := newNamespace(b, fmt.Sprint(i))
		send(b, ns, "127.0.0.1:9")
		if i%10 == 0 {
			inside(b, ns, "iptables-nft -t nat -A OUTPUT -p tcp -j REDIRECT --to-ports 15001")
		}
		list = append(list, ns)
	}
	for b.Loop() {
		n, err := Load(b.Context(), Config{Namespaces: func() ([]conntrack.Namespace, error) { return list, nil }})
		if err != nil || len(n.Namespaces) != len(list) || len(n.Problems) > 0 {
			b.Fatalf("%d namespaces, %v: %v", len(n.Namespaces), n.Problems, err)
		}
		Examine(n)
	}
}
