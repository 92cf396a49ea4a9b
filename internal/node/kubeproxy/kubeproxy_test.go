package kubeproxy

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"spillway.dev/spillway/internal/node/kernel/netnstest"
)

// asOther runs the test's binary as another process, which does the work that the
// variable names and waits for the end of its input.
const asOther = "SPILLWAY_TEST_KUBEPROXY"

func TestMain(m *testing.M) {
	if what, ok := os.LookupEnv(asOther); ok {
		if what != "" {
			if _, err := net.Listen("tcp", what); err != nil {
				fmt.Println(err)
				os.Exit(1)
			}
		}
		fmt.Println("ready")
		_, _ = bufio.NewReader(os.Stdin).ReadString('\n')
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// other starts another process under a name, in the namespace of the test, and
// returns how to end it.
func other(t *testing.T, name, listen string) (end func()) {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	link := filepath.Join(t.TempDir(), name) // the kernel names a process by the file that was called
	if err := os.Symlink(self, link); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(link)
	cmd.Env = append(os.Environ(), asOther+"="+listen)
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if line, _ := bufio.NewReader(out).ReadString('\n'); line != "ready\n" {
		t.Fatalf("the other process says %q", line)
	}
	end = func() { in.Close(); _ = cmd.Wait() }
	t.Cleanup(end)
	return end
}

func run(t *testing.T, in string, argv ...string) string {
	t.Helper()
	cmd := exec.Command(argv[0], argv[1:]...)
	cmd.Stdin = strings.NewReader(in)
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %v: %s", argv, err, out)
	}
	return string(out)
}

func enter(t *testing.T) {
	t.Helper()
	netnstest.Enter(t)
	run(t, "", "ip", "link", "set", "lo", "up")
	// Not the machine's lock: other programs may hold it.
	t.Setenv("XTABLES_LOCKFILE", filepath.Join(t.TempDir(), "xtables.lock"))
}

// rules are those of a kube-proxy and, marked by "stays", of other programs.
const rules = `*mangle
:KUBE-PROXY-CANARY - [0:0]
:KUBE-KUBELET-CANARY - [0:0] stays
COMMIT
*nat
:KUBE-SERVICES - [0:0]
:KUBE-NODEPORTS - [0:0]
:KUBE-POSTROUTING - [0:0]
:KUBE-MARK-MASQ - [0:0]
:KUBE-SVC-AAAA - [0:0]
:KUBE-SEP-AAAA - [0:0]
:KUBE-HOSTS - [0:0] stays
-A PREROUTING -m comment --comment "kubernetes service portals -j of kube-proxy" -j KUBE-SERVICES
-A OUTPUT -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A PREROUTING -p tcp -m tcp --dport 99 -j KUBE-HOSTS stays
-A KUBE-HOSTS -j RETURN stays
-A POSTROUTING -m comment --comment "kubernetes postrouting rules" -j KUBE-POSTROUTING
-A KUBE-SERVICES -d %[1]s -p tcp -m tcp --dport 80 -j KUBE-SVC-AAAA
-A KUBE-SVC-AAAA -j KUBE-MARK-MASQ
-A KUBE-SVC-AAAA -j KUBE-SEP-AAAA
-A KUBE-SEP-AAAA -p tcp -m tcp -j DNAT --to-destination %[2]s
COMMIT
*filter
:KUBE-FIREWALL - [0:0] stays
:KUBE-FORWARD - [0:0]
:KUBE-EXTERNAL-SERVICES - [0:0]
-A INPUT -m conntrack --ctstate NEW -m comment --comment "kubernetes externally-visible service portals" -j KUBE-EXTERNAL-SERVICES
-A INPUT -j KUBE-FIREWALL stays
-A FORWARD -m comment --comment "kubernetes forwarding rules" -j KUBE-FORWARD
-A KUBE-FORWARD -j ACCEPT
COMMIT
`

// load loads rules and returns those that have to stay.
func load(t *testing.T, program, text string) (stay []string) {
	t.Helper()
	var in strings.Builder
	for line := range strings.Lines(text) {
		line = strings.TrimSuffix(line, "\n")
		kept, stays := strings.CutSuffix(line, " stays")
		if stays {
			name, _, _ := strings.Cut(kept, " - ")
			stay = append(stay, name)
		}
		in.WriteString(kept + "\n")
	}
	run(t, in.String(), program+"-restore", "--noflush", "--wait")
	return stay
}

func eachProgram(t *testing.T, test func(t *testing.T, program, text string)) {
	for _, program := range []string{"iptables-legacy", "ip6tables-legacy", "iptables-nft", "ip6tables-nft"} {
		t.Run(program, func(t *testing.T) {
			enter(t)
			a, b := "10.96.0.1/32", "10.1.0.1:80"
			if strings.HasPrefix(program, "ip6") {
				a, b = "fd96::1/128", "[fd44::1]:80"
			}
			test(t, program, fmt.Sprintf(rules, a, b))
		})
	}
}

func TestRulesOfKubeProxyGoAndThoseOfOthersStay(t *testing.T) {
	eachProgram(t, func(t *testing.T, program, text string) {
		stay := load(t, program, text)
		left, err := Detect(t.Context())
		if err != nil || left.Empty() || !strings.Contains(left.String(), "9 chains of "+program) {
			t.Fatalf("found %q, error %v", left, err)
		}
		if err := left.Remove(t.Context()); err != nil {
			t.Fatal(err)
		}
		saved := run(t, "", program+"-save")
		for _, s := range stay {
			if !strings.Contains(saved, s) {
				t.Errorf("%q is gone, which is not kube-proxy's", s)
			}
		}
		if n := strings.Count(saved, "KUBE-"); n != 6 {
			t.Errorf("%d mentions of chains are left, want those 6 of others in\n%s", n, saved)
		}
		if left, err = Detect(t.Context()); err != nil || !left.Empty() {
			t.Errorf("after removal found %q, error %v", left, err)
		}
	})
}

func TestAChainThatSomebodyElseUsesStays(t *testing.T) {
	eachProgram(t, func(t *testing.T, program, text string) {
		load(t, program, text)
		load(t, program, "*nat\n:CNI-HOSTPORT - [0:0]\n-A CNI-HOSTPORT -j KUBE-MARK-MASQ\nCOMMIT\n")
		left, err := Detect(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		err = left.Remove(t.Context())
		if err == nil || !strings.Contains(err.Error(),
			"chain KUBE-MARK-MASQ of table nat: the chain stays, since a rule of chain CNI-HOSTPORT") {
			t.Errorf("error %v, want one that names the chain and who uses it", err)
		}
		if saved := run(t, "", program+"-save"); !strings.Contains(saved, "-A CNI-HOSTPORT -j KUBE-MARK-MASQ") ||
			strings.Contains(saved, "KUBE-SVC") {
			t.Errorf("left:\n%s", saved)
		}
	})
}

func TestTablesOfKubeProxyGoAndThoseOfOthersStay(t *testing.T) {
	enter(t)
	run(t, "table ip kube-proxy { chain c { type nat hook prerouting priority 0; }; }\ntable ip6 kube-proxy {}\n"+
		"table inet kube-proxy {}\ntable ip mine {}\n", "nft", "-f", "-")
	left, err := Detect(t.Context())
	if err != nil || left.String() != "nft table ip kube-proxy, nft table ip6 kube-proxy" {
		t.Fatalf("found %q, error %v", left, err)
	}
	for range 2 { // the second time there are no rules
		if err := left.Remove(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if got := run(t, "", "nft", "list", "tables"); got != "table inet kube-proxy\ntable ip mine\n" {
		t.Errorf("left %q", got)
	}
}

func TestTranslationIsKeptUntilReleased(t *testing.T) {
	enter(t)
	for range 2 { // twice is as good as once
		if err := KeepNAT(); err != nil {
			t.Fatal(err)
		}
	}
	if kept, err := NATKept(); !kept || err != nil {
		t.Errorf("kept: %v, error %v", kept, err)
	}
	for range 2 {
		if err := ReleaseNAT(); err != nil {
			t.Fatal(err)
		}
	}
	if got := run(t, "", "nft", "list", "ruleset"); got != "" {
		t.Errorf("left %q", got)
	}
}

func TestARunningKubeProxyIsSeen(t *testing.T) {
	enter(t)
	sees := func(want string) {
		t.Helper()
		if sign, err := Running(); err != nil || want == "" && sign != "" || !strings.Contains(sign, want) {
			t.Errorf("sign %q, error %v, want %q", sign, err, want)
		}
	}
	sees("")
	end := other(t, "kube-proxy", "")
	sees("process ")
	end()
	sees("")
	own, err := net.Listen("tcp", "127.0.0.1:10256")
	if err != nil {
		t.Fatal(err)
	}
	sees("") // it is the agent's own
	own.Close()
	end = other(t, "k3s", "127.0.0.1:10256")
	sees("another process has port 10256")
	end()
	end = other(t, "k3s", "127.0.0.1:10257")
	sees("")
	end()
}

func TestAKubeProxyOfAnotherNamespaceDoesNotCount(t *testing.T) {
	enter(t)
	other(t, "kube-proxy", "127.0.0.1:10256")
	netnstest.Enter(t)
	if sign, err := Running(); sign != "" || err != nil {
		t.Errorf("sign %q, error %v", sign, err)
	}
}

func TestIPVSIsNamedAndLeftAlone(t *testing.T) {
	enter(t)
	run(t, "", "ip", "link", "add", "kube-ipvs0", "type", "bridge") // kube-proxy makes a dummy device, which this kernel may lack
	run(t, "table ip kube-proxy {}", "nft", "-f", "-")
	left, err := Detect(context.Background())
	if !errors.Is(err, errIPVS) || !left.Empty() {
		t.Errorf("found %q, error %v", left, err)
	}
}
