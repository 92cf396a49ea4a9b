package iptables

import (
	"context"
	"net"
	"testing"

	"github.com/vishvananda/netlink"

	"spillway.dev/spillway/internal/decisions/intent"
)

// TestAnAuditOfUntouchedTablesReadsNoRules removes iptables-save.
func TestAnAuditOfUntouchedTablesReadsNoRules(t *testing.T) {
	eachVariant(t, func(b *bench) {
		be, s := b.open(), bothFamilies(20)
		for range 2 { // the first writes, the second finds no difference
			if err := be.Replace(context.Background(), s); err != nil {
				t.Fatal(err)
			}
		}
		b.countPackets()
		save := be.families[0].programs.save
		be.families[0].programs.save, be.families[1].programs.save = "/nonexistent", "/nonexistent"
		if err := be.Replace(context.Background(), s); err != nil {
			t.Errorf("a full sync of what is there already: %v", err)
		}
		served, err := be.Applied(context.Background())
		if err != nil || len(served.Ports) != len(s.Ports) {
			t.Errorf("%d of %d are served, error %v", len(served.Ports), len(s.Ports), err)
		}
		// The same number of rules, of the same size.
		b.mustRun("iptables -t nat -R SPW-REJECT 1 -j MARK --set-xmark 0x1001/0x5000")
		if err := be.Replace(context.Background(), s); err == nil {
			t.Error("a rule that was changed is not read")
		}
		be.families[0].programs.save = save
		be.families[1].programs.save = "/usr/sbin/ip6tables-" + string(b.variant) + "-save"
		if err := be.Replace(context.Background(), s); err != nil {
			t.Fatal(err)
		}
		b.inSync(be)
	})
}

// countPackets increments the counters of rules.
func (b *bench) countPackets() {
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		b.t.Fatal(err)
	}
	if err := netlink.LinkSetUp(lo); err != nil {
		b.t.Fatal(err)
	}
	for _, to := range []string{"127.0.0.1:9", "[::1]:9"} {
		c, err := net.Dial("udp", to)
		if err != nil {
			b.t.Fatal(err)
		}
		c.Write([]byte("a packet"))
		c.Close()
	}
}

func TestAWriteMakesAFingerprintVoid(t *testing.T) {
	eachVariant(t, func(b *bench) {
		be := b.open()
		one, two := service(1), service(2)
		b.replace(be, one)
		b.replace(be, one)
		b.apply(be, upserts(two))
		// Another program changes rules right after the write.
		b.mustRun("iptables -t nat -F " + b.chainOf(be, one))
		b.replace(be, one, two)
		wantMetric(t, be, differences, 1)
		b.asFromScratch(intent.State{Node: testNode(), Ports: []*intent.ServicePort{one, two}})
	})
}
