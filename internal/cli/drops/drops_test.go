package drops

import (
	"bytes"
	"net/netip"
	"strings"
	"testing"

	"spillway.dev/spillway/internal/cli"
	"spillway.dev/spillway/internal/diagnosis/drops"
	"spillway.dev/spillway/internal/page"
)

func TestDropsRefusesWhatItCannotFilterBy(t *testing.T) {
	for _, row := range []struct{ args, want string }{
		{"--address 10.0.0", "--address"},
		{"--port 0", "--port 0"},
		{"--port 65536", "--port 65536"},
		{"--protocol tpc", "--protocol"},
		{"--netns nowhere", "no such network namespace"},
		{"--pod nowhere", "nowhere"},
		{"--rate -1", "rate -1"},
		{"--for -1s", "--for"},
		{"--reason A,!B", "not both"},
		{"-o xml", "xml"},
		{"more", "more"},
	} {
		var out, errs bytes.Buffer
		if code := run(append([]string{"drops"}, strings.Fields(row.args)...), &out, &errs); code != cli.ExitUsage ||
			!strings.Contains(errs.String(), row.want) || strings.Count(errs.String(), "\n") != 1 {
			t.Errorf("%s: exit code %d: %s", row.args, code, errs.String())
		}
	}
}

func TestDropsPrintsPacketHopAndMeaning(t *testing.T) {
	d := drops.Drop{
		Reason: "NETFILTER_DROP", By: "nft", Meaning: "a rule dropped it",
		Packet: drops.Packet{Protocol: "tcp", TCPFlags: "S", Source: netip.MustParseAddr("fd00::1"), SourcePort: 4000,
			Destination: netip.MustParseAddr("10.0.0.1"), DestinationPort: 80, Length: 60},
		Place: drops.Place{Namespace: "cni-1", Pod: "web-0", Interface: "eth0", Hook: "INPUT", Table: "filter", Chain: "in", Location: "nft_do_chain+0x1"},
	}
	var table bytes.Buffer
	if err := (dropResult{&d, explained{}}).Write(&table); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		"tcp S [fd00::1]:4000 > 10.0.0.1:80, 60 bytes\n",
		"  NETFILTER_DROP in pod web-0 (cni-1) from eth0 at INPUT, nft filter/in, nft_do_chain+0x1\n",
		"  a rule dropped it\n",
	} {
		if !strings.Contains(table.String(), want) {
			t.Errorf("%q is not in %q", want, table.String())
		}
	}
	d.Pod, d.Interface, d.Table = "web\x1b[2J", "a\nb", "t\x07"
	table.Reset()
	if err := (dropResult{&d, explained{}}).Write(&table); err != nil {
		t.Fatal(err)
	}
	if strings.ContainsAny(table.String(), "\x1b\x07") || strings.Count(table.String(), "\n") != 3 || !strings.Contains(table.String(), `web\x1b[2J`) {
		t.Errorf("a terminal acts on %q", table.String())
	}
	var out strings.Builder
	c := config{output: cli.JSON}
	if err := c.print(&out, dropResult{&d, explained{}}); err != nil {
		t.Fatal(err)
	}
	if strings.Count(out.String(), "\n") != 1 || !strings.Contains(out.String(), `"namespace":"cni-1"`) {
		t.Errorf("%s", &out)
	}
	for line := range strings.Lines(wrapped(t, &d)) {
		if n := len([]rune(line)) - 1; n > 80 {
			t.Errorf("%d columns: %q", n, line)
		}
	}
}

// An explanation is printed again when another policy, for example, is the cause.
func TestDropsExplainsACauseOnce(t *testing.T) {
	told := explained{}
	for i, row := range []struct {
		reason, chain, meaning string
		lines                  int
	}{
		{"NETFILTER_DROP", "in", "policy a denied it", 3},
		{"NETFILTER_DROP", "in", "policy a denied it", 2},
		{"NO_SOCKET", "", "nothing listens", 3},
		{"NETFILTER_DROP", "in", "policy a denied it", 2},
		{"NETFILTER_DROP", "out", "policy a denied it", 3},
		{"NETFILTER_DROP", "in", "policy b denied it", 3},
		{"NETFILTER_DROP", "in", "policy a denied it", 3},
	} {
		d := drops.Drop{Reason: row.reason, Meaning: row.meaning, Place: drops.Place{Chain: row.chain}}
		var out strings.Builder
		if err := (dropResult{&d, told}).Write(&out); err != nil {
			t.Fatal(err)
		}
		if strings.Count(out.String(), "\n") != row.lines || strings.Contains(out.String(), row.meaning) != (row.lines == 3) {
			t.Errorf("drop %d: %q, want %d lines", i, out.String(), row.lines)
		}
		// A program reads each line alone.
		out.Reset()
		if err := (&config{output: cli.JSON}).print(&out, dropResult{&d, told}); err != nil || !strings.Contains(out.String(), row.meaning) {
			t.Errorf("drop %d: %v, %s", i, err, &out)
		}
	}
}

// wrapped prints a drop on a terminal of 80 columns.
func wrapped(t *testing.T, d *drops.Drop) string {
	t.Helper()
	var out strings.Builder
	d.Meaning = strings.Repeat("a long explanation ", 12)
	if err := (dropResult{d, explained{}}).Write(&page.Page{Writer: &out, Width: 80}); err != nil {
		t.Fatal(err)
	}
	return out.String()
}

func TestTheSummaryNamesWhatWasNotShown(t *testing.T) {
	got := reasonsText(map[string]uint64{"NETFILTER_DROP": 4981, "NO_SOCKET": 2, "TCP_CSUM": 1}, map[string]uint64{"NETFILTER_DROP": 98, "NO_SOCKET": 2, "TCP_LISTEN_OVERFLOW": 3})
	if want := "NETFILTER_DROP 4981 (98 shown), TCP_LISTEN_OVERFLOW 3, NO_SOCKET 2, TCP_CSUM 1 (0 shown)"; got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
}
