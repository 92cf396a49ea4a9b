package drops

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"spillway.dev/spillway/internal/dataplane/nftables"
	"spillway.dev/spillway/internal/decisions/donottrack"
	"spillway.dev/spillway/internal/diagnosis/drops"
	"spillway.dev/spillway/internal/diagnosis/drops/cause"
	"spillway.dev/spillway/internal/facts/model"
	"spillway.dev/spillway/internal/node/conntrack"
	"spillway.dev/spillway/internal/node/kernel/netnstest"
	"spillway.dev/spillway/test/await"
)

// deniedWorld is a node with two pods on a bridge, and a machine outside. A policy on one
// pod denies requests from outside 192.0.2.0/24.
//
//	pod1 10.244.0.2, fd01::2 ┐
//	pod2 10.244.0.3, fd01::3 ┴ br0 node lan0 ── lan 172.30.0.99, fd02::99
const deniedWorld = `
ip -n NODE link add br0 type bridge; ip -n NODE link set br0 up
ip -n NODE addr add 10.244.0.1/24 dev br0; ip -n NODE addr add fd01::1/64 dev br0 nodad
for i in 1 2; do
  ip -n NODE link add veth$i type veth peer name eth0 netns POD$i
  ip -n NODE link set veth$i master br0 up
  ip -n POD$i addr add 10.244.0.$((i+1))/24 dev eth0; ip -n POD$i addr add fd01::$((i+1))/64 dev eth0 nodad
  ip -n POD$i link set eth0 up
  ip -n POD$i route add default via 10.244.0.1; ip -n POD$i route add default via fd01::1
done
ip -n NODE link add lan0 type veth peer name eth0 netns LAN
ip -n NODE addr add 172.30.0.10/24 dev lan0; ip -n NODE addr add fd02::10/64 dev lan0 nodad; ip -n NODE link set lan0 up
ip -n LAN addr add 172.30.0.99/24 dev eth0; ip -n LAN addr add fd02::99/64 dev eth0 nodad; ip -n LAN link set eth0 up
ip -n LAN route add default via 172.30.0.10; ip -n LAN route add default via fd02::10
ip netns exec NODE sysctl -qw net.ipv4.ip_forward=1 net.ipv6.conf.all.forwarding=1
`

// named creates network namespaces, and replaces their names in a script that it runs.
func named(t *testing.T, script string, roles ...string) map[string]string {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root: makes network namespaces")
	}
	ip, err := exec.LookPath("ip") // busybox's shell prefers its own
	if err != nil {
		t.Fatal(err)
	}
	prefix := fmt.Sprintf("spw-denied-%d-", os.Getpid())
	names, pairs := map[string]string{}, []string{"POD$i", prefix + "pod$i"}
	for _, role := range roles {
		name := prefix + strings.ToLower(role)
		names[role], pairs = name, append(pairs, role, name)
		t.Cleanup(func() { _ = exec.Command("ip", "netns", "del", name).Run() })
		if out, err := exec.Command("ip", "netns", "add", name).CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		_ = exec.Command("ip", "-n", name, "link", "set", "lo", "up").Run()
	}
	if out, err := exec.Command("sh", "-ec", "ip() { "+ip+" \"$@\"; }\n"+
		strings.NewReplacer(pairs...).Replace(script)).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	return names
}

// deniedPolicies are in the order of their names.
func deniedPolicies() model.Delta {
	cache := &model.Pod{Name: model.Name{Namespace: "n", Name: "cache"}, Node: "here", Labels: map[string]string{"role": "cache"},
		IPs: []netip.Addr{netip.MustParseAddr("10.244.0.2"), netip.MustParseAddr("fd01::2")}}
	peers := []model.PolicyPeer{{Block: netip.MustParsePrefix("192.0.2.0/24")}}
	about := func(name string, protocol model.Protocol, first, last uint16) *model.DoNotTrackPolicy {
		return &model.DoNotTrackPolicy{Name: name, DenyOthers: true,
			Pods:    &model.PodSelection{Pods: &model.Selector{MatchLabels: cache.Labels}},
			Ingress: []model.PolicyRule{{Ports: []model.PortRange{{Protocol: protocol, First: first, Last: last}}, Peers: peers}}}
	}
	out := about("out", model.UDP, 53, 53)
	out.Pods, out.Nodes, out.Egress, out.Ingress = nil, &model.Selector{MatchLabels: map[string]string{"is": "node"}}, out.Ingress, nil
	return model.Delta{Full: true, Pods: map[model.Name]*model.Pod{cache.Name: cache},
		Nodes: map[string]*model.Node{"here": {Name: "here", Labels: map[string]string{"is": "node"}}},
		DoNotTrackPolicies: map[string]*model.DoNotTrackPolicy{"cache": about("cache", model.TCP, 11211, 11211),
			"range": about("range", model.UDP, 100, 199), "out": out}}
}

func TestDropsNamesThePolicyThatDenied(t *testing.T) {
	ns := named(t, deniedWorld, "NODE", "POD1", "POD2", "LAN")
	netnstest.Within(t, ns["NODE"], func() {
		p, err := nftables.NewDoNotTrack(t.Context(), "", slog.New(slog.DiscardHandler))
		if err != nil {
			t.Error(err)
			return
		}
		defer p.Close()
		tr := donottrack.New(donottrack.Config{NodeName: "here"})
		tr.SetNodeAddrs([]netip.Addr{netip.MustParseAddr("172.30.0.10"), netip.MustParseAddr("fd02::10")})
		tr.Apply(deniedPolicies())
		if err := p.Replace(t.Context(), tr.State()); err != nil {
			t.Error(err)
		}
	})
	const denied, perhaps = "BY denied it", "BY denies it, if it was not dropped before by a rule reached from nft chain theirs/pre"
	const other, told = "a rule of nftables", `a rule reached from nft chain "pre" of table "theirs"`
	early := func(port int) string {
		return fmt.Sprintf("table inet theirs { chain pre { type filter hook prerouting priority -310; tcp dport %d drop; }; }", port)
	}
	for _, row := range []struct {
		name, from, network, to string
		nft                     string // another program's, in the node
		hook, chain, policy     string
		meaning, told           string // told: if the kernel names the table
	}{
		{"TCP", "LAN", "tcp4", "10.244.0.2:11211", "", "PREROUTING", "prerouting", "cache", denied, denied},
		{"TCP over IPv6", "LAN", "tcp6", "[fd01::2]:11211", "", "PREROUTING", "prerouting", "cache", denied, denied},
		{"UDP, in a range", "LAN", "udp4", "10.244.0.2:150", "", "PREROUTING", "prerouting", "range", denied, denied},
		{"UDP over IPv6, in a range", "LAN", "udp6", "[fd01::2]:199", "", "PREROUTING", "prerouting", "range", denied, denied},
		{"the node asks", "NODE", "udp4", "172.30.0.99:53", "", "OUTPUT", "translated-out", "out", denied, denied},
		{"the node asks over IPv6", "NODE", "udp6", "[fd02::99]:53", "", "OUTPUT", "translated-out", "out", denied, denied},
		{"pod to pod, by a bridge", "POD2", "tcp4", "10.244.0.2:11211", "", "PREROUTING", "prerouting", "cache", denied, denied},
		{"pod to pod, by a bridge, over IPv6", "POD2", "tcp6", "[fd01::2]:11211", "", "PREROUTING", "prerouting", "cache", denied, denied},
		{"translated", "LAN", "tcp4", "172.30.0.10:31000",
			"table inet theirs { chain nat { type nat hook prerouting priority -100; ip daddr 172.30.0.10 tcp dport 31000 dnat ip to " +
				"10.244.0.2:11211; }; }",
			"FORWARD", "translated-on", "cache", denied, denied},
		{"by another rule", "LAN", "tcp4", "10.244.0.2:8080", early(8080), "PREROUTING", "", "", other, told},
		{"perhaps before", "LAN", "tcp4", "10.244.0.2:11211", early(8080), "PREROUTING", "prerouting", "cache", perhaps, denied},
		{"before", "LAN", "tcp4", "10.244.0.2:11211", early(11211), "PREROUTING", "", "cache", perhaps, told},
	} {
		if _, err := os.Stat("/proc/sys/net/bridge"); err != nil && row.from == "POD2" {
			continue // without br_netfilter, no packet between ports of a bridge is seen
		}
		t.Run(row.name, func(t *testing.T) {
			if row.nft != "" {
				nftIn(t, ns["NODE"], row.nft)
				defer nftIn(t, ns["NODE"], "delete table inet theirs")
			}
			d, told := dropOf(t, ns["NODE"], row.hook, func() {
				netnstest.Within(t, ns[row.from], func() { send(row.network, row.to) })
			})
			want := strings.ReplaceAll(row.meaning, "BY", "DoNotTrackPolicy "+row.policy+" (deny: others)")
			if told { // by the kernel
				want = strings.ReplaceAll(row.told, "BY", "DoNotTrackPolicy "+row.policy+" (deny: others)")
			}
			proved := strings.HasSuffix(want, "denied it")
			if !strings.HasPrefix(d.Meaning, want) || proved && (d.Meaning != want || d.Table != nftables.PolicyTable || d.Chain != row.chain) {
				t.Errorf("%s: %+v", want, d)
			}
		})
	}
	t.Run("printed", func(t *testing.T) {
		var out, errs bytes.Buffer
		done := make(chan int, 1)
		go func() {
			done <- run([]string{"drops", "--netns", ns["NODE"], "--port", "11211", "--count", "1", "--for", "20s"}, &out, &errs)
		}()
		for code := -1; code < 0; { // until it follows
			netnstest.Within(t, ns["LAN"], func() { send("tcp4", "10.244.0.2:11211") })
			select {
			case code = <-done:
			case <-time.After(50 * time.Millisecond):
			}
		}
		for _, want := range []string{"at PREROUTING, nft spillway-policy/prerouting, ",
			"\n  DoNotTrackPolicy cache (deny: others) denied it\n"} {
			if !strings.Contains(out.String(), want) {
				t.Errorf("%q is not in %s%s", want, out.String(), errs.String())
			}
		}
	})
}

func nftIn(t *testing.T, name, text string) {
	t.Helper()
	if out, err := exec.Command("ip", "netns", "exec", name, "nft", text).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
}

func send(network, to string) {
	c, err := net.DialTimeout(network, to, 50*time.Millisecond)
	if err != nil {
		return
	}
	_, _ = c.Write([]byte("x"))
	c.Close()
}

// dropOf returns the report of the packet that send loses in a namespace, and whether the
// kernel names the table.
func dropOf(t *testing.T, name, hook string, what func()) (d drops.Drop, told bool) {
	t.Helper()
	list, _ := conntrack.Namespaces()
	i := slices.IndexFunc(list, func(n conntrack.Namespace) bool { return n.Is(name) })
	if i < 0 {
		t.Fatalf("%s is not among %v", name, list)
	}
	f, err := drops.Follow(drops.Config{Namespaces: list[i : i+1], Reasons: []string{"NETFILTER_DROP"}})
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	what()
	ctx, stop := context.WithTimeout(t.Context(), await.Limit)
	defer stop()
	told = !slices.ContainsFunc(f.Missing(), func(line string) bool { return strings.HasPrefix(line, "tables and chains") })
	for {
		d, err = f.Next(ctx)
		if err != nil {
			t.Fatal(err)
		}
		cause.ExplainDenial(f, &d)
		if d.Hook == hook {
			return d, told
		}
		t.Logf("also: %+v", d)
	}
}
