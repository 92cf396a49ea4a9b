package dnat

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"spillway.dev/spillway/internal/node/kernel/netnstest"
	"spillway.dev/spillway/internal/node/nft"
)

// within limits the wait for an answer that must follow a change of rules. It takes some
// two seconds, and more on a machine that is busy.
const within = time.Minute

// answers holds the reports of a Watcher.
type answers struct {
	t    *testing.T
	w    *Watcher
	news chan bool
	last bool
	why  atomic.Value
}

// watch follows a new network namespace, which the test is in.
func watch(t *testing.T, cfg Config) *answers {
	t.Helper()
	a := &answers{t: t, news: make(chan bool, 100)}
	w, err := Watch(cfg, func(may bool, reason string) {
		a.why.Store(reason)
		a.news <- may
	})
	if err != nil {
		t.Fatal(err)
	}
	a.w = w
	t.Cleanup(func() {
		if err := w.Close(); err != nil {
			t.Error(err)
		}
	})
	select {
	case a.last = <-a.news:
	default:
		t.Fatal("Watch returned before its first answer")
	}
	return a
}

// update waits for an update that begins after the call: the channel holds one request.
func (a *answers) update() {
	for range 3 {
		a.w.kick <- struct{}{}
	}
}

// want waits for an answer.
func (a *answers) want(when string, may bool) {
	a.t.Helper()
	deadline := time.After(within)
	for a.last != may {
		select {
		case a.last = <-a.news:
		case <-deadline:
			a.t.Fatalf("%s: may translate %v (%v), want %v within %v", when, a.last, a.why.Load(), may, within)
		}
	}
}

// keep wants no other answer for a while.
func (a *answers) keep(when string, may bool) {
	a.t.Helper()
	a.want(when, may)
	select {
	case a.last = <-a.news:
		a.t.Fatalf("%s: may translate %v (%v), want it to stay %v", when, a.last, a.why.Load(), may)
	case <-time.After(3 * defaultPoll / 2):
	}
}

// shell runs a script in the test's network namespace.
func shell(t *testing.T, script string) {
	t.Helper()
	if out, err := exec.Command("bash", "-ec", script).CombinedOutput(); err != nil {
		t.Fatalf("%s: %v: %s", script, err, out)
	}
}

// portmapChains is a hostPort as the CNI plugin portmap writes it.
const portmapChains = `IPT-restore --noflush <<'END'
*nat
:CNI-HOSTPORT-DNAT - [0:0]
:CNI-HOSTPORT-SETMARK - [0:0]
:CNI-HOSTPORT-MASQ - [0:0]
:CNI-DN-4d0e0f1e7ac3b5ae0a1b2 - [0:0]
-A PREROUTING -m addrtype --dst-type LOCAL -j CNI-HOSTPORT-DNAT
-A OUTPUT -m addrtype --dst-type LOCAL -j CNI-HOSTPORT-DNAT
-A POSTROUTING -m comment --comment "CNI portfwd requiring masquerade" -j CNI-HOSTPORT-MASQ
-A CNI-HOSTPORT-SETMARK -m comment --comment "CNI portfwd masquerade mark" -j MARK --set-xmark 0x2000/0x2000
-A CNI-HOSTPORT-MASQ -m mark --mark 0x2000/0x2000 -j MASQUERADE
-A CNI-HOSTPORT-DNAT -p tcp -m comment --comment "dnat name: \"cbr0\" id: \"4d0e\"" -m multiport --dports 8211 -j CNI-DN-4d0e0f1e7ac3b5ae0a1b2
-A CNI-DN-4d0e0f1e7ac3b5ae0a1b2 -p tcp -m tcp --dport 8211 -j DNAT --to-destination ADDR
COMMIT
END
`

const (
	removeHostPort = `IPT -t nat -F CNI-DN-4d0e0f1e7ac3b5ae0a1b2`
	masquerade     = `IPT -t nat -A POSTROUTING -j MASQUERADE --random-fully`
)

func iptables(program, script string) string {
	addr := "10.244.0.2:11211"
	if strings.HasPrefix(program, "ip6") {
		addr = "[fd44::2]:11211"
	}
	return strings.NewReplacer("IPT", program, "ADDR", addr).Replace(script)
}

// Source NAT, which every node has, is no reason; a hostPort is, while it is there.
func TestHostPortsOfIptables(t *testing.T) {
	for _, program := range []string{"iptables-nft", "iptables-legacy", "ip6tables-nft", "ip6tables-legacy"} {
		t.Run(program, func(t *testing.T) {
			enter(t)
			a := watch(t, Config{})
			a.want("no rules", false)
			shell(t, iptables(program, masquerade))
			a.keep("masquerade", false)
			shell(t, iptables(program, portmapChains))
			a.keep("hostPort", true)
			shell(t, iptables(program, removeHostPort))
			a.keep("hostPort removed", false)
			shell(t, iptables(program, portmapChains))
			a.want("hostPort again", true)
			shell(t, iptables(program, "IPT -t nat -F"))
			a.want("table flushed", false)
			shell(t, iptables(program, "IPT -t nat -A PREROUTING -p udp -j REDIRECT --to-ports 53"))
			a.want("redirect", true)
		})
	}
}

func TestRulesOfNftables(t *testing.T) {
	enter(t)
	const chain = "add table inet x; add chain inet x pre { type nat hook prerouting priority -100; }; "
	nft := func(script string) { shell(t, "nft -f - <<'END'\n"+script+"\nEND") }
	nft("table ip early { chain pre { type nat hook prerouting priority -100; tcp dport 80 dnat to 10.0.0.1:80; }; }")
	a := watch(t, Config{})
	a.want("a rule from before", true)
	nft("delete table ip early")
	a.want("its table deleted", false)
	nft("table inet s { chain post { type nat hook postrouting priority 100; ip saddr 10.0.0.0/8 snat ip to 192.0.2.1; masquerade; }; }")
	nft("table inet s { set ports { type inet_service; }; chain f { type filter hook input priority 0; ct state invalid drop; }; }; add " +
		"element inet s ports { 1, 2 }")
	a.keep("source NAT and filters", false)
	for name, rule := range map[string]string{
		"dnat": "tcp dport 80 dnat ip to 10.0.0.1:80", "dnat by map": "dnat ip to tcp dport map { 80 : 10.0.0.1, 81 : 10.0.0.2 }",
		"redirect": "tcp dport 80 redirect to :8080", "dnat of a prefix": "dnat ip prefix to ip daddr map { 192.0.2.0/24 : 10.0.0.0/24 }",
	} {
		nft(chain + "add rule inet x pre " + rule)
		a.want(name, true)
		nft("flush chain inet x pre")
		a.want(name+" flushed", false)
		nft("delete table inet x")
	}
	nft(chain + "add rule inet x pre tcp dport 80 dnat ip to 10.0.0.1")
	nft("add rule inet x pre tcp dport 81 dnat ip to 10.0.0.1")
	a.want("two rules", true)
	shell(t, "nft delete rule inet x pre handle $(nft -a list chain inet x pre | sed -n 's/.*dport 80.*handle //p')")
	a.keep("one of two deleted", true)
	nft("flush ruleset")
	a.want("ruleset flushed", false)
}

// Connections outlive the rules that have translated them.
func TestConnectionsOutliveRules(t *testing.T) {
	enter(t)
	var exist atomic.Bool
	var calls atomic.Pointer[[]time.Time]
	calls.Store(&[]time.Time{})
	var fails atomic.Pointer[error]
	const recheck = 300 * time.Millisecond
	a := watch(t, Config{Recheck: recheck, Poll: 100 * time.Millisecond, Translated: func(context.Context) (bool, error) {
		now := append(slices.Clone(*calls.Load()), time.Now())
		calls.Store(&now)
		if err := fails.Load(); err != nil {
			return false, *err
		}
		return exist.Load(), nil
	}})
	a.want("nothing", false)
	shell(t, iptables("iptables-nft", portmapChains))
	a.want("hostPort", true)
	exist.Store(true)
	asked := len(*calls.Load())
	a.update()
	if len(*calls.Load()) > asked {
		t.Error("conntrack is read though rules translate")
	}
	shell(t, iptables("iptables-nft", removeHostPort))
	a.keep("hostPort removed, a connection goes on", true)
	reads := (*calls.Load())[asked:]
	for i := range len(reads) - 1 {
		if pause, want := reads[i+1].Sub(reads[i]), time.Duration(min(1<<i, maxRechecks))*recheck; pause < want {
			t.Errorf("conntrack was read again after %v, want %v at least", pause, want)
		}
	}
	if len(reads) == 0 {
		t.Error("conntrack was not read")
	}
	exist.Store(false)
	a.want("the connection is over", false)
	exist.Store(true)
	a.want("a connection that no rule here has made", true)
	exist.Store(false)
	a.want("it is over", false)
	err := errors.New("no answer")
	fails.Store(&err)
	a.want("conntrack cannot be read", true)
}

// Notifications that arrived too fast may include a rule that translates.
func TestLostNewsCount(t *testing.T) {
	enter(t)
	hold := make(chan struct{})
	var calls atomic.Int32
	got := make(chan bool, 10)
	w, err := Watch(Config{}, func(may bool, reason string) {
		if calls.Add(1) == 2 {
			<-hold // the watch does not read its socket meanwhile
		}
		got <- may
	})
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	next := func(when string, want bool) {
		t.Helper()
		select {
		case may := <-got:
			if may != want {
				t.Errorf("%s: may translate %v", when, may)
			}
		case <-time.After(within):
			t.Fatalf("%s: no answer", when)
		}
	}
	next("no rules", false)
	shell(t, "nft 'add table ip x; add chain ip x c { type nat hook output priority -100; }; add rule ip x c tcp dport 1 redirect to :2'")
	rules := "add table ip y\nadd set ip y s { type ipv4_addr . inet_service; }\n"
	for range 8 {
		var elements strings.Builder
		for i := range 65536 {
			if i > 0 {
				elements.WriteString(", ")
			}
			elements.WriteString("10.0." + strconv.Itoa(i>>8) + "." + strconv.Itoa(i&255) + " . 80")
		}
		cmd := exec.Command("nft", "-f", "-")
		cmd.Stdin = strings.NewReader(rules + "flush set ip y s\nadd element ip y s { " + elements.String() + " }\n")
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
	}
	shell(t, "nft flush table ip x") // this notification is lost
	close(hold)
	next("a rule", true)
	next("lost, and read again", false)
}

// A rule that the watcher cannot judge counts.
func TestMalformedRules(t *testing.T) {
	if !nftRuleTranslates(nft.ReadRule(nil)) {
		t.Error("a message without a header")
	}
	attr := func(typ uint16, value string) string {
		n := len(value) + 4
		return string([]byte{byte(n), byte(n >> 8), byte(typ), byte(typ >> 8)}) + value + strings.Repeat("\x00", -n&3)
	}
	nat := func(data string) []byte {
		e := attr(unix.NFTA_EXPR_NAME, "nat\x00") + attr(unix.NFTA_EXPR_DATA|unix.NLA_F_NESTED, data)
		return []byte("\x02\x00\x00\x00" + attr(unix.NFTA_RULE_EXPRESSIONS|unix.NLA_F_NESTED, attr(unix.NFTA_LIST_ELEM, e)))
	}
	for want, list := range map[bool][]string{
		true:  {attr(unix.NFTA_NAT_TYPE, "\x00\x00\x00\x01"), "", attr(unix.NFTA_NAT_TYPE, "\x00")},
		false: {attr(unix.NFTA_NAT_TYPE, "\x00\x00\x00\x00")},
	} {
		for _, data := range list {
			if got := nftRuleTranslates(nft.ReadRule(nat(data))); got != want {
				t.Errorf("nat with %q: %v", data, got)
			}
		}
	}
}

func FuzzNftRule(f *testing.F) {
	f.Add([]byte("\x02\x00\x00\x00\x08\x00\x04\x00\x04\x00\x01\x00"))
	f.Fuzz(func(_ *testing.T, msg []byte) { nftRuleTranslates(nft.ReadRule(msg)) })
}

// enter makes the test parallel, since the tests here wait for a poll.
func enter(t *testing.T) {
	t.Helper()
	t.Parallel()
	netnstest.Enter(t)
}

// TestMain sets a lock of its own: other programs may hold the machine's.
func TestMain(m *testing.M) {
	lock := filepath.Join(os.TempDir(), fmt.Sprintf("spillway-dnat-%d.lock", os.Getpid()))
	_ = os.Setenv("XTABLES_LOCKFILE", lock) // the name is valid
	code := m.Run()
	os.Remove(lock)
	os.Exit(code)
}
