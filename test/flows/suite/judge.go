package suite

import (
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"spillway.dev/spillway/test/flows"
	"spillway.dev/spillway/test/flows/cluster"
	"spillway.dev/spillway/test/flows/probe"
)

// stickyServers holds the server that answered each sticky flow first.
type stickyServers map[string]string

var stickyLock sync.Mutex

// keep returns the server that must answer: the remembered one as long as it is
// allowed, else the new one, which is remembered.
func (s stickyServers) keep(key, server string, allowed []string) string {
	stickyLock.Lock()
	defer stickyLock.Unlock()
	if have := s[key]; have != "" && slices.Contains(allowed, have) {
		return have
	}
	s[key] = server
	return server
}

// judge says what is wrong with answers.
type judge struct {
	c      addressBook
	f      flows.Flow
	dst    string
	key    string
	sticky stickyServers
	masq   bool // the cluster's own rules masquerade what leaves the pod network
}

// addressBook is what a judge must know of the cluster.
type addressBook interface {
	Owns(host string, addr netip.Addr) bool
	NodeOf(host string) string
	ModeOf(node string) string
	Nodes() []string
}

func (s *Suite) judge(q question) judge {
	return judge{
		c: s.Cluster, f: q.f, dst: q.dst, sticky: q.r.sticky, masq: s.Cluster.Spec.Masquerade,
		key: fmt.Sprintf("%s %s %s", q.f.From, q.f.To, q.combo),
	}
}

// report fails t for everything that is wrong, at most a few lines.
func (j judge) report(t *testing.T, answers []probe.Answer) {
	t.Helper()
	wrong := j.findings(answers)
	for i, w := range wrong {
		if i == 3 {
			t.Errorf("... and %d more", len(wrong)-i)
			return
		}
		t.Error(w)
	}
}

// findings lists everything that is wrong.
func (j judge) findings(answers []probe.Answer) []string {
	var wrong []string
	if len(answers) == 0 {
		return []string{fmt.Sprintf("%s: nothing was asked", j.dst)}
	}
	for i, a := range answers {
		if w := j.one(a); w != "" {
			wrong = append(wrong, fmt.Sprintf("%s, try %d: %s", j.dst, i+1, w))
		}
	}
	if len(wrong) > 0 || j.f.Want.Kind != flows.Answered {
		return wrong
	}
	want := j.f.Want
	if missed := missing(want.From, answers); want.Spread && len(missed) > 0 {
		wrong = append(wrong, fmt.Sprintf("%s: %v never answered in %d tries; %v", j.dst, missed, len(answers), counts(answers)))
	}
	if want.Shares != nil {
		if x, limit := chiSquare(counts(answers), want.From, want.Shares), chiSquareLimit(len(want.From)); x > limit {
			wrong = append(wrong, fmt.Sprintf("%s: %v are not in shares %v: χ² is %.1f, at most %.1f is allowed", j.dst,
				counts(answers), want.Shares, x, limit))
		}
	}
	if n := len(counts(answers)); n < want.Distinct {
		wrong = append(wrong, fmt.Sprintf("%s: %d servers answered %d tries, want %d", j.dst, n, len(answers), want.Distinct))
	}
	if (want.Same || want.Sticky || j.f.SameSocket) && len(counts(answers)) > 1 {
		wrong = append(wrong, fmt.Sprintf("%s: one server must answer all tries: %v", j.dst, counts(answers)))
	}
	if want.Sticky {
		if keep := j.sticky.keep(j.key, answers[0].Server, want.From); keep != answers[0].Server {
			wrong = append(wrong, fmt.Sprintf("%s: %s answers, but %s did before and is still there", j.dst, answers[0].Server, keep))
		}
	}
	return wrong
}

func counts(answers []probe.Answer) map[string]int {
	n := map[string]int{}
	for _, a := range answers {
		n[a.Server]++
	}
	return n
}

// one judges one answer; "" is right.
func (j judge) one(a probe.Answer) string {
	want := j.f.Want
	got := fmt.Sprintf("answer of %s", a.Server)
	if a.Err != probe.OK {
		got = fmt.Sprintf("%s (%s)", a.Err, a.Detail)
	}
	switch want.Kind {
	case flows.Rejected:
		if a.Err != probe.Refused && !j.denied(a) {
			return got + ", want refused"
		}
		return ""
	case flows.Dropped:
		if a.Err != probe.Timeout && !j.denied(a) {
			return got + ", want silence"
		}
		return ""
	case flows.NotServed:
		if a.Err == probe.OK {
			return got + ", want none"
		}
		return ""
	}
	if want.Status != 0 {
		if a.Server != strconv.Itoa(want.Status) {
			return got + fmt.Sprintf(", want status %d", want.Status)
		}
		return ""
	}
	if !slices.Contains(want.From, a.Server) {
		return got + fmt.Sprintf(", want %v", want.From)
	}
	if w := j.peer(a); w != "" {
		return w
	}
	return j.source(a)
}

// netfilter reports whether the rules of a node's dataplane are netfilter's.
func (j judge) netfilter(node string) bool {
	mode := j.c.ModeOf(node)
	return mode == "nftables" || mode == "iptables"
}

// denied reports whether netfilter dropped a datagram in the sender's own
// system call: what the output hook takes out, refused or not, sendmsg reports
// as EPERM to a process of the node.
func (j judge) denied(a probe.Answer) bool {
	from := cluster.ParseName(j.f.From)
	return a.Err == probe.Denied && j.netfilter(j.c.NodeOf(j.f.From)) && !from.IsPod() && !from.IsClient()
}

// peer checks that the client sees the address it asked, never the server's.
func (j judge) peer(a probe.Answer) string {
	if !j.f.Unconnected && a.Peer != j.dst {
		return fmt.Sprintf("getpeername says %q, want %s", a.Peer, j.dst)
	}
	if a.From != "" && a.From != j.dst {
		return fmt.Sprintf("recvfrom says %q, want %s", a.From, j.dst)
	}
	return ""
}

// source checks whose address the server saw.
func (j judge) source(a probe.Answer) string {
	from, err := netip.ParseAddrPort(a.Source)
	if err != nil {
		return fmt.Sprintf("source %q is no address", a.Source)
	}
	own := j.c.Owns(j.f.From, from.Addr())
	if j.masq && cluster.ParseName(j.f.From).IsPod() && j.f.To.Kind != flows.ToClusterIP {
		// A pod's packet to an address outside the pod network is the CNI's to
		// masquerade.
		own = own || j.c.Owns(j.c.NodeOf(j.f.From), from.Addr())
	}
	if j.leavesPodNetwork(a.Server) && !j.c.Owns(j.c.NodeOf(j.f.From), from.Addr()) {
		return fmt.Sprintf("%s saw source %s, want the client's node's: a CNI that masquerades does so", a.Server, a.Source)
	}
	node := slices.ContainsFunc(j.c.Nodes(), func(n string) bool { return j.c.Owns(n, from.Addr()) })
	ok, want := own || node, "the client's or a node's address"
	switch kind := j.sourceKind(a.Server); kind {
	case flows.Kept:
		ok, want = own, "the client's address"
	case flows.NodeSource:
		ok, want = node, "a node's address"
	}
	if !ok {
		return fmt.Sprintf("%s saw source %s, want %s", a.Server, a.Source, want)
	}
	return ""
}

// leavesPodNetwork reports whether a pod's packet to a server is the CNI's to
// masquerade: the server is on the network of another node.
func (j judge) leavesPodNetwork(server string) bool {
	name, _, _ := strings.Cut(server, ":")
	from := j.f.From
	return j.masq && cluster.ParseName(from).IsPod() && !cluster.ParseName(name).IsPod() &&
		j.c.NodeOf(from) != j.c.NodeOf(name)
}

// sourceKind works KeptHere out for a server.
func (j judge) sourceKind(server string) flows.Source {
	if j.f.Want.Source != flows.KeptHere {
		return j.f.Want.Source
	}
	receiver := j.f.To.Node
	if receiver == "" {
		receiver = j.c.NodeOf(j.f.From)
	}
	if receiver == "" {
		receiver = "a" // clients route cluster IPs to it
	}
	name, _, _ := strings.Cut(server, ":")
	here := j.c.NodeOf(name) == receiver
	if here && (!j.netfilter(receiver) || !cluster.ParseName(name).IsPod()) {
		// What a node's own process gets leaves by no device, and netfilter
		// masquerades only what does.
		return flows.Kept
	}
	return flows.NodeSource
}
