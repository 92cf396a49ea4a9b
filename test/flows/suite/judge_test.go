package suite

import (
	"cmp"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"spillway.dev/spillway/test/flows"
	"spillway.dev/spillway/test/flows/cluster"
	"spillway.dev/spillway/test/flows/probe"
)

// book is an address book of nodes 10.0.0.1 (a) and 10.0.0.2 (b), pods a0
// 10.1.0.2 and b0 10.2.0.2, and client0 10.0.0.9.
type book struct{ mode string } // of all nodes

var addrs = map[string]string{
	"a": "10.0.0.1", "b": "10.0.0.2", "a0": "10.1.0.2", "b0": "10.2.0.2", "client0": "10.0.0.9",
}

func (book) Owns(host string, addr netip.Addr) bool {
	return addrs[cluster.ParseName(host).Base] == addr.String()
}

func (book) NodeOf(host string) string {
	if cluster.ParseName(host).IsClient() {
		return ""
	}
	return host[:1]
}

func (b book) ModeOf(string) string { return cmp.Or(b.mode, "ebpf") }

func (book) Nodes() []string { return []string{"a", "b"} }

const vip = "10.96.0.1:80"

// said is an answer of a server that saw a source.
func said(server, source string) probe.Answer {
	return probe.Answer{Server: server, Source: source + ":4711", Peer: vip}
}

func failure(kind probe.Kind) probe.Answer { return probe.Answer{Err: kind, Detail: "planted"} }

func TestJudge(t *testing.T) {
	ok := said("a0", "10.1.0.2")
	backend := ok
	backend.Peer = "10.1.0.2:8080"
	fromBackend := ok
	fromBackend.From = "10.1.0.2:8080"
	for _, test := range []struct {
		name    string
		from    string // "" is a0
		to      flows.Target
		want    flows.Want
		mode    string // "" is ebpf
		answers []probe.Answer
		wrong   string // part of the finding; "" is none
	}{
		{"nothing asked", "", flows.ClusterIP, flows.Drop, "", nil, "nothing was asked"},
		{"right", "", flows.ClusterIP, flows.OneOf(flows.Kept, "a0"), "", []probe.Answer{ok}, ""},
		{"another server", "", flows.ClusterIP, flows.OneOf(flows.Kept, "b0"), "", []probe.Answer{ok}, "want [b0]"},
		{"backend in getpeername", "", flows.ClusterIP, flows.OneOf(flows.Kept, "a0"), "", []probe.Answer{backend}, "getpeername"},
		{"backend in recvfrom", "", flows.ClusterIP, flows.OneOf(flows.Kept, "a0"), "", []probe.Answer{fromBackend}, "recvfrom"},
		{"one of many fails", "", flows.ClusterIP, flows.OneOf(flows.Kept, "a0"), "",
			[]probe.Answer{ok, failure(probe.Timeout)}, "try 2: timeout"},
		{"spread misses one", "", flows.ClusterIP, flows.Spread(flows.Kept, "a0", "b0"), "", []probe.Answer{ok, ok}, "[b0] never answered"},
		{"the shares that are wanted", "", flows.ClusterIP, flows.InShares(flows.Kept, []int{3, 1, 0}, "a0", "b0", "c0"), "",
			slices.Concat(slices.Repeat([]probe.Answer{ok}, 150), slices.Repeat([]probe.Answer{said("b0", "10.1.0.2")}, 50)), ""},
		{"equal shares, not 3 and 1", "", flows.ClusterIP, flows.InShares(flows.Kept, []int{3, 1}, "a0", "b0"), "",
			slices.Concat(slices.Repeat([]probe.Answer{ok}, 100), slices.Repeat([]probe.Answer{said("b0", "10.1.0.2")}, 100)), "are not in shares"},
		{"a server without a share answers", "", flows.ClusterIP, flows.InShares(flows.Kept, []int{1, 0}, "a0", "b0"), "",
			slices.Concat(slices.Repeat([]probe.Answer{ok}, 199), []probe.Answer{said("b0", "10.1.0.2")}), "are not in shares"},
		{"answer, not a drop", "", flows.ClusterIP, flows.Drop, "", []probe.Answer{ok}, "want silence"},
		{"refusal, not a drop", "", flows.ClusterIP, flows.Drop, "", []probe.Answer{failure(probe.Refused)}, "want silence"},
		{"drop", "", flows.ClusterIP, flows.Drop, "", []probe.Answer{failure(probe.Timeout)}, ""},
		{"silence, not a refusal", "", flows.ClusterIP, flows.Reject, "", []probe.Answer{failure(probe.Timeout)}, "want refused"},
		{"permission, not a refusal", "", flows.ClusterIP, flows.Reject, "", []probe.Answer{failure(probe.Denied)}, "want refused"},
		{"permission, which netfilter refuses a node's process", "a", flows.ClusterIP, flows.Reject, "nftables",
			[]probe.Answer{failure(probe.Denied)}, ""},
		{"permission, which netfilter refuses nobody else", "a0", flows.ClusterIP, flows.Reject, "nftables",
			[]probe.Answer{failure(probe.Denied)}, "want refused"},
		{"permission, for silence", "a", flows.ClusterIP, flows.Drop, "iptables", []probe.Answer{failure(probe.Denied)}, ""},
		{"permission, for silence, of eBPF", "a", flows.ClusterIP, flows.Drop, "", []probe.Answer{failure(probe.Denied)}, "want silence"},
		{"refusal", "", flows.ClusterIP, flows.Reject, "", []probe.Answer{failure(probe.Refused)}, ""},
		{"no node serves it", "", flows.ClusterIP, flows.Unserved, "", []probe.Answer{failure(probe.Unreach)}, ""},
		{"a node serves it", "", flows.ClusterIP, flows.Unserved, "", []probe.Answer{ok}, "want none"},
		{"two servers, not one", "", flows.ClusterIP, flows.Sticky(flows.Kept, "a0", "b0"), "",
			[]probe.Answer{ok, said("b0", "10.1.0.2")}, "one server must answer"},
		{"too few servers", "", flows.ClusterIP, flows.Want{From: []string{"a0", "b0"}, Distinct: 2}, "", []probe.Answer{ok, ok}, "want 2"},
		{"status", "", flows.HealthCheck("a"), flows.Status(200), "", []probe.Answer{{Server: "200"}}, ""},
		{"other status", "", flows.HealthCheck("a"), flows.Status(200), "", []probe.Answer{{Server: "503"}}, "want status 200"},

		{"source kept", "client0", flows.NodePort("a"), flows.OneOf(flows.Kept, "a0"), "", []probe.Answer{said("a0", "10.0.0.9")}, ""},
		{"source lost", "client0", flows.NodePort("a"), flows.OneOf(flows.Kept, "a0"), "",
			[]probe.Answer{said("a0", "10.0.0.1")}, "want the client's"},
		{"source not a node", "client0", flows.NodePort("a"), flows.OneOf(flows.NodeSource, "a0"), "",
			[]probe.Answer{said("a0", "10.0.0.9")}, "want a node's"},
		{"source of a stranger", "client0", flows.NodePort("a"), flows.OneOf(flows.AnySource, "a0"), "", []probe.Answer{said("a0", "10.9.9.9")},
			"want the client's or"},
		{"kept here", "client0", flows.NodePort("a"), flows.OneOf(flows.KeptHere, "a0"), "", []probe.Answer{said("a0", "10.0.0.9")}, ""},
		{"not kept here", "client0", flows.NodePort("a"), flows.OneOf(flows.KeptHere, "a0"), "",
			[]probe.Answer{said("a0", "10.0.0.1")}, "want the client's"},
		{"kept elsewhere", "client0", flows.NodePort("a"), flows.OneOf(flows.KeptHere, "b0"), "",
			[]probe.Answer{said("b0", "10.0.0.9")}, "want a node's"},
		{"masqueraded elsewhere", "client0", flows.NodePort("a"), flows.OneOf(flows.KeptHere, "b0"), "",
			[]probe.Answer{said("b0", "10.0.0.1")}, ""},
		{"kept where nftables delivers to the node itself", "client0", flows.NodePort("a"), flows.OneOf(flows.KeptHere, "a"), "nftables",
			[]probe.Answer{said("a", "10.0.0.9")}, ""},
		{"kept where nftables masquerades", "client0", flows.NodePort("a"), flows.OneOf(flows.KeptHere, "a0"), "nftables",
			[]probe.Answer{said("a0", "10.0.0.9")}, "want a node's"},
	} {
		t.Run(test.name, func(t *testing.T) {
			dst := vip
			j := judge{
				c: book{test.mode}, dst: dst, sticky: stickyServers{},
				f: flows.Flow{From: test.from, To: test.to, Want: test.want},
			}
			if j.f.From == "" {
				j.f.From = "a0"
			}
			got := strings.Join(j.findings(test.answers), "\n")
			if test.wrong == "" && got != "" || !strings.Contains(got, test.wrong) {
				t.Errorf("findings %q, want %q", got, test.wrong)
			}
		})
	}
}

func TestStickyServersAreRememberedWhileAllowed(t *testing.T) {
	s := stickyServers{}
	for _, step := range []struct {
		server  string
		allowed []string
		want    string
	}{
		{"a0", []string{"a0", "b0"}, "a0"},
		{"b0", []string{"a0", "b0"}, "a0"},
		{"b0", []string{"b0", "c0"}, "b0"},
		{"c0", []string{"b0", "c0"}, "b0"},
	} {
		if got := s.keep("key", step.server, step.allowed); got != step.want {
			t.Errorf("%s of %v: %s must answer, want %s", step.server, step.allowed, got, step.want)
		}
	}
	if got := s.keep("other key", "c0", []string{"c0"}); got != "c0" {
		t.Errorf("another flow must be answered by %s, want c0", got)
	}
}
