package nftables

import (
	"errors"
	"strings"
	"testing"

	"spillway.dev/spillway/internal/dataplane"
	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/facts/model"
)

func TestHelpersAreKeptWhileAServiceNeedsThemAndNoLonger(t *testing.T) {
	enter(t)
	b := open(t)
	boot := port("boot", model.IPv4, protocol(model.UDP), helped(intent.TFTP), clusterIP("10.96.0.1", intent.ToCluster), here("10.244.0.2:69"))
	web := port("web", model.IPv4, clusterIP("10.96.0.2", intent.ToCluster), here("10.244.0.2:8080"))
	list := func() string { return run(t, "nft", "list", "table", "inet", "spillway") }
	holds := func(when string, want bool) {
		t.Helper()
		for _, part := range []string{"ct helper tftp {", "ct helper set \"tftp\"", "services4-tftp", "chain as-it-is"} {
			if got := strings.Contains(list(), part); got != want {
				t.Errorf("%s: %q is there: %v, want %v\n%s", when, part, got, want, list())
			}
		}
	}
	replace(t, b, intent.State{Node: node(), Ports: []*intent.ServicePort{web}})
	holds("without", false)
	apply := func(c intent.Changes) {
		t.Helper()
		if err := b.Apply(t.Context(), c); err != nil {
			t.Fatal(err)
		}
	}
	apply(intent.Changes{Upserts: []*intent.ServicePort{boot}})
	holds("added", true)
	apply(intent.Changes{Deletes: []intent.PortID{web.ID}})
	holds("after a change of another", true)
	if out, err := runNft("flush ruleset"); err != nil {
		t.Fatal(err, out)
	}
	replace(t, b, intent.State{Node: node(), Ports: []*intent.ServicePort{boot}})
	holds("after a flush by others", true)
	again := open(t)
	replace(t, again, intent.State{Node: node(), Ports: []*intent.ServicePort{boot}})
	holds("after a restart", true)
	replace(t, again, intent.State{Node: node(), Ports: []*intent.ServicePort{web}})
	holds("gone with its Service", false)
	replace(t, again, intent.State{Node: node(), Ports: []*intent.ServicePort{boot}})
	third := open(t)
	replace(t, third, intent.State{Node: node(), Ports: []*intent.ServicePort{web}})
	holds("gone while nobody ran", false)
}

// Packets fill the sets of blocked clients: their elements are no drift to repair, and
// survive a restart.
func TestWhoIsCutOffFromFTPStaysSoOverARestart(t *testing.T) {
	enter(t)
	b := open(t)
	files := port("files", model.IPv4, helped(intent.FTP), clusterIP("10.96.0.1", intent.ToCluster), here("10.244.0.2:21"))
	passive := port("passive", model.IPv4, clusterIP("10.96.0.2", intent.ToCluster), here("10.244.0.2:5000"))
	passive.OfFTP = true
	list := func() string { return run(t, "nft", "list", "table", "inet", "spillway") }
	holds := func(when string, want bool, parts ...string) {
		t.Helper()
		for _, part := range parts {
			if got := strings.Contains(list(), part); got != want {
				t.Errorf("%s: %q is there: %v, want %v\n%s", when, part, got, want, list())
			}
		}
	}
	replace(t, b, intent.State{Node: node(), Ports: []*intent.ServicePort{files, passive}})
	holds("added", true, "set cut-off4", "chain control", "set services4-own", "goto cut-off")
	if out, err := runNft("add element inet spillway cut-off4 { 192.0.2.1 . 10.244.0.2 timeout 5m }"); err != nil {
		t.Fatal(err, out)
	}
	again := open(t)
	replace(t, again, intent.State{Node: node(), Ports: []*intent.ServicePort{files, passive}})
	holds("after a restart", true, "192.0.2.1 . 10.244.0.2 timeout 5m", "services4-own")
	if r := again.Repaired(); r.Any() {
		t.Errorf("repaired: %v", r)
	}
	alone := *passive
	alone.OfFTP = false
	replace(t, again, intent.State{Node: node(), Ports: []*intent.ServicePort{&alone}})
	holds("gone with its Service", false, "cut-off", "chain control", "services4-own")
}

// The kernel is asked for a helper of a name that it has not, which is as near to
// a kernel without TFTP's as there is here.
func TestAKernelWithoutAHelperServesThePortAndSaysSo(t *testing.T) {
	enter(t)
	kernelName = func(intent.Helper) string { return "none-such" }
	t.Cleanup(func() { kernelName = intent.Helper.String })
	b := open(t)
	boot := port("boot", model.IPv4, protocol(model.UDP), helped(intent.TFTP), clusterIP("10.96.0.1", intent.ToCluster), here("10.244.0.2:69"))
	err := b.Replace(t.Context(), intent.State{Node: node(), Ports: []*intent.ServicePort{boot}})
	var failed *dataplane.PortErrors
	if !errors.As(err, &failed) || failed.Errors[boot.ID] == nil ||
		!strings.Contains(failed.Errors[boot.ID].Error(), "load nf_conntrack_tftp and nf_nat_tftp") {
		t.Errorf("error %v, want one of the port that names the modules", err)
	}
	if list := run(t, "nft", "list", "table", "inet", "spillway"); !strings.Contains(list, "10.96.0.1 . udp . ") ||
		strings.Contains(list, "ct helper") {
		t.Errorf("the port is not served, or with a helper:\n%s", list)
	}
}
