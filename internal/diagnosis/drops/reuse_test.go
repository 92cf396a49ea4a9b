package drops

import (
	"fmt"
	"net/netip"
	"os"
	"slices"
	"testing"

	"spillway.dev/spillway/internal/node/conntrack"
	"spillway.dev/spillway/internal/node/kernel/netnstest"
	"spillway.dev/spillway/test/await"
)

// The kernel reuses the inode of a deleted namespace for the next one.
func TestADropIsOfTheNamespaceThatHasTheInodeNow(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: makes network namespaces")
	}
	first := newNamespace(t, "first", "")
	f := follow(t, Config{Ports: []uint16{87}})
	netnstest.Within(t, first.Names[0], func() { sendUDP("127.0.0.1:87") })
	if d := next(t, f, toPort87); d.Namespace != first.Names[0] {
		t.Errorf("%+v", d)
	}
	shell(t, "ip netns del "+first.Names[0])
	var second conntrack.Namespace
	for i := range 40 {
		second = newNamespace(t, fmt.Sprintf("second%d", i), "")
		if second.Inode == first.Inode {
			break
		}
	}
	t.Logf("inode %d again: %v", first.Inode, second.Inode == first.Inode)
	// Namespaces are looked for once in refreshInterval, so the first drops may have no name.
	await.NoError(t, func() error {
		netnstest.Within(t, second.Names[0], func() { sendUDP("127.0.0.1:87") })
		d := next(t, f, toPort87)
		if d.Namespace == first.Names[0] {
			t.Fatalf("dropped in %s: %+v", second.Names[0], d)
		}
		if d.Namespace != second.Names[0] || d.Inode != second.Inode {
			return fmt.Errorf("dropped in %s: %+v", second.Names[0], d)
		}
		return nil
	})
}

// toPort87 finds the datagrams of these tests: other tests on the machine send to port 87 of
// other addresses.
func toPort87(d Drop) bool {
	return d.Destination == netip.AddrFrom4([4]byte{127, 0, 0, 1}) && d.DestinationPort == 87
}

// A watched name does not follow another namespace with the same inode.
func TestAFilterIsOfOneNamespace(t *testing.T) {
	first := newNamespace(t, "before", "")
	f := follow(t, Config{Namespaces: []conntrack.Namespace{first}, Ports: []uint16{87}})
	shell(t, "ip netns del "+first.Names[0])
	second := newNamespace(t, "after", "")
	for i := 0; i < 40 && second.Inode != first.Inode; i++ {
		second = newNamespace(t, fmt.Sprintf("after%d", i), "")
	}
	netnstest.Within(t, second.Names[0], func() { sendUDP("127.0.0.1:87") })
	if c, err := f.Counts(); err != nil || c.Matched != 0 {
		t.Errorf("%+v, %v", c, err)
	}
	cookies, err := f.Watch([]conntrack.Namespace{second, first}, nil)
	if err != nil || !slices.Equal(cookies, []uint64{Cookie(second)}) {
		t.Fatalf("%v, %v", cookies, err)
	}
	netnstest.Within(t, second.Names[0], func() { sendUDP("127.0.0.1:87") })
	if d := next(t, f, func(d Drop) bool { return true }); d.Inode != second.Inode {
		t.Errorf("%+v", d)
	}
}

// Rare drops are counted too, when a flood has used up the rate.
func TestReasonsAreCountedBeyondTheRate(t *testing.T) {
	n := newNamespace(t, "flood", `nft "add table inet filter; add chain inet filter in { type filter hook input priority 0; }; add rule inet filter in udp dport 91 drop"`)
	f := follow(t, Config{Namespaces: []conntrack.Namespace{n}, Rate: 1})
	const flood = 50
	netnstest.Within(t, n.Names[0], func() {
		for range flood {
			sendUDP("127.0.0.1:91")
		}
		sendUDP("127.0.0.1:92")
	})
	got, err := f.Reasons()
	if err != nil || got["NETFILTER_DROP"] != flood || got["NO_SOCKET"] != 1 {
		t.Errorf("%v, %v", got, err)
	}
}
