package drops

import (
	"fmt"
	"os"
	"slices"
	"testing"
	"time"

	"spillway.dev/spillway/internal/node/conntrack"
	"spillway.dev/spillway/internal/node/kernel/netnstest"
)

// The kernel gives the inode of a namespace that has gone to the next one.
func TestADropIsOfTheNamespaceThatHasTheInodeNow(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: makes network namespaces")
	}
	first := newNamespace(t, "first", "")
	f := follow(t, Config{Ports: []uint16{87}})
	netnstest.Within(t, first.Names[0], func() { sendUDP("127.0.0.1:87") })
	if d := next(t, f, func(d Drop) bool { return d.DestinationPort == 87 }); d.Namespace != first.Names[0] {
		t.Errorf("%+v", d)
	}
	shell(t, "ip netns del "+first.Names[0])
	var second conntrack.Namespace
	for i := range 40 {
		second = newNamespace(t, fmt.Sprintf("second%d", i), "")
		if second.Inode == first.Inode {
			break
		}
		time.Sleep(20 * time.Millisecond) // the kernel takes namespaces down later
	}
	t.Logf("inode %d again: %v", first.Inode, second.Inode == first.Inode)
	time.Sleep(refreshInterval) // names are looked for no more often
	netnstest.Within(t, second.Names[0], func() { sendUDP("127.0.0.1:87") })
	if d := next(t, f, func(d Drop) bool { return d.DestinationPort == 87 }); d.Namespace != second.Names[0] || d.Inode != second.Inode {
		t.Errorf("dropped in %s: %+v", second.Names[0], d)
	}
}

// What was watched under a name is not what has the name's inode now.
func TestAFilterIsOfOneNamespace(t *testing.T) {
	first := newNamespace(t, "before", "")
	f := follow(t, Config{Namespaces: []conntrack.Namespace{first}, Ports: []uint16{87}})
	shell(t, "ip netns del "+first.Names[0])
	second := newNamespace(t, "after", "")
	for i := 0; i < 40 && second.Inode != first.Inode; i++ {
		time.Sleep(20 * time.Millisecond)
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

// What is rare is counted too, when a flood has used up the rate.
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
