package trace

import (
	"bytes"
	"net/netip"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/charmbracelet/x/ansi"

	"spillway.dev/spillway/internal/dataplane/ebpf/inspect"
	"spillway.dev/spillway/internal/diagnosis/drops"
	"spillway.dev/spillway/internal/page"
)

// Each verdict that decides has a step of the report.
func TestEachDecisionHasAStep(t *testing.T) {
	text, err := os.ReadFile("../../../bpf/abi.h")
	if err != nil {
		t.Fatal(err)
	}
	_, text, _ = bytes.Cut(text, []byte("\nenum verdict {\n"))
	text, _, _ = bytes.Cut(text, []byte("\tVERDICTS,\n"))
	decides := map[string]bool{}
	for _, match := range regexp.MustCompile(`(?m)^\t([A-Z_]+)`).FindAllStringSubmatch(string(text), -1) {
		name := strings.ToLower(match[1])
		m := meaningOf(name)
		decides[name] = m.state != Passed
		if (m.step == "") == (decides[name] && name != "pass_other") {
			t.Errorf("verdict %s is %s at step %q", name, m.state, m.step)
		}
		if m.step != "" && m.step != stepSocket && !slices.Contains(order, m.step) {
			t.Errorf("verdict %s: no step %q", name, m.step)
		}
	}
	for name := range stepOf {
		if !decides[name] {
			t.Errorf("%s has a step, and is no verdict", name)
		}
	}
}

// A verdict that ends the connection decides, and one that says something beside does not.
func TestTheDecisiveVerdict(t *testing.T) {
	for want, verdicts := range map[string][]string{
		"translated_direct": {"translated_direct", "flow_created"},
		"drop_snat_ports":   {"flow_replaced", "drop_snat_ports"},
		"pass_conntrack":    {"pass_conntrack"},
		"new_in_the_future": {"new_in_the_future"},
		"":                  nil,
	} {
		if got, _ := decisive(verdicts); got != want {
			t.Errorf("%v: %q, want %q", verdicts, got, want)
		}
	}
	if _, m := decisive([]string{"new_in_the_future"}); !strings.Contains(m.text, "new_in_the_future") {
		t.Errorf("%+v", m)
	}
}

// The text says who answers the client, and why it is not the endpoint's node.
func TestDSRRepliesInWords(t *testing.T) {
	for want, flags := range map[string][]string{
		"": {"snat"}, "no reply passes this node": {"dsr"}, "this node answers the client itself": {"dsr", "to_pod"},
	} {
		if got := replies(&inspect.FlowEntry{Flags: flags}); !strings.Contains(got, want) || (got == "") != (want == "") {
			t.Errorf("%v: %q", flags, got)
		}
	}
	now := time.Now()
	broken := &inspect.DSRPath{Failures: 6, Failed: now.Add(-20 * time.Second), Broken: true}
	if why, state := undirected(broken, now); state != Doubt || !strings.Contains(why, "clients repeated 6 SYNs, the last 20 s ago") ||
		!strings.Contains(why, "again in 40 s") {
		t.Errorf("%s: %s", state, why)
	}
	for _, path := range []*inspect.DSRPath{nil, {Trusted: true}} {
		if why, state := undirected(path, now); state != Passed || !strings.Contains(why, "clients in the cluster") {
			t.Errorf("%s: %s", state, why)
		}
	}
}

func TestTheOtherEndOfASocket(t *testing.T) {
	const table = `  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 00000000:9C40 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 1
   1: 0300F40A:9C40 0201F40A:1F90 02 00000000:00000000 00:00000000 00000000     0        0 2
   2: 000080FE00000000FF005450B6AD1DFE:9C41 B80D0120000000000000000001000000:0050 02 0 0 0 0 0 3
`
	for port, want := range map[int]string{40000: "10.244.1.2:8080", 40001: "[2001:db8::1]:80"} {
		if got, ok := remoteOf([]byte(table), port); !ok || got != netip.MustParseAddrPort(want) {
			t.Errorf("port %d: %s, want %s", port, got, want)
		}
	}
	for _, text := range []string{"", "garbage", "0300F40A", ":", "XX:0050", "0300F4:0050", " 0: 0:9C40"} {
		if got, ok := remoteOf([]byte(text), 40000); ok {
			t.Errorf("%q: %s", text, got)
		}
	}
}

func TestRulesOfAnAddress(t *testing.T) {
	const save = `*nat
:KUBE-SERVICES - [0:0]
:KUBE-SVC-A - [0:0]
-A KUBE-SERVICES -d 10.96.0.10/32 -p tcp -m tcp --dport 80 -j KUBE-SVC-A
-A KUBE-SERVICES -d 10.96.0.10/32 -p udp -m udp --dport 80 -j KUBE-SVC-B
-A KUBE-SERVICES -d 10.96.0.11/32 -p tcp -m tcp --dport 80 -j KUBE-SVC-C
-A KUBE-SVC-A -j KUBE-SEP-A
COMMIT
`
	got := strings.Join(rulesFor([]byte(save), netip.MustParseAddrPort("10.96.0.10:80"), "tcp"), "\n")
	if want := "-A KUBE-SERVICES -d 10.96.0.10/32 -p tcp -m tcp --dport 80 -j KUBE-SVC-A\n-A KUBE-SVC-A -j KUBE-SEP-A"; got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
}

// example has hostile names wherever a name of others is printed.
func example() *Report {
	const nasty = "evil\x1b[2J\nname"
	return &Report{
		Source: nasty, Destination: "10.96.0.10", DestinationPort: 80, ProtocolName: "tcp", ClientPort: 40000,
		Decision: "dropped: " + strings.Repeat("many words ", 20), Refused: true,
		Steps: []Step{
			{Name: stepProgram, Lookup: "eth0 ingress", Found: nasty, Follows: "it runs first", State: Doubt},
			{Name: stepRanges, Lookup: "source_ranges", Found: "not in: 192.0.2.0/24", Follows: "dropped", State: Refused},
		},
		Probe: &Probe{
			Result: "no answer", Conclusion: nasty, Counters: map[string]uint64{"drop_source_range": 1},
			Drops: []drops.Drop{{Reason: "NETFILTER_DROP", Meaning: nasty,
				Place: drops.Place{Namespace: nasty, Pod: nasty, Table: nasty, Chain: "in"}}},
		},
		Notes: []string{nasty},
	}
}

func TestTheTextFitsAndIsHarmless(t *testing.T) {
	for _, width := range []int{40, 60, 80, 120} {
		var out bytes.Buffer
		if err := example().Write(&page.Page{Writer: &out, Width: width}); err != nil {
			t.Fatal(err)
		}
		for line := range strings.Lines(out.String()) {
			if n := ansi.StringWidth(strings.TrimSuffix(line, "\n")); n > width || strings.HasSuffix(line, " \n") {
				t.Errorf("%d columns of %d: %q", n, width, line)
			}
		}
		if strings.ContainsRune(out.String(), '\x1b') || !strings.Contains(out.String(), `evil\x1b[2J\nname`) {
			t.Errorf("a terminal acts on %q", out.String())
		}
	}
	var plain, colored bytes.Buffer
	_ = example().Write(&page.Page{Writer: &plain, Width: 80})
	_ = example().Write(&page.Page{Writer: &colored, Width: 80, Color: true})
	if ansi.Strip(colored.String()) != plain.String() || !strings.Contains(colored.String(), "\x1b") {
		t.Errorf("colors change the text: %q", &colored)
	}
}
