package iptables

import (
	"errors"
	"strings"
	"testing"

	"spillway.dev/spillway/internal/dataplane"
	"spillway.dev/spillway/internal/intent"
	"spillway.dev/spillway/internal/model"
)

func tftp() *intent.ServicePort {
	return &intent.ServicePort{
		ID: id("boot", "", 69, model.UDP, model.IPv4), Helper: intent.TFTP,
		Frontends: []intent.Frontend{
			clusterIP("10.96.0.69", 69, intent.ToCluster), nodePort(30069, intent.ToCluster, intent.ToCluster),
		},
		Endpoints: []intent.Endpoint{near("10.244.1.2:1069"), far("10.244.2.2:1069")},
	}
}

// raw is table raw, "" if there is none. Asking iptables-save for it would make it.
func (b *bench) raw() string {
	b.t.Helper()
	text, err := b.command("iptables-save").Output()
	if err != nil {
		b.t.Fatal(err)
	}
	_, raw, _ := strings.Cut(string(text), "*raw")
	raw, _, _ = strings.Cut(raw, "COMMIT")
	return raw
}

func TestHelpersAreGivenToTheirServicesOnlyAndGoWithThem(t *testing.T) {
	eachVariant(t, func(b *bench) {
		be := b.open()
		web := shapes()["cluster-ip"][0]
		b.replace(be, web)
		if raw := b.raw(); strings.Contains(raw, chainPrefix) {
			t.Errorf("without a Service that needs it, table raw holds\n%s", raw)
		}
		apply := func(c intent.Changes) {
			t.Helper()
			if err := be.Apply(t.Context(), c); err != nil {
				t.Fatal(err)
			}
			b.inSync(be)
		}
		wants := func(raw string, want ...string) {
			t.Helper()
			for _, w := range want {
				if !strings.Contains(raw, w) {
					t.Errorf("%q is missing in\n%s", w, raw)
				}
			}
		}
		apply(intent.Changes{Upserts: []*intent.ServicePort{tftp()}})
		nodePorts := testNode().NodePortAddrs
		wants(b.raw(), "-A PREROUTING -m comment --comment \"spillway: helpers\" -j SPW-HELPERS", "-A OUTPUT ",
			"-A SPW-HELPERS -d 10.96.0.69/32 -p udp -m udp --dport 69 -j CT --helper tftp",
			"-A SPW-HELPERS -d 10.244.1.2/32 -p udp -m udp --dport 1069 -j CT --helper tftp",
			"-A SPW-HELPERS -d "+nodePorts[0].String()+"/32 -p udp -m udp --dport 30069 -j CT --helper tftp")
		if strings.Contains(b.raw(), "10.244.2.2") || strings.Contains(b.raw(), "10.96.0.1/32") {
			t.Errorf("somebody else has a helper:\n%s", b.raw())
		}
		wants(b.dump(), "-A SPW-EXPECTED -s 10.244.1.2/32 -j SNAT --to-source 10.244.1.2")
		// Kept across changes of others, and put back when it was flushed.
		apply(intent.Changes{Deletes: []intent.PortID{web.ID}})
		wants(b.raw(), "--dport 69 -j CT --helper tftp")
		b.mustRun("iptables -t raw -F SPW-HELPERS", "iptables -t raw -F PREROUTING")
		b.replace(be, tftp())
		wants(b.raw(), "--dport 69 -j CT --helper tftp", "-A PREROUTING ")
		// A new process finds it, and takes it away with the Service.
		again := b.open()
		b.replace(again, web)
		if strings.Contains(b.raw(), chainPrefix) || strings.Contains(b.dump(), chainExpected) {
			t.Errorf("left over:\n%s\n%s", b.raw(), b.dump())
		}
		b.replace(again, web, tftp())
		plain := tftp()
		plain.Helper = intent.NoHelper
		be = again
		apply(intent.Changes{Upserts: []*intent.ServicePort{plain}})
		if strings.Contains(b.raw(), chainPrefix) || strings.Contains(b.dump(), chainExpected) {
			t.Errorf("left over when it is no TFTP any more:\n%s\n%s", b.raw(), b.dump())
		}
	})
}

// The kernel is asked for a helper of a name that it has not, which is as near to
// a kernel without TFTP's as there is here.
func TestAKernelWithoutAHelperServesThePortAndSaysSo(t *testing.T) {
	kernelName = func(intent.Helper) string { return "none-such" }
	t.Cleanup(func() { kernelName = intent.Helper.String })
	eachVariant(t, func(b *bench) {
		err := b.open().Replace(t.Context(), intent.State{Node: testNode(), Ports: []*intent.ServicePort{tftp()}})
		var failed *dataplane.PortErrors
		if !errors.As(err, &failed) || failed.Errors[tftp().ID] == nil || !strings.Contains(failed.Errors[tftp().ID].Error(), "load nf_conntrack_tftp, nf_nat_tftp") {
			t.Errorf("error %v, want one of the port that names the modules", err)
		}
		if !strings.Contains(b.dump(), "10.96.0.69/32") || strings.Contains(b.raw(), chainPrefix) {
			t.Errorf("the port is not served, or with a helper:\n%s\n%s", b.dump(), b.raw())
		}
	})
}
