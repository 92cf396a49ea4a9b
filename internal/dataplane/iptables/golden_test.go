package iptables

import (
	"flag"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/facts/model"
)

var update = flag.Bool("update", false, "write the golden dumps anew")

// shapes are the main shapes of a Service, each with a dump in testdata.
func shapes() map[string][]*intent.ServicePort {
	three := []intent.Endpoint{near("10.244.1.2:8080"), far("10.244.2.2:8080"), far("10.244.2.3:8080")}
	web := func(endpoints []intent.Endpoint, frontends ...intent.Frontend) *intent.ServicePort {
		return &intent.ServicePort{ID: id("web", "http", 80, model.TCP, model.IPv4), Frontends: frontends, Endpoints: endpoints}
	}
	sticky := web(three, clusterIP("10.96.0.1", 80, intent.ToCluster))
	sticky.Affinity = 3 * time.Hour
	dns := web([]intent.Endpoint{far("10.244.2.2:53")}, clusterIP("10.96.0.10", 53, intent.ToCluster))
	dns.ID = id("dns", "", 53, model.UDP, model.IPv4)
	sctp := web([]intent.Endpoint{far("10.244.2.2:38412")}, clusterIP("10.96.0.11", 38412, intent.ToCluster),
		nodePort(30412, intent.ToCluster, intent.ToCluster))
	sctp.ID = id("amf", "ngap", 38412, model.SCTP, model.IPv4)
	six := web([]intent.Endpoint{near("[fd44:1::2]:8080"), far("[fd44:2::2]:8080")},
		clusterIP("fd96::1", 80, intent.ToCluster), nodePort(30080, intent.ToCluster, intent.ToCluster))
	six.ID.Family = model.IPv6
	external := func(outside, inside intent.Route, ranges []netip.Prefix) []intent.Frontend {
		return []intent.Frontend{
			clusterIP("10.96.0.1", 80, inside), nodePort(30080, outside, inside),
			{Kind: intent.ExternalIP, Addr: addr("198.51.100.1"), Port: 80, ExternalRoute: outside, InternalRoute: inside},
			{Kind: intent.LoadBalancerIP, Addr: addr("203.0.113.1"), Port: 80, ExternalRoute: outside, InternalRoute: inside, SourceRanges: ranges},
		}
	}
	weighted := web(three, clusterIP("10.96.0.1", 80, intent.ToCluster))
	weighted.Weights = []uint16{3, 0, 1}
	hostNetwork := intent.Endpoint{Addr: addrPort("192.0.2.1:8080"), ClusterPolicy: true, OnThisNode: true, HostNetwork: true}
	return map[string][]*intent.ServicePort{
		"no-services":     nil,
		"cluster-ip":      {web(three, clusterIP("10.96.0.1", 80, intent.ToCluster))},
		"host-network":    {web([]intent.Endpoint{hostNetwork}, clusterIP("10.96.0.1", 80, intent.ToCluster))},
		"pod-of-no-range": {web([]intent.Endpoint{near("10.99.0.1:8080")}, clusterIP("10.96.0.1", 80, intent.ToCluster))},
		"affinity":        {sticky},
		"weighted":        {weighted},
		"udp-unnamed":     {dns},
		"sctp":            {sctp},
		"ipv6":            {six},
		"load-balancer":   {web(three, external(intent.ToCluster, intent.ToCluster, nil)...)},
		"source-ranges": {web(three, external(intent.ToCluster, intent.ToCluster,
			[]netip.Prefix{prefix("192.0.2.0/25"), prefix("198.51.100.0/24")})...)},
		"nobody-let-in":   {web(three, external(intent.ToCluster, intent.ToCluster, []netip.Prefix{})...)},
		"local":           {web(three, external(intent.ToLocal, intent.ToCluster, nil)...)},
		"local-elsewhere": {web(three[1:], external(intent.Drop, intent.ToCluster, nil)...)},
		"no-endpoints":    {web(nil, external(intent.Reject, intent.Reject, nil)...)},
		"internal-local":  {web(nil, clusterIP("10.96.0.1", 80, intent.Drop))},
	}
}

func TestRulesOfTheMainShapesOfService(t *testing.T) {
	eachVariant(t, func(b *bench) {
		be := b.open()
		for name, ports := range shapes() {
			b.replace(be, ports...)
			b.golden(name, b.dump())
		}
	})
}

// golden compares a dump with the one in testdata. Both variants have the same.
func (b *bench) golden(name, got string) {
	b.t.Helper()
	file := filepath.Join("testdata", name+".golden")
	got = trimStatic(got)
	if name == "no-services" {
		got = b.dump()
	}
	if *update {
		if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
			b.t.Fatal(err)
		}
	}
	want, err := os.ReadFile(file)
	if err != nil {
		b.t.Fatal(err)
	}
	if got != string(want) {
		b.t.Errorf("%s: the kernel holds\n%s\nwant\n%s", name, got, want)
	}
}

// trimStatic removes the lines that no Service changes. They are in the dump
// "no-services".
func trimStatic(dump string) string {
	static, err := os.ReadFile(filepath.Join("testdata", "no-services.golden"))
	if err != nil {
		return dump
	}
	known := map[string]bool{}
	for line := range strings.Lines(string(static)) {
		known[line] = !strings.HasPrefix(line, "ip")
	}
	var out strings.Builder
	header := ""
	for line := range strings.Lines(dump) {
		switch {
		case strings.HasPrefix(line, "ip"):
			header = line
		case !known[line]:
			out.WriteString(header + line)
			header = ""
		}
	}
	return out.String()
}

func TestMasqueradeAllMarksEverySource(t *testing.T) {
	eachVariant(t, func(b *bench) {
		be := b.open()
		node := testNode()
		node.MasqueradeAll = true
		s := intent.State{Node: node, Ports: shapes()["local"]}
		if err := be.Replace(t.Context(), s); err != nil {
			t.Fatal(err)
		}
		b.golden("masquerade-all", b.dump())
	})
}
