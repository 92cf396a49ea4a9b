package ebpf

import (
	"fmt"
	"maps"
	"net/netip"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"spillway.dev/spillway/internal/dataplane/ebpf/objects"
	"spillway.dev/spillway/internal/dataplane/ebpf/objects/objectstest"
	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/test/await"
	"spillway.dev/spillway/test/must"
)

// ipXfrm runs commands of "ip xfrm" in the test's network namespace.
func ipXfrm(t *testing.T, commands ...string) {
	t.Helper()
	for _, c := range commands {
		if out, err := exec.Command("ip", append([]string{"xfrm"}, strings.Fields(c)...)...).CombinedOutput(); err != nil {
			t.Fatalf("ip xfrm %s: %v: %s", c, err, out)
		}
	}
}

// xfrmState is what the programs know of IPsec policies.
type xfrmState struct {
	flag     bool
	src, dst string
}

func readXfrm(t *testing.T, b *Backend) xfrmState {
	t.Helper()
	var src, dst []string
	ranges, err := objects.ReadClusterRanges(b.m(objects.TCMapClusterRanges))
	must.Do(t, err)
	for key := range maps.Keys(ranges) {
		switch key.Scope {
		case objects.RangeXfrmSrc:
			src = append(src, objects.RangePrefix(key).String())
		case objects.RangeXfrmDst:
			dst = append(dst, objects.RangePrefix(key).String())
		}
	}
	return xfrmState{objectstest.Settings(t, b.objects).Flags&uint32(objects.TCSettingsFlagsSETTING_XFRM) != 0,
		sortedWords(src), sortedWords(dst)}
}

func waitXfrm(t *testing.T, when string, b *Backend, flag bool, src, dst string) {
	t.Helper()
	want := xfrmState{flag, sortedWords(strings.Fields(src)), sortedWords(strings.Fields(dst))}
	await.NoError(t, func() error {
		if got := readXfrm(t, b); got != want {
			return fmt.Errorf("%s: %+v, want %+v", when, got, want)
		}
		return nil
	})
}

// The programs know what IPsec policies select, whenever those come and go, and over
// restarts of the agent.
func TestProgramsKnowIPsecPolicies(t *testing.T) {
	cfg := ownPlace(t)
	stubPrograms(t)
	state := intent.State{Node: intent.Node{
		Name: "node", Addrs: []netip.Addr{netip.MustParseAddr("192.0.2.10")},
		ClusterCIDRs: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8")}, Peers: []netip.Addr{netip.MustParseAddr("192.0.2.11")},
	}}
	open := func() *Backend {
		t.Helper()
		b, err := New(t.Context(), cfg)
		must.Do(t, err)
		return b
	}
	b := open()
	must.Do(t, b.Replace(t.Context(), state))
	waitXfrm(t, "no policy", b, false, "", "")
	ipXfrm(t, "policy add src 10.1.0.0/16 dst 10.2.0.0/16 dir out action block", "policy add src fd01::/64 dst ::/0 dir fwd action block")
	waitXfrm(t, "out and forward", b, true, "10.1.0.0/16 fd01::/64", "10.2.0.0/16 ::/0")
	ipXfrm(t, "policy add src 10.4.0.0/16 dst 10.3.0.0/16 dir in action block")
	waitXfrm(t, "in, and its answers", b, true, "10.1.0.0/16 fd01::/64 10.3.0.0/16 10.4.0.0/16", "10.2.0.0/16 ::/0 10.3.0.0/16 10.4.0.0/16")
	must.Do(t, b.Replace(t.Context(), state))
	must.Do(t, b.Apply(t.Context(), intent.Changes{Node: &state.Node}))
	waitXfrm(t, "after a full sync", b, true, "10.1.0.0/16 fd01::/64 10.3.0.0/16 10.4.0.0/16", "10.2.0.0/16 ::/0 10.3.0.0/16 10.4.0.0/16")
	must.Do(t, b.services.Check())
	select {
	case <-b.Drifted():
		t.Error("what policies select counts as changed by somebody else")
	default:
	}
	must.Do(t, b.Close())

	ipXfrm(t, "policy flush", "policy add src 10.5.0.0/16 dst 10.6.0.0/16 dir out action block")
	b = open()
	waitXfrm(t, "before the first Replace", b, true, "10.1.0.0/16 fd01::/64 10.3.0.0/16 10.4.0.0/16",
		"10.2.0.0/16 ::/0 10.3.0.0/16 10.4.0.0/16")
	must.Do(t, b.Replace(t.Context(), state))
	waitXfrm(t, "others after a restart", b, true, "10.5.0.0/16", "10.6.0.0/16")
	ipXfrm(t, "policy flush")
	waitXfrm(t, "flushed", b, false, "", "")
	if ranges, err := objects.ReadClusterRanges(b.m(objects.TCMapClusterRanges)); err != nil || len(ranges) != 2 {
		t.Errorf("ranges of the cluster: %v, %v", ranges, err)
	}
	must.Do(t, b.Close())
}

func sortedWords(words []string) string {
	return strings.Join(slices.Sorted(slices.Values(words)), " ")
}
